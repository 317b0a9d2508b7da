"""Faults of routes and refusals, which all dialects share, by check."""

from __future__ import annotations

from tests.support.faulty_server import Exchange, Fault, deep, in_body, on, put, with_status


def as_text(exchange: Exchange) -> None:
    exchange.content_type = "text/plain"


def as_page(exchange: Exchange) -> None:
    if exchange.status >= 400:
        exchange.content_type, exchange.body = "text/html", b"<h1>No</h1>"


def as_nothing(exchange: Exchange) -> None:
    exchange.body = b""


REFUSALS: list[Fault] = [
    with_status(500),
    with_status(200),
    as_page,
    in_body(lambda _: {"detail": "No."}, refusals=True),
    in_body(deep("error", "message", value=None), refusals=True),
]
SHARED: dict[str, list[Fault]] = {
    "json": [as_text],
    "bad_json": REFUSALS,
    "wrong_type": REFUSALS,
    "out_of_range": REFUSALS,
    "unknown_model": REFUSALS,
    "method": [with_status(200), with_status(500)],
    "too_long": [with_status(500), as_page, in_body(lambda _: {"detail": "No."}, refusals=True)],
    "wrong_key": REFUSALS,
    "sdk_answer": [with_status(500, when=200), in_body(put(model=5))],
    "sdk_stream": [with_status(500, when=200), as_nothing],
}
OPENAI: dict[str, list[Fault]] = {
    "models": [
        in_body(put(object="array"), path="/models"),
        in_body(put(data=[]), path="/models"),
        in_body(deep("data", 0, "created", value="now"), path="/models"),
    ],
    "model": [in_body(put(id="other"), path="/models/"), on("/models/", with_status(400))],
    "error_object": [in_body(deep("error", "code", value=400), refusals=True)],
}
SAMPLED = ("wrong_type", "out_of_range", "sdk_stream")
"""The checks whose requests have a temperature, or a stream, which decisions lack."""
FAULTS: dict[str, list[Fault]] = {
    **{f"{speech}.{name}": faults for speech in ("responses", "chat", "messages") for name, faults in SHARED.items()},
    **{f"{speech}.{name}": faults for speech in ("responses", "chat") for name, faults in OPENAI.items()},
    **{f"decisions.{name}": faults for name, faults in SHARED.items() if name not in SAMPLED},
    "messages.error_object": [
        in_body(put(type="failure"), refusals=True),
        in_body(deep("error", "type", value="BadRequestError"), refusals=True),
        in_body(lambda body: {"error": body["error"]}, refusals=True),
    ],
    "messages.models": [
        in_body(deep("data", 0, "display_name", value=5), path="/models"),
        in_body(put(data=[]), path="/models"),
    ],
    "responses.bad_item": REFUSALS,
    **{f"{speech}.{name}": REFUSALS for speech in ("chat", "messages") for name in ("missing", "bad_role")},
}

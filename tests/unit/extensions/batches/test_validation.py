"""The lines of an input file: what is read, what is refused, in pieces of any size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.extensions.batches import validation
from penstock.extensions.batches.batch import NewLine
from penstock.extensions.batches.prefixes import FIRST, prefix_of
from penstock.extensions.batches.validation import MOST_ERRORS, Reading
from penstock.pipeline.errors import ModelNotFound

URL = "/v1/chat/completions"
LONGEST = 2_000


def served(name: str | None) -> str:
    if name not in (None, "tiny", "other"):
        raise ModelNotFound(f"This server serves tiny, not {name!r}.", param="model")
    return name or "tiny"


def line(custom_id: Any = "a", **changes: Any) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body} | changes)


def read(content: bytes, size: int = 7) -> tuple[Reading, list[NewLine]]:
    reading, found = Reading(URL, served, LONGEST), list[NewLine]()
    for first in range(0, len(content), size):
        found += reading.feed(content[first : first + size])
    return reading, [*found, *reading.finish()]


def errors(content: bytes | str) -> list[tuple[str, int | None, str | None]]:
    content = content if isinstance(content, bytes) else content.encode()
    return [(error.code, error.line, error.param) for error in read(content)[0].errors]


def test_requests_are_read_with_the_numbers_of_their_lines() -> None:
    reading, found = read("\n".join([line("a"), "", "  \t", line("b", body={"model": "other"})]).encode())
    assert [(each.number, each.custom_id, each.model) for each in found] == [(1, "a", "tiny"), (4, "b", "other")]
    assert json.loads(found[1].body) == {"model": "other"}
    assert (reading.count, reading.errors, reading.models) == (2, [], {"tiny", "other"})


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n \n"])
@pytest.mark.parametrize("between", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
def test_ends_of_lines_and_mark_of_order(end: str, between: str, mark: bytes) -> None:
    reading, found = read(mark + (between.join([line("a"), line("b")]) + end).encode())
    assert ([each.custom_id for each in found], reading.errors) == (["a", "b"], [])


@given(st.integers(1, 400), st.lists(st.sampled_from([line("é"), "", "{", line("b", url="/v1/x")]), max_size=6))
@settings(deadline=None)
def test_pieces_of_any_size_give_the_same(size: int, lines: list[str]) -> None:
    content = "\n".join(lines).encode()
    whole, cut = read(content, 10**6), read(content, size)
    assert (whole[0].errors, whole[1]) == (cut[0].errors, cut[1])


WRONG: Iterable[tuple[str, Any, list[tuple[str, str | None]]]] = [
    ("no JSON", "{invalid", [("invalid_json_line", None)]),
    ("two values", "{} {}", [("invalid_json_line", None)]),
    ("a text", '"a"', [("invalid_json_line", None)]),
    ("a list", "[1]", [("invalid_json_line", None)]),
    ("not UTF-8", line("a").encode().replace(b"Hi", b"\xff\xfe"), [("invalid_json_line", None)]),
    ("UTF-16", line("a").encode("utf-16"), [("invalid_json_line", None)]),
    ("deep", line("a", body={"x": 1}).replace('{"x": 1}', "[" * 100_000), [("request_too_large", None)]),
    ("NaN", line("a", body={"temperature": float("nan")}), [("invalid_json_line", None)]),
    (
        "empty",
        "{}",
        [("missing_required_parameter", name) for name in ("custom_id", "method", "url", "body")],
    ),
    ("null name", line(None), [("missing_required_parameter", "custom_id")]),
    ("a number", line(5), [("invalid_type", "custom_id")]),
    ("url of a list", line("a", url=[URL]), [("invalid_type", "url")]),
    ("body of a list", line("a", body=[1]), [("invalid_type", "body")]),
    ("body of a text", line("a", body="{}"), [("invalid_type", "body")]),
    ("method", line("a", method="GET"), [("invalid_value", "method")]),
    ("url", line("a", url="/v1/embeddings"), [("invalid_url", "url")]),
    ("stream", line("a", body={"model": "tiny", "stream": True}), [("streaming_unsupported", "body.stream")]),
    ("model", line("a", body={"model": "none"}), [("model_not_found", "body.model")]),
    ("huge", line("a" * LONGEST), [("request_too_large", None)]),
]


@pytest.mark.parametrize(("content", "expected"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_mistake_is_named_by_its_line(content: str | bytes, expected: list[tuple[str, str | None]]) -> None:
    content = content if isinstance(content, bytes) else content.encode()
    whole = line("first").encode() + b"\n" + content.replace(b"\n", b" ") + b"\n" + line("last").encode()
    assert errors(whole) == [(code, 2, param) for code, param in expected]


@pytest.mark.parametrize(
    "body", [{}, {"model": None}, {"model": 5}, {"stream": "yes"}, {"stream": None}, {"messages": 1}]
)
def test_what_a_request_has_wrong_is_for_its_answer_to_say(body: dict[str, Any]) -> None:
    reading, found = read(line(body=body).encode())
    assert (reading.errors, len(found)) == ([], 1)


def test_lone_surrogate_is_read_as_in_any_body() -> None:
    text = line("a\ud800", body={"model": "tiny", "messages": "\udc00"})
    ((_, found),) = [read(text.encode())]
    assert [each.custom_id for each in found] == ["a\ufffd"]


def test_names_stand_once() -> None:
    assert errors("\n".join([line("a"), line("b"), line("a"), line("a")])) == [
        ("duplicate_custom_id", 3, "custom_id"),
        ("duplicate_custom_id", 4, "custom_id"),
    ]


@pytest.mark.parametrize("content", ["", "\n\n", " \r\n", "\ufeff"])
def test_file_without_requests(content: str) -> None:
    assert errors(content) == [("empty_file", None, None)]


def test_file_with_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_LINES", 3)
    assert errors("\n".join(line(str(number)) for number in range(3))) == []
    assert errors("\n".join(line(str(number)) for number in range(4))) == [("too_many_tasks", None, None)]


def test_file_with_too_many_blank_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_BREAKS", 20)
    assert errors(line() + "\n" * 20) == []
    assert errors(line() + "\n" * 21) == [("too_many_tasks", None, None)]


def test_mistakes_are_bounded() -> None:
    assert len(errors("{\n" * (MOST_ERRORS + 50))) == MOST_ERRORS


def test_long_line_is_never_held() -> None:
    reading = Reading(URL, served, LONGEST)
    for _ in range(100):
        reading.feed(bytes(LONGEST))
        assert reading.held <= LONGEST
    reading.feed(b"\n" + line().encode())
    assert [each.custom_id for each in reading.finish()] == ["a"]
    assert [(error.code, error.line) for error in reading.errors] == [("request_too_large", 1)]


def test_lines_that_begin_alike_sort_together() -> None:
    systems = [f"You are {who}. " * 40 for who in ("a poet", "a judge", "a cook")]
    lines = [
        line(f"{number}", body={"messages": [{"role": "system", "content": systems[number % 3]}, {"n": number}]})
        for number in range(60)
    ]
    _, found = read("\n".join(lines).encode(), 10**6)
    order = [int(each.custom_id) % 3 for each in sorted(found, key=lambda each: each.prefix)]
    assert sum(one != two for one, two in pairwise(order)) == 2


def test_models_stay_apart() -> None:
    lines = [
        line(str(number), body={"model": ("tiny", "other")[number % 2], "messages": "x" * 500}) for number in range(8)
    ]
    _, found = read("\n".join(lines).encode(), 10**6)
    assert [each.model for each in sorted(found, key=lambda each: each.prefix)] in (
        ["tiny"] * 4 + ["other"] * 4,
        ["other"] * 4 + ["tiny"] * 4,
    )


@given(st.binary(max_size=3 * FIRST), st.binary(max_size=300), st.binary(max_size=300))
def test_prefix_of_texts_that_begin_alike(shared: bytes, one: bytes, two: bytes) -> None:
    prefixes = [prefix_of([shared + end]) for end in (one, two)]
    pieces = sum(1 for level in range(4) if len(shared) >= FIRST << level)
    assert prefixes[0][: 6 * pieces] == prefixes[1][: 6 * pieces]
    assert len(prefixes[0]) <= 96

"""Keys that may use some of the models: for their clients, the others do not exist."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.pipeline.errors import EngineOverloaded
from tests.support.api_clients import Json
from tests.support.several import SeveralServer, says, several_models, text_of

KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("all", "small", "claude", "sql", "none")}
LINES = {
    "all": "",
    "small": "models=small",
    "claude": "models=claude-*",  # the key names the big model by a pattern of its names
    "sql": "models=sql,small",
    "none": "models=other-*",
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[SeveralServer, None]:
    """A server of two models, of which the big one has other names."""
    file = tmp_path / "keys"
    file.write_text("".join(f"{KEYS[name]} name={name} {words}\n" for name, words in LINES.items()))
    engines = {"big": says("I am big.", "org/big", "sql"), "small": says("I am small.")}
    tables = {"big": {"names": ["claude-*", "sql"]}}
    async with several_models(tmp_path, engines, tables, api_key_file=file) as served:
        yield served


async def asked(served: SeveralServer, key: str, method: str, path: str, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    json = body or None
    async with served.client.request(method, f"{served.url}{path}", json=json, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("key", "model", "says"),
    [
        ("all", "big", "big"),
        ("all", "small", "small"),
        ("all", None, "big"),
        ("small", "small", "small"),
        ("small", None, "small"),
        ("small", "big", None),
        ("small", "claude-opus", None),
        ("claude", "claude-opus", "big"),
        ("claude", None, "big"),
        ("claude", "small", None),
        ("sql", "sql", "big"),
        ("sql", "small", "small"),
        ("none", "small", None),
        ("none", None, None),
    ],
)
async def test_key_uses_its_models_alone(served: SeveralServer, key: str, model: str | None, says: str | None) -> None:
    named = {} if model is None else {"model": model}
    status, answer = await asked(served, key, "POST", "/v1/responses", input="Hi", **named)
    if says:
        assert (status, text_of(answer)) == (200, f"I am {says}.")
        return
    assert (status, answer["error"]["param"]) == (404, "model")
    others = {"small": "big", "claude": "small", "none": "small"}
    assert others[key] not in answer["error"]["message"].replace(f"not '{model}'", "")


@pytest.mark.parametrize(
    ("key", "listed"),
    [("all", {"big", "sql", "small"}), ("small", {"small"}), ("sql", {"sql", "small"}), ("none", set())],
)
async def test_models_are_listed_for_the_key(served: SeveralServer, key: str, listed: set[str]) -> None:
    status, answer = await asked(served, key, "GET", "/v1/models")
    if listed:
        assert (status, {each["id"] for each in answer["data"]}) == (200, listed)
    else:
        assert status == 404 or answer["data"] == []
    for name in ("big", "small"):
        status, _ = await asked(served, key, "GET", f"/v1/models/{name}")
        assert status == (200 if name in listed else 404)


async def test_conversation_does_not_reach_a_model_that_its_key_may_not_use(served: SeveralServer) -> None:
    _, first = await asked(served, "small", "POST", "/v1/responses", input="Hi")
    going_on = {"input": "More", "previous_response_id": first["id"]}
    status, _ = await asked(served, "small", "POST", "/v1/responses", **going_on, model="big")
    assert status == 404
    status, answer = await asked(served, "small", "POST", "/v1/responses", **going_on)
    assert (status, answer["model"]) == (200, "small")


@pytest.mark.parametrize(
    "path", ["/tokenize", "/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/decisions"]
)
async def test_no_route_gives_a_key_another_model(served: SeveralServer, path: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "Hi"},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/decisions": {"input": "Hi", "questions": [{"type": "predicate", "instructions": "It is big."}]},
        "/v1/messages": {
            "messages": messages,
            "max_tokens": 2000,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    }
    body = bodies.get(path, {"messages": messages})
    status, answer = await asked(served, "small", "POST", path, model="big", **body)
    assert status == 404, answer
    assert served.opened == []


async def test_text_without_a_model_is_that_of_the_first_that_the_key_may_use(served: SeveralServer) -> None:
    status, answer = await asked(served, "small", "POST", "/tokenize", prompt="Hi", return_token_strs=True)
    assert (status, answer["token_strs"], served.opened) == (200, ["Hi"], ["small"])


# Another model in place of one


STAND_INS = [("", True), ("models=big,small", True), ("models=big,ti*", True), ("models=big,other", False)]
"""The words of keys, and whether they may use the model ``small``, which is also called ``tiny``."""


@asynccontextmanager
async def standing_in(folder: Path, words: str, big: Json, **small: Any) -> AsyncGenerator[SeveralServer, None]:
    """Serve a big model that cannot answer, a small one that stands in for it, and one key."""
    file = folder / "keys"
    file.write_text(f"{KEYS['all']} name=all {words}\n")
    full = EngineOverloaded("full")
    engines = {"big": says("I am big.", refusal=full), "small": says("I am small."), "other": says("I am other.")}
    tables = {"big": {"instead": "small", **big}, "small": {"names": ["tiny"], **small}}
    async with several_models(folder, engines, tables, api_key_file=file) as served:
        yield served


@pytest.mark.parametrize(("words", "may"), STAND_INS)
@pytest.mark.parametrize("big", [{}, {"engine": ["http://127.0.0.1:9"]}], ids=["full", "down"])
async def test_a_model_stands_in_for_keys_that_may_use_it(tmp_path: Path, big: Json, words: str, may: bool) -> None:
    async with standing_in(tmp_path, words, big) as served:
        status, answer = await asked(served, "all", "POST", "/v1/responses", input="Hi", model="big")
        if may:
            assert (status, answer["model"], text_of(answer)) == (200, "small", "I am small.")
            return
        assert status == 503
        assert "small" not in str(answer)
        assert "small" not in served.opened


@pytest.mark.parametrize(("words", "may"), STAND_INS)
async def test_a_model_that_is_passed_on_stands_in_for_keys_that_may_use_it(
    tmp_path: Path, words: str, may: bool
) -> None:
    app = web.Application()
    app.router.add_post("/v1/embeddings", answered)
    async with TestServer(app) as upstream:
        big = {"kind": "embed", "engine": ["http://127.0.0.1:9"]}
        url = str(upstream.make_url("")).rstrip("/")
        async with standing_in(tmp_path, words, big, kind="embed", engine=[url]) as served:
            status, _ = await asked(served, "all", "POST", "/v1/embeddings", input="Hi", model="big")
            assert status == (200 if may else 502)


async def answered(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "model": "e", "data": []})

"""The models that a key may use: at every door, any other one is unknown."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_clients import Json
from tests.support.several import SeveralServer, says, several_models

ALL, SMALL, OPUS = "sk-all-0123456789abcdef", "sk-small-0123456789abcdef", "sk-opus-0123456789abcdef"
CHAT = [{"role": "user", "content": "Hi"}]
TABLES: Json = {
    "big": {"names": ["large", "claude-*"]},
    "vectors": {"engine": ["http://127.0.0.1:9"], "kind": "embed"},
}

DOORS: dict[str, Json] = {
    "/v1/responses": {"input": "Hi"},
    "/openresponses/v1/responses": {"input": "Hi"},
    "/v1/responses#stream": {"input": "Hi", "stream": True},
    "/v1/responses#background": {"input": "Hi", "background": True},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 10},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/decisions": {"input": "Hi", "questions": [{"type": "predicate", "instructions": "It is a greeting."}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/embeddings": {"input": "Hi"},
}
"""The routes that take the name of a model, each with the rest of a body."""

ANSWERED = DOORS.keys() - {"/v1/embeddings", "/v1/decisions"}
"""Those to which the engines of these tests have an answer."""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[SeveralServer, None]:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALL} name=all\n{SMALL} name=small models=small\n{OPUS} name=opus models=claude-opus\n")
    engines = {name: says(f"I am {name}.") for name in ("big", "small", "vectors")}
    async with several_models(tmp_path, engines, TABLES, api_key_file=keys) as served:
        yield served


async def told(served: SeveralServer, key: str, method: str, path: str, body: Json | None = None) -> tuple[int, str]:
    """The status and the text of an answer, without the id of its request."""
    headers = {"Authorization": f"Bearer {key}"}
    url = served.url + path.partition("#")[0]
    async with served.client.request(method, url, json=body, headers=headers) as answer:
        text = await answer.text()
        if answer.status >= 400:
            text = json.dumps({name: part for name, part in json.loads(text).items() if name != "request_id"})
        return answer.status, text


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", ["big", "large", "claude-opus"])
async def test_a_model_of_others_is_an_unknown_one(served: SeveralServer, door: str, model: str) -> None:
    unknown = "x" * len(model)
    refused = await told(served, SMALL, "POST", door, {**DOORS[door], "model": model})
    of_unknown = await told(served, SMALL, "POST", door, {**DOORS[door], "model": unknown})
    assert refused[0] == 404
    assert (refused[0], refused[1].replace(model, unknown)) == of_unknown
    assert "vectors" not in refused[1]
    assert served.opened == []


@pytest.mark.parametrize("door", sorted(ANSWERED))
async def test_the_models_of_a_key_are_open(served: SeveralServer, door: str) -> None:
    status, text = await told(served, SMALL, "POST", door, {**DOORS[door], "model": "small"})
    assert status == 200, text


async def test_a_key_may_name_what_a_pattern_of_a_model_covers(served: SeveralServer) -> None:
    status, text = await told(served, OPUS, "POST", "/v1/messages", {**DOORS["/v1/messages"], "model": "claude-opus"})
    assert status == 200, text
    assert (await told(served, OPUS, "POST", "/v1/responses", {"input": "Hi", "model": "small"}))[0] == 404


async def test_a_key_lists_and_retrieves_its_models(served: SeveralServer) -> None:
    _, listed = await told(served, SMALL, "GET", "/v1/models")
    assert [each["id"] for each in json.loads(listed)["data"]] == ["small"]
    _, all_listed = await told(served, ALL, "GET", "/v1/models")
    assert {"big", "small"} <= {each["id"] for each in json.loads(all_listed)["data"]}
    assert (await told(served, SMALL, "GET", "/v1/models/small"))[0] == 200
    for name in ("big", "large", "claude-opus", "vectors", "bag"):
        assert (await told(served, SMALL, "GET", f"/v1/models/{name}"))[0] == 404


async def test_the_default_model_is_the_first_of_the_key(served: SeveralServer) -> None:
    status, text = await told(served, SMALL, "POST", "/v1/responses", {"input": "Hi"})
    assert (status, json.loads(text)["model"]) == (200, "small")
    for door in ANSWERED - {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses/compact"}:  # they need a model
        status, text = await told(served, SMALL, "POST", door, DOORS[door])
        assert status == 200, (door, text)
    assert served.opened == ["small"]


@pytest.mark.parametrize("door", ["previous_response_id", "conversation"])
async def test_a_conversation_goes_on_with_models_of_the_key_alone(served: SeveralServer, door: str) -> None:
    path = "/v1/responses"
    if door == "conversation":
        _, made = await told(served, SMALL, "POST", "/v1/conversations", {})
        link: Any = json.loads(made)["id"]
    else:
        _, begun = await told(served, SMALL, "POST", path, {"input": "Hi", "model": "small"})
        link = json.loads(begun)["id"]
    status, text = await told(served, SMALL, "POST", path, {"input": "Hi", "model": "big", door: link})
    assert (status, json.loads(text)["error"]["param"]) == (404, "model")
    assert (await told(served, SMALL, "POST", path, {"input": "Hi", "model": "small", door: link}))[0] == 200


async def test_a_socket_refuses_the_models_of_others(served: SeveralServer) -> None:
    headers = {"Authorization": f"Bearer {SMALL}"}
    async with served.client.ws_connect(f"{served.url}/v1/responses", headers=headers) as socket:
        await socket.send_json({"type": "response.create", "model": "big", "input": "Hi"})
        event = json.loads((await socket.receive()).data)
        assert (event["type"], event["status"], event["error"]["param"]) == ("error", 404, "model")
        assert "'small'" in event["error"]["message"]

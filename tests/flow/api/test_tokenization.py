"""``/tokenize`` and ``/detokenize``: the tokens are those that the engine reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.api.http.auth import Keys
from penstock.pipeline.frames import ItemDelta, ParsedFrame, ResolvedRequest
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.chat.standalone import OwnParsers
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE
from tests.support.chat_templates import model_with_template, vocabulary
from tests.support.server import ScriptedServer, running_server, script

KEY = "a-key-of-a-client"
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "Be brief."}, USER], "tools": [FUNCTION], "tool_choice": "auto"},
    {"messages": [USER, {"role": "assistant", "content": "Ho", "reasoning": "Hm."}, USER], "reasoning_effort": "high"},
]


@pytest.fixture(params=["harmony", "chat"])
async def any_served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    parsers = OwnParsers(vocabulary(), None, None)
    model = model_with_template(parsers=parsers) if request.param == "chat" else None
    async with running_server(
        ScriptedEngine(script("<|channel|>final<|message|>Yes.")), tmp_path, model=model
    ) as served:
        yield served


@pytest.mark.parametrize("body", CHATS)
async def test_chat_has_the_tokens_that_the_engine_reads(any_served: ScriptedServer, body: dict[str, Any]) -> None:
    status, answer = await any_served.post({**body, "return_token_strs": False}, "/tokenize")
    assert (status, any_served.engine.prompts) == (200, [])
    _, chat = await any_served.post(body, "/v1/chat/completions")
    assert tuple(answer["tokens"]) == any_served.engine.prompts[0].token_ids
    assert answer == {
        "count": chat["usage"]["prompt_tokens"],
        "max_model_len": any_served.engine.context_length,
        "tokens": answer["tokens"],
        "token_strs": None,
    }


async def test_text_has_the_tokens_that_a_completion_reads(any_served: ScriptedServer) -> None:
    prompt = "Once upon a <|im_end|><|end|> time"
    _, answer = await any_served.post({"prompt": prompt, "return_token_strs": True}, "/tokenize")
    await any_served.post({"prompt": prompt}, "/v1/completions")
    assert tuple(answer["tokens"]) == any_served.engine.prompts[0].token_ids
    assert "".join(answer["token_strs"]) == prompt
    assert (await any_served.post({"tokens": answer["tokens"]}, "/detokenize"))[1] == {"prompt": prompt}


PADDING = 200_001
"""An id below the sizes of the engine's vocabularies that has no token."""


@pytest.mark.parametrize("around", [[], [5, 9], [PADDING, PADDING + 3, PADDING]])
@pytest.mark.parametrize("token", [0, PADDING, VOCABULARY_SIZE - 1, VOCABULARY_SIZE, 2**31 - 1])
async def test_tokens_are_those_that_completions_take(
    any_served: ScriptedServer, around: list[int], token: int
) -> None:
    tokens = [*around, token, *around]
    status, answer = await any_served.post({"tokens": tokens}, "/detokenize")
    body = {"prompt": tokens, "echo": True, "max_tokens": 0, "skip_special_tokens": False}
    completed, completion = await any_served.post(body, "/v1/completions")
    assert (status == 200) is (completed == 200) is (token < VOCABULARY_SIZE)
    if status == 200:
        assert answer["prompt"] == completion["choices"][0]["text"]
        assert answer["prompt"].count(f"<|reserved_{PADDING}|>") == tokens.count(PADDING)
    else:
        assert answer["error"]["param"] == "tokens"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_unknown_names_are_logged(
    any_served: ScriptedServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level("INFO")
    for body in ({"prompt": "a", "tokens": [1]}, {"messages": [USER]}):
        if path == "/tokenize" or "tokens" in body:
            caplog.clear()
            assert (await any_served.post(body | {"inputt": 1}, path))[0] == 200
            assert [line for line in caplog.messages if "Ignored unknown" in line and "inputt" in line]


async def test_refused_length_is_not_that_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stages.render.truncation.COUNTED", 100)
    monkeypatch.setattr("penstock.api.routes.tokenization.COUNTED", 100)
    async with running_server(ScriptedEngine(context_length=50), tmp_path) as served:
        assert (await served.post({"prompt": " a" * 100}, "/tokenize"))[1]["count"] == 100
        for body in ({"prompt": " a" * 101}, {"messages": [USER | {"content": " a" * 101}]}):
            status, answer = await served.post(body, "/tokenize")
            assert (status, "more than 100 tokens" in answer["error"]["message"]) == (400, True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[asyncio.Runner, ScriptedServer], None, None]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        served = running_server(ScriptedEngine(), tmp_path_factory.mktemp("tokens"), model=model_with_template())
        yield runner, runner.run(stack.enter_async_context(served))
        runner.run(stack.aclose())


@given(st.text(st.characters(codec="utf-8")))
@example("")
@example("<|im_start|>user\n<think> </think>")
def test_text_comes_back(target: tuple[asyncio.Runner, ScriptedServer], text: str) -> None:
    runner, served = target
    status, answer = runner.run(served.post({"prompt": text}, "/tokenize"))
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    assert runner.run(served.post({"tokens": answer["tokens"]}, "/detokenize")) == (200, {"prompt": text})


@pytest.mark.parametrize("count", [0, 1_500])
async def test_any_number_of_tokens_is_a_text(served: ScriptedServer, count: int) -> None:
    text = " word" * count
    _, answer = await served.post({"prompt": text, "return_token_strs": True}, "/tokenize")
    assert (answer["count"], answer["token_strs"]) == (count, [" word"] * count)
    assert await served.post({"tokens": answer["tokens"]}, "/detokenize") == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [USER], "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"messages": [USER], "prompt": "a"}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, 400, None),
        ("/tokenize", b"[]", 400, None),
        ("/tokenize", b"{", 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31 - 1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "model"),
    ],
)
async def test_wrong_bodies_are_refused(
    served: ScriptedServer, path: str, body: Any, status: int, param: str | None
) -> None:
    answered, answer = await served.post(body, path)
    assert answered == status
    if param is not None:
        assert answer["error"]["param"] == param


async def test_place_of_what_is_wrong_is_that_in_the_chat(served: ScriptedServer) -> None:
    messages = [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]
    _, answer = await served.post({"messages": messages}, "/tokenize")
    assert answer["error"]["param"] == "messages[1].tool_call_id"


async def test_a_key_is_needed(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(), tmp_path, keys=Keys(given=[KEY])) as served:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await served.post(body, path))[0] == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            async with served.client.post(served.url + path, json=body, headers=headers) as answer:
                assert answer.status == 200


async def test_server_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    async def speak(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        async for _ in source:
            yield ItemDelta("Hello.")

    async with running_server(
        ScriptedEngine(), tmp_path, edit=lambda pipeline: pipeline.replace("parse", speak, first="render")
    ) as served:
        decision = {"input": "a", "questions": [{"type": "predicate", "instructions": "It is a letter."}]}
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/decisions", decision),
        ):
            status, answer = await served.post(body, path)
            assert (status, answer["error"]["code"]) == (400, "unsupported_operation")

"""``return_token_ids``: chats and completions with the tokens of their prompts and of what the model wrote."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import (
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ResolvedRequest,
    TurnFinished,
)
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.chat_streams import chunks_of
from tests.support.chat_templates import model_with_images
from tests.support.server import CALL, HELLO, WEATHER, ScriptedServer, running_server, script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: Any = {"role": "user", "content": "Hi"}
WEATHER_FUNCTION: Any = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "parameters")}}
CUT = "<|channel|>final<|message|>One two"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL
BODIES: dict[str, Any] = {"messages": [USER], "tools": [WEATHER_FUNCTION], "return_token_ids": True}


@pytest.fixture(params=[1, 3, 1000])
async def asked(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ScriptedServer]:
    """A server whose engine gives this many tokens at once."""
    async with running_server(ScriptedEngine(Script(chunk_size=request.param)), tmp_path) as served:
        yield served


def say(served: ScriptedServer, text: str, **options: Any) -> list[int]:
    """Have the model write a text, and return its tokens."""
    served.engine.script = script(text, chunk_size=served.engine.script.chunk_size, **options)
    return list(served.engine.script.token_ids)


def joined(chunks: list[Any], index: int = 0) -> list[int]:
    of_choice = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [token for choice in of_choice for token in choice["token_ids"]]


@pytest.mark.parametrize("text", [HELLO, CALL, PREAMBLE, CUT, "<|channel|>analysis<|message|>Hm"])
async def test_chat_has_its_tokens_whole_and_as_a_stream(asked: ScriptedServer, text: str) -> None:
    written = say(asked, text)
    status, whole = await asked.post(BODIES, CHAT)
    assert status == 200, whole
    (prompt,) = asked.engine.prompts
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (list(prompt.token_ids), written)
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (
        len(prompt.token_ids),
        len(written),
    )
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(await asked.stream(BODIES | options, CHAT))
    first, *others = chunks
    assert first["prompt_token_ids"] == list(asked.engine.prompts[-1].token_ids)
    assert [chunk for chunk in others if "prompt_token_ids" in chunk] == []
    assert joined(chunks) == written


async def test_tokens_end_where_a_text_of_stop_ended_the_answer(asked: ScriptedServer) -> None:
    say(asked, "<|channel|>final<|message|>One two three four")
    _, whole = await asked.post({"messages": [USER], "stop": "two", "return_token_ids": True}, CHAT)
    (choice,) = whole["choices"]
    assert choice["stop_reason"] == "two"
    assert load_encoding().decode(choice["token_ids"]) == "<|channel|>final<|message|>One two"
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]


async def test_each_choice_has_its_tokens(asked: ScriptedServer) -> None:
    written = say(asked, HELLO)
    body = {"messages": [USER], "n": 3, "return_token_ids": True}
    _, whole = await asked.post(body, CHAT)
    assert [choice["token_ids"] for choice in whole["choices"]] == [written] * 3
    assert whole["prompt_token_ids"] == list(asked.engine.prompts[0].token_ids)
    chunks = chunks_of(await asked.stream({**body, "stream": True, "stream_options": {"include_usage": True}}, CHAT))
    assert [joined(chunks, index) for index in range(3)] == [written] * 3
    assert "prompt_token_ids" not in chunks[-1]


async def test_chat_model_has_its_tokens(tmp_path: Path) -> None:
    chat = model_with_images(sees=False)
    written = chat.vocabulary.encode("Hello.<|im_end|>")
    async with running_server(ScriptedEngine(Script(written)), tmp_path, model=chat) as served:
        body = {"messages": [USER], "return_token_ids": True}
        _, whole = await served.post(body, CHAT)
        assert whole["prompt_token_ids"] == list(served.engine.prompts[0].token_ids)
        assert whole["choices"][0]["token_ids"] == list(written)
        _, whole = await served.post({"prompt": "Once", "return_token_ids": True}, COMPLETIONS)
        assert whole["choices"][0]["prompt_token_ids"] == list(served.engine.prompts[1].token_ids)


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_have_the_tokens_of_their_prompts(asked: ScriptedServer, echo: bool) -> None:
    written = say(asked, "plain text")
    body: dict[str, Any] = {"prompt": ["Once", "Twice upon"], "n": 2, "echo": echo, "return_token_ids": True}
    _, whole = await asked.post(body, COMPLETIONS)
    prompts = [load_encoding().encode(text) for text in ("Once", "Once", "Twice upon", "Twice upon")]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
    assert [choice["token_ids"] for choice in whole["choices"]] == [written] * 4
    chunks = chunks_of(await asked.stream(body | {"stream": True}, COMPLETIONS))
    assert [joined(chunks, index) for index in range(4)] == [written] * 4
    given = [choice for chunk in chunks for choice in chunk["choices"] if "prompt_token_ids" in choice]
    assert {choice["index"]: choice["prompt_token_ids"] for choice in given} == dict(enumerate(prompts))
    assert len(given) == 4


async def test_prompt_alone_has_its_tokens(asked: ScriptedServer) -> None:
    say(asked, "more")
    body = {"prompt": "Once", "max_tokens": 0, "echo": True, "return_token_ids": True}
    _, whole = await asked.post(body, COMPLETIONS)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["token_ids"]) == ("Once", [])
    assert choice["prompt_token_ids"] == load_encoding().encode("Once")


@pytest.mark.parametrize("wanted", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
async def test_no_token_comes_unasked(asked: ScriptedServer, wanted: dict[str, Any]) -> None:
    say(asked, HELLO)
    for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "Hi"})):
        _, whole = await asked.post({**body, **wanted}, path)
        chunks = chunks_of(await asked.stream({**body, **wanted, "stream": True}, path))
        for answer in (whole, *chunks):
            assert "prompt_token_ids" not in answer
            assert [choice for choice in answer["choices"] if {"token_ids", "prompt_token_ids"} & set(choice)] == []


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "Hi"})])
async def test_wrong_wish_is_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with running_server(ScriptedEngine(script(HELLO)), tmp_path) as served:
        status, answer = await served.post({**body, "return_token_ids": "yes"}, path)
        assert (status, answer["error"]["param"]) == (400, "return_token_ids")


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "Hi"})])
async def test_server_that_sees_no_tokens_refuses(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def answer(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
        async for request in source:
            yield GenerationStarted(request.facts, prompt_tokens=0)
            for frame in (MessageOpened("final_answer"), ItemDelta("Hello!"), ItemClosed(complete=True)):
                yield frame
            yield TurnFinished("stop", cached_tokens=0, output_tokens=1, reasoning_tokens=0, duration=0.0)

    def edit(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return pipeline.replace("parse", answer, first="render")

    async with running_server(ScriptedEngine(), tmp_path, edit=edit) as served:
        assert (await served.post(body, path))[0] == 200
        status, answered = await served.post({**body, "return_token_ids": True}, path)
        assert (status, answered["error"]["param"]) == (400, "return_token_ids")

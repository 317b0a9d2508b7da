"""``--record-logprobs``: recordings have the log probability of each token, of which clients see nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import CannotRun, CannotStart
from penstock.pipeline.frames import GenerationStarted, TokenLogprob
from penstock.pipeline.protocol.events import DONE, to_sse
from penstock.pipeline.recordings.format import source_of_recording
from penstock.pipeline.recordings.recorder import Recorder
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.responses import scoring
from tests.support.chat_templates import model_with_images
from tests.support.event_streams import harmony_pipeline, logprobs, read_sse, token_ids
from tests.support.server import (
    CALL,
    HELLO,
    WEATHER,
    ScriptedServer,
    only_recording,
    read_stage,
    running_server,
    script,
)
from tests.support.stores import open_store

SCORES = tuple(TokenLogprob(-number / 8) for number in range(7))
"""Those of the tokens, again and again."""

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"input": "Say hello.", "tools": [WEATHER]}
LOGPROBS = {"include": ["message.output_text.logprobs"]}


@asynccontextmanager
async def recorded(
    folder: Path, written: Script, condition: Condition = ALWAYS, *, asks: bool = True, **options: Any
) -> AsyncGenerator[ScriptedServer, None]:
    """A server whose recordings are complete after the block; if it ``asks``, with log probabilities."""
    taps = Recorder(folder / "recorded", condition=condition)

    def edit(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return taps.tapped(scoring(pipeline, condition.chooses) if asks else pipeline)

    try:
        engine = ScriptedEngine(replace(written, logprobs=SCORES))
        async with running_server(engine, folder, edit=edit, recorded_if=condition, **options) as served:
            yield served
    finally:
        await taps.close()


def without_ids(stream: bytes) -> bytes:
    return re.sub(rb'[a-z]+_[0-9a-f]{16,}|"(?:created|completed)_at":[\d.]+', b"", stream)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", [HELLO, CALL, "<|channel|>analysis<|message|>Hm<|end|>final Bare"])
async def test_client_sees_nothing_of_them(tmp_path: Path, text: str, size: int) -> None:
    seen = []
    for asks in (True, False):
        (folder := tmp_path / str(asks)).mkdir()
        async with recorded(folder, script(text, chunk_size=size), asks=asks) as served:
            seen.append(await served.stream({**BODY, "stream": True}))
            assert served.engine.prompts[0].facts.sampling.logprobs == (0 if asks else None)
    assert without_ids(seen[0]) == without_ids(seen[1])
    folder = only_recording(tmp_path / "True" / "recorded")
    tokens = read_stage(folder, "generate")
    written = token_ids(tokens.frames)
    assert logprobs(tokens.frames) == [score for score, _ in zip(cycle(SCORES), written, strict=False)]
    started = tokens.frames[0]
    assert isinstance(started, GenerationStarted)
    assert started.facts.sampling.logprobs is None
    async with open_store(str(tmp_path / "replay.sqlite3")) as store:
        pipeline = harmony_pipeline(ScriptedEngine(), store)
        async with pipeline.from_stage("parse").open(source_of_recording(tokens)) as events:
            assert b"".join([to_sse(event) async for event in events]) + DONE == seen[0]


async def test_chat_model_and_raw_prompts_tell_nothing_of_them(tmp_path: Path) -> None:
    chat = model_with_images(sees=False)
    written = Script(chat.vocabulary.encode("Hello.<|im_end|>"))
    async with recorded(tmp_path, written, model=chat) as served:
        _, whole = await served.post({"messages": [{"role": "user", "content": "Hi"}]}, CHAT)
        assert whole["choices"][0]["logprobs"] is None
        _, whole = await served.post({"prompt": "Once"}, "/v1/completions")
        assert whole["choices"][0]["logprobs"] is None
        assert [prompt.facts.sampling.logprobs for prompt in served.engine.prompts] == [0, 0]
    for folder in (tmp_path / "recorded").iterdir():
        tokens = read_stage(folder, "generate").frames
        assert len(logprobs(tokens)) == len(token_ids(tokens)) == len(written.token_ids)


async def test_client_that_asks_gets_its_own(tmp_path: Path) -> None:
    seen = []
    for asks in (True, False):
        (folder := tmp_path / str(asks)).mkdir()
        async with recorded(folder, script(), asks=asks) as served:
            seen.append(await served.stream({**BODY, **LOGPROBS, "stream": True, "top_logprobs": 2}))
            assert served.engine.prompts[0].facts.sampling.logprobs == 2
    assert without_ids(seen[0]) == without_ids(seen[1])
    assert any(getattr(event, "logprobs", ()) for event in read_sse(seen[0]))


async def test_engine_is_not_asked_for_what_is_not_recorded(tmp_path: Path) -> None:
    async with recorded(tmp_path, script(), Condition("x-record")) as served:
        await served.post(BODY)
        async with served.client.post(served.url + "/v1/responses", json=BODY, headers={"x-record": "1"}) as answer:
            assert answer.status == 200
        assert [prompt.facts.sampling.logprobs for prompt in served.engine.prompts] == [None, 0]
    assert len(list((tmp_path / "recorded").iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "--record-logprobs needs --record"),
        (("--record", "r", "--no-record-texts"), "log probabilities would tell texts"),
        (("--record", "r", "--record-after", "parse"), "needs generate in --record-after"),
    ],
)
def test_settings_that_would_record_none_are_refused(options: tuple[str, ...], problem: str) -> None:
    assert read_settings(["--record", "r", "--record-logprobs"]).record_logprobs
    with pytest.raises(CannotRun, match=problem):
        read_settings(["--record-logprobs", *options])


def test_backend_of_texts_is_refused() -> None:
    texts = harmony_pipeline(ScriptedEngine()).from_stage("parse")
    with pytest.raises(CannotStart, match="needs the stage generate"):
        scoring(texts, ALWAYS.chooses)

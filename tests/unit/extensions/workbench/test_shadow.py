"""A second engine that reads turns behind the client's back: what it finds and drops, and that it harms nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import SecretStr

from penstock.api.settings import Settings
from penstock.extensions.workbench import shadow as shadowing
from penstock.extensions.workbench.forced.turn import Turn
from penstock.extensions.workbench.shadow import Shadow, Shadowed
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import EngineFailed, InvalidPrompt
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, Prompt, TokenChunk, TokenFrame
from penstock.pipeline.plugins import WrongPlugin, load
from penstock.pipeline.protocol.events import TerminalEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline
from penstock.services.engines.engine import Engine
from tests.support.api_clients import wait_until
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.table_engine import TableEngine, recorded_turn

pytestmark = pytest.mark.io

PROMPT = (1, 2, 3)


def turns(table: TableEngine, **sampling: Any) -> Turn:
    return recorded_turn(PROMPT, table.greedy(PROMPT, 40), **sampling)


def counts() -> dict[str, float]:
    return {
        f"{metric} {label}": REGISTRY.get_sample_value(f"penstock_shadow_{metric}_total", {name: label}) or 0
        for metric, name, labels in (
            ("turns", "outcome", ("same", "changed", "uncounted", "dropped", "too_long", "failed")),
            ("tokens", "verdict", ("same", "changed", "uncounted")),
        )
        for label in labels
    }


def since(before: Mapping[str, float]) -> dict[str, float]:
    return {name: count - before[name] for name, count in counts().items() if count != before[name]}


async def after_reading(engine: TableEngine, *given: Turn) -> dict[str, float]:
    """Return what is counted of turns that an engine has read."""

    async def connect() -> Engine:
        return engine

    before, shadow = counts(), Shadow(connect)
    for turn in given:
        shadow.take(turn)
    async with shadow.running():
        await wait_until(lambda: sum(count for name, count in since(before).items() if "turns" in name) == len(given))
    return since(before)


async def test_engine_that_wrote_a_turn_would_write_it_again() -> None:
    turn = turns(TableEngine(3))
    assert await after_reading(TableEngine(3), turn) == {"turns same": 1, "tokens same": len(turn.tokens)}


async def test_engine_that_differs_is_found_without_generating(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine, turn = TableEngine(3, noise=2.0), turns(TableEngine(3))
    found = await after_reading(engine, turn)
    assert found["turns changed"] == 1
    assert found["tokens changed"] >= 1
    assert [prompt.token_ids for prompt in engine.prompts] == [(*PROMPT, *turn.tokens)]
    assert "The shadow would have changed" in caplog.text


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"grammar": "start: WORD"}], ids=str)
async def test_turn_whose_choices_are_not_known_is_read_and_not_counted(sampling: dict[str, Any]) -> None:
    turn = turns(TableEngine(3), **sampling)
    found = await after_reading(TableEngine(3, noise=2.0), turn)
    assert found == {"turns uncounted": 1, "tokens uncounted": len(turn.tokens)}


@pytest.mark.parametrize("failure", [EngineFailed("It broke."), InvalidPrompt("No such token.")])
async def test_failing_engine_is_counted_and_named_once(failure: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = [turns(TableEngine(3))] * 3
    assert await after_reading(TableEngine(3, failure=failure), *given) == {"turns failed": 3}
    assert len([line for line in caplog.messages if "The shadow cannot read" in line]) == 1


async def test_turn_beyond_the_context_is_not_sent() -> None:
    engine = TableEngine(3, context_length=5)
    assert await after_reading(engine, turns(TableEngine(3))) == {"turns too_long": 1}
    assert engine.prompts == []


async def test_turns_that_do_not_fit_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "MOST_WAITING", 2)
    given = [turns(TableEngine(3))] * 5
    assert (await after_reading(TableEngine(3), *given))["turns dropped"] == 3


async def test_engine_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "PAUSE", 0.01)
    attempts = 0

    async def connect() -> Engine:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise ConnectionError("There is no server.")
        return TableEngine(3)

    before, shadow = counts(), Shadow(connect)
    shadow.take(turns(TableEngine(3)))
    async with shadow.running():
        await wait_until(lambda: since(before).get("turns same") == 1)
    assert attempts == 4


@asynccontextmanager
async def served(engine: FakeVllm, other: FakeVllm) -> AsyncGenerator[None, None]:
    """Answer a request with an engine in whose shadow another stands, for the length of a block."""
    key = SecretStr("k" * 20)
    settings = Settings(
        engine=[engine.url], shadow=[other.url], shadow_share=1.0, shadow_key=key, store="none", sandbox=False
    )
    request = CreateResponse.model_validate({"input": "Hi"})
    async with running_fakes(engine, other), pipeline(settings) as responses:
        async with responses.open(source_of([request])) as events:
            assert isinstance([event async for event in events][-1], TerminalEvent)
        yield


async def test_options_have_a_second_server_read_the_turns_of_a_server() -> None:
    engine, other, before = FakeVllm(), FakeVllm(key="k" * 20), counts()
    async with served(engine, other):
        await wait_until(lambda: since(before).get("turns uncounted") == 1)
    [asked], [read] = engine.prompts, other.prompts
    assert read["token_ids"] == asked["token_ids"] + list(engine.tokens)
    assert [headers["Authorization"] for headers in other.headers] == [f"Bearer {'k' * 20}"]


async def test_second_server_with_other_tokens_reads_no_turn(caplog: pytest.LogCaptureFixture) -> None:
    engine, other = FakeVllm(), FakeVllm(markers=[1, 2, 3])
    async with served(engine, other):
        await wait_until(lambda: "only one of both speaks Harmony" in caplog.text)
    assert other.prompts == []


@pytest.mark.parametrize(
    ("table", "problem"),
    [({}, "urls: "), ({"urls": ["ftp://x"]}, "must begin with http"), ({"urls": ["http://x"], "share": 2}, "share: ")],
)
def test_wrong_table_is_refused(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(WrongPlugin, match=rf"--with shadow: \[stages.shadow\]: .*{problem}"):
        load(["shadow"], {"shadow": table})


class Script:
    """A stage that plays frames for each prompt, and says when it is closed."""

    def __init__(self, frames: list[TokenFrame], error: Exception | None = None) -> None:
        self.frames, self.error, self.closed = frames, error, 0

    async def __call__(self, source: AsyncIterator[Prompt]) -> AsyncGenerator[TokenFrame, None]:
        try:
            async for _ in source:
                for frame in self.frames:
                    yield frame
                if self.error:
                    raise self.error
        finally:
            self.closed += 1


def frames_of(turn: Turn, sizes: list[int]) -> list[TokenFrame]:
    rest, chunks = list(turn.tokens), []
    for size in sizes:
        chunks.append(TokenChunk(tuple(rest[:size])))
        rest = rest[size:]
    return [turn.started, *chunks, TokenChunk(tuple(rest)), GenerationFinished("stop", 0, 0.0)]


async def once(prompt: Prompt) -> AsyncGenerator[Prompt, None]:
    yield prompt


@given(st.lists(st.integers(0, 5), max_size=8), st.sampled_from([0.0, 1.0]))
def test_frames_pass_unchanged_and_a_whole_turn_is_handed_over(sizes: list[int], share: float) -> None:
    turn, taken = turns(TableEngine(3)), list[Turn]()
    script = Script(frames_of(turn, sizes))

    async def passed() -> list[TokenFrame]:
        stage = Shadowed(script, taken.append, share)
        return [frame async for frame in stage(once(turn.prompt))]

    assert asyncio.run(passed()) == script.frames
    assert [(each.prompt, each.tokens) for each in taken] == [(turn.prompt, turn.tokens)] * int(share)


@pytest.mark.parametrize("ends_early", [True, False])
async def test_turn_that_does_not_end_is_not_handed_over(ends_early: bool) -> None:
    turn, taken = turns(TableEngine(3)), list[Turn]()
    script = Script(frames_of(turn, [])[:-1], None if ends_early else EngineFailed("It broke."))
    stream = Shadowed(script, taken.append, 1.0)(once(turn.prompt))
    assert isinstance(await anext(stream), GenerationStarted)
    if not ends_early:
        with pytest.raises(EngineFailed):
            [frame async for frame in stream]
    await stream.aclose()
    assert taken == []
    assert script.closed == 1

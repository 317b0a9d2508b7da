"""The helpers for authors: `check_engine` finds each broken rule and names it, and the others find faults of stages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed, StageFault
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationFinished,
    GenerationStarted,
    ItemDelta,
    ParsedFrame,
    Prompt,
    ResolvedRequest,
    TokenChunk,
    TurnFinished,
)
from penstock.pipeline.protocol.events import to_sse
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope
from penstock.pipeline.recordings.format import UnreadableRecording
from penstock.stages.optional.rewrite import Rewrite
from penstock.testing import (
    BrokenRule,
    Script,
    ScriptedEngine,
    check_engine,
    check_events,
    recorded,
    replayed,
    resolved,
    run,
    turn,
)
from tests.support.fixture_cases import item_texts
from tests.support.paths import HARMONY

PLAYED = Script(range(1, 1200), stops=True)
GREETING = HARMONY / "greeting"


@pytest.mark.parametrize(
    "engine",
    [
        ScriptedEngine(PLAYED),
        ScriptedEngine(Script(range(1, 1200), chunk_size=7, stops=True)),
        ScriptedEngine(Script((5, 6, 7), stops=True)),
    ],
    ids=["scripted", "chunks", "short"],
)
async def test_engine_keeps_all_rules(engine: Any) -> None:
    await check_engine(engine)


@dataclass
class Broken(ScriptedEngine):
    """An engine whose frames and methods a test breaks."""

    def __post_init__(self) -> None:
        self.script = PLAYED


class Silent(Broken):
    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        yield GenerationFinished("stop", 0, 0.0)


class OneToken(Broken):
    def __post_init__(self) -> None:
        self.script = Script((5,))


class Changing(Broken):
    """An engine whose frames are others."""

    def changed(self, frame: EngineFrame) -> list[Any]:
        raise NotImplementedError

    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        async with aclosing(super()._frames(script, prompt, run)) as frames:
            async for frame in frames:
                for other in self.changed(frame):
                    yield other


class WithoutEnd(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [frame] if isinstance(frame, TokenChunk) else []


class EndsTwice(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [frame] if isinstance(frame, TokenChunk) else [frame, frame]


class WithEmptyChunks(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [TokenChunk(()), frame]


class WithWords(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [TokenChunk(("a",)) if isinstance(frame, TokenChunk) else frame]  # type: ignore[arg-type]  # the fault


class WithStrangeTokens(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [TokenChunk((self.vocabulary_size,)) if isinstance(frame, TokenChunk) else frame]


class OfAnotherKind(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return ["token"]


class AlwaysCancelled(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [replace(frame, reason="cancelled") if isinstance(frame, GenerationFinished) else frame]


class NeverLength(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        is_length = isinstance(frame, GenerationFinished) and frame.reason == "length"
        return [GenerationFinished("stop", 0, 0.0) if is_length else frame]


class LengthAfterAStop(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [replace(frame, reason="length") if isinstance(frame, GenerationFinished) else frame]


class Backwards(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [replace(frame, duration=-1.0) if isinstance(frame, GenerationFinished) else frame]


class Boasting(Changing):
    def changed(self, frame: EngineFrame) -> list[Any]:
        return [replace(frame, cached_tokens=1000) if isinstance(frame, GenerationFinished) else frame]


class Unlimited(Broken):
    async def _frames(self, script: Script, prompt: Prompt, run: Any) -> AsyncGenerator[EngineFrame, None]:
        sampling = replace(prompt.facts.sampling, max_tokens=40)
        unlimited = replace(prompt, facts=replace(prompt.facts, sampling=sampling))
        async with aclosing(super()._frames(script, unlimited, run)) as frames:
            async for frame in frames:
                yield frame


class Unstoppable(Broken):
    def __post_init__(self) -> None:
        self.script = Script(range(1, 1200))


class DeafToTheModel(Broken):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        async with super().open(replace(prompt, stop_token_ids=())) as frames:
            yield frames


class DeafToTheRequest(Broken):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        sampling = replace(prompt.facts.sampling, stop_token_ids=())
        async with super().open(replace(prompt, facts=replace(prompt.facts, sampling=sampling))) as frames:
            yield frames


class OneAtATime(Broken):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.lock = asyncio.Lock()

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        async with self.lock, super().open(prompt) as frames:
            yield frames


class CancelsAll(Broken):
    async def cancel(self, response_id: str) -> bool:
        return any([await super(CancelsAll, self).cancel(run.response_id) for run in [*self._runs]])


class NeverCancels(Broken):
    async def cancel(self, response_id: str) -> bool:
        return False


class PretendsToCancel(Broken):
    async def cancel(self, response_id: str) -> bool:
        return any(run.response_id == response_id for run in self._runs)


class CancelsAnything(Broken):
    async def cancel(self, response_id: str) -> bool:
        await super().cancel(response_id)
        return True


class Denies(Changing):
    """An engine whose cancel ends a generation that has begun, and returns False."""

    has_begun = False

    def changed(self, frame: EngineFrame) -> list[Any]:
        self.has_begun = True
        return [frame]

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        self.has_begun = False
        async with super().open(prompt) as frames:
            yield frames

    async def cancel(self, response_id: str) -> bool:
        return await super().cancel(response_id) and not self.has_begun


class Wedged(Broken):
    """An engine that accepts no prompt after a reader has left."""

    is_wedged = False

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if self.is_wedged:
            raise EngineFailed("The last answer was not read.")
        async with super().open(prompt) as frames:
            yield frames

    def _leave(self, run: Any) -> None:
        super()._leave(run)
        self.is_wedged |= not (run.is_finished or run.is_cancelled)


class GoesOn(Broken):
    def _leave(self, run: Any) -> None:
        """Leave the generation running."""


class BreaksAtABias(Broken):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if prompt.facts.sampling.temperature < 0:
            raise ValueError("temperature must be positive")
        async with super().open(prompt) as frames:
            yield frames


class DiesAtABias(Broken):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        async with super().open(prompt) as frames:
            yield frames
        self.is_alive = prompt.facts.sampling.temperature >= 0


class NeverStops(Broken):
    async def stop(self) -> None:
        """Go on."""


class OpensAfterTheStop(Broken):
    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        self.is_stopping = False
        async with super().open(prompt) as frames:
            yield frames


class LeavesATask(Broken):
    async def close(self) -> None:
        self.task = asyncio.create_task(self.forgotten())

    async def forgotten(self) -> None:
        await asyncio.Event().wait()


class CannotClose(Broken):
    async def close(self) -> None:
        raise OSError("the socket is gone")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Broken(models=()), "members: Broken.models is (): it must not be empty or 0"),
        (Broken(is_alive=False), "members: is_alive is True while the engine can serve requests"),
        (Silent(), "frames: the prompt of the check is answered with several tokens, not with 0: give another"),
        (OneToken(), "frames: the prompt of the check is answered with several tokens, not with 1: give another"),
        (WithoutEnd(), "frames: after TokenChunk: expected TokenChunk or GenerationFinished, got the end"),
        (EndsTwice(), "frames: after GenerationFinished: expected the end, got GenerationFinished"),
        (WithEmptyChunks(), "frames: a TokenChunk is never empty"),
        (WithWords(), "frames: TokenChunk.token_ids"),
        (WithStrangeTokens(), "frames: token ids are below vocabulary_size"),
        (OfAnotherKind(), "frames: 'token' is no frame of an engine"),
        (AlwaysCancelled(), "frames: a generation ends with 'stop' or 'length'"),
        (Backwards(), "frames: duration is in seconds since the generation began"),
        (Boasting(), "frames: cached_tokens are tokens of the prompt"),
        (NeverLength(), "max_tokens: the reason is 'length' if max_tokens ended it"),
        (Unlimited(), "frames: at most max_tokens are generated: they were 40, with max_tokens=32"),
        (Unstoppable(), "stop_tokens: no token follows one of the stop_token_ids of the prompt"),
        (DeafToTheModel(), "stop_tokens: no token follows one of the stop_token_ids of the prompt"),
        (DeafToTheRequest(), "stop_tokens: no token follows one of the stop_token_ids of the request's sampling"),
        (LengthAfterAStop(), "stop_tokens: the reason is 'stop' after a stop token"),
        (OneAtATime(), "concurrency: it took more than 2 seconds"),
        (CancelsAll(), "concurrency: cancel ends no generation of another response"),
        (NeverCancels(), "cancel: cancel returns True for a generation that has just been accepted"),
        (PretendsToCancel(), "concurrency: a generation that was cancelled ends with 'cancelled'"),
        (CancelsAnything(), "cancel: cancel returns False if the response has no generation"),
        (Denies(), "cancel: the reason is 'cancelled' if and only if cancel returned True"),
        (Wedged(), "leaving: it raised EngineFailed: The last answer was not read."),
        (GoesOn(), "leaving: leaving the block of open ends the generation: cancel finds none after it"),
        (BreaksAtABias(), "errors: ValueError for {'temperature': -1.0}: what the engine cannot use is InvalidPrompt"),
        (DiesAtABias(), "errors: a wrong request leaves the engine alive"),
        (NeverStops(), "stop: stop ends a running generation with EngineFailed"),
        (OpensAfterTheStop(), "stop: a prompt after stop is refused with ServerStopping"),
        (LeavesATask(), "close: close leaves no task running: LeavesATask.forgotten"),
        (CannotClose(), "close: it raised OSError: the socket is gone"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Broken) else "",
)
async def test_a_broken_rule_of_an_engine_is_named(engine: Broken, message: str) -> None:
    seconds = 2.0 if "2 seconds" in message else 120.0
    with pytest.raises(BrokenRule) as found:
        await check_engine(engine, seconds=seconds)
    assert str(found.value).startswith(message)
    if isinstance(engine, LeavesATask):
        engine.task.cancel()


async def shout(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield ItemDelta(frame.text.upper()) if isinstance(frame, ItemDelta) else frame


async def swallow(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if type(frame).__name__ != "ItemClosed":
            yield frame


def shouting(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "shout", shout)


def swallowing(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "swallow", swallow)


async def test_stage_runs_over_frames_of_a_recording() -> None:
    frames = recorded(GREETING, after="parse")
    shouted = await run(shout, frames)
    texts = [frame.text.upper() for frame in frames if isinstance(frame, ItemDelta)]
    assert [frame.text for frame in shouted if isinstance(frame, ItemDelta)] == texts
    assert await run(shout, [ItemDelta("a")]) == [ItemDelta("A")]
    with pytest.raises(UnreadableRecording, match=r"it has the output of .*, not of converse"):
        recorded(GREETING, after="converse")


async def test_run_checks_types_always_and_the_order_of_whole_turns() -> None:
    async def talk(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        async for _ in source:
            yield "nonsense"  # type: ignore[misc]  # the fault

    turn = recorded(GREETING, after="parse")
    for frames in ([ItemDelta("a")], turn):
        with pytest.raises(StageFault, match="gave a wrong type: expected ParsedFrame, got str"):
            await run(talk, frames)
    with pytest.raises(StageFault, match="the stage 'swallow' broke a rule"):
        await run(swallow, turn)
    assert await run(swallow, turn[2:]) == [frame for frame in turn[2:] if type(frame).__name__ != "ItemClosed"]


async def test_text_backend_is_refused_with_the_helper_that_reads_it() -> None:
    class Backend:
        models, context_length, is_alive = ("hello",), 9, True

        async def answer(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ParsedFrame, None]:
            async for request in source:
                yield GenerationStarted(request.facts, 0)

        async def cancel(self, response_id: str) -> bool:
            return False

        async def stop(self) -> None: ...

        async def close(self) -> None: ...

    with pytest.raises(BrokenRule, match=r"members: Backend is a text backend.* check it with `await run\("):
        await check_engine(Backend())  # type: ignore[arg-type]  # the fault
    with pytest.raises(StageFault, match=r"ended too early: after GenerationStarted: .* or TurnFinished, got the end"):
        await run(Backend().answer, [await resolved("Hi")])


async def test_replay_gives_the_events_with_the_stage_and_raises_its_fault() -> None:
    events = await replayed(GREETING, shouting)
    response = check_events(events)
    assert item_texts(response) == [text.upper() for text in item_texts(check_events(await replayed(GREETING)))]
    assert check_events(b"".join(map(to_sse, events)) + b"data: [DONE]\n\n") == response
    assert await replayed(GREETING, upto="parse") == recorded(GREETING, after="parse")
    with pytest.raises(StageFault, match="the stage 'swallow'"):
        await replayed(GREETING, swallowing)


async def test_broken_streams_of_events_are_refused() -> None:
    events = await replayed(GREETING)
    with pytest.raises(AssertionError):
        check_events(events[:-1])
    with pytest.raises(AssertionError):
        check_events([*events[:3], *events[4:]])
    with pytest.raises(AssertionError, match="DONE"):
        check_events(b"".join(map(to_sse, events)))
    body = b"".join(map(to_sse, events)) + b"data: [DONE]\n\n"
    with pytest.raises(AssertionError, match="an event is named by its type"):
        check_events(body.replace(b"event: response.created\n", b"event: message\n"))


async def test_request_is_resolved_with_its_defaults() -> None:
    request = await resolved("Hi")
    assert (request.facts.response.model, request.facts.sampling.temperature) == ("tiny", 1.0)


async def test_turn_is_whole_and_can_be_rewritten() -> None:
    source = await turn("Call 5", "55.", owner="alice")
    redact = Rewrite(lambda text: re.sub(r"\d+", "?", text), re.compile(r"\d+"))
    given = await run(redact, source)
    assert "".join(frame.text for frame in given if isinstance(frame, ItemDelta)) == "Call ?."
    assert isinstance(source[0], GenerationStarted)
    assert source[0].facts.origin.owner == "alice"


async def test_turn_counts_its_pieces_or_the_tokens_that_a_test_names() -> None:
    counts = [(await turn("Hel", "lo", tokens=tokens))[-1] for tokens in (None, 7, 0)]
    assert [frame.output_tokens for frame in counts if isinstance(frame, TurnFinished)] == [2, 7, 0]


async def test_items_have_their_types() -> None:
    response = check_events(await replayed(GREETING))
    assert [item.type for item in response.output] == ["reasoning", "message"]


async def test_request_and_turn_have_an_owner() -> None:
    request = CreateResponse(input="Hi").inside(Envelope(owner="alice", request_id="1"))
    for frame in (
        await resolved("Hi", owner="alice"),
        await resolved(request),
        (await turn("Hello.", owner="alice"))[0],
    ):
        assert isinstance(frame, ResolvedRequest | GenerationStarted)
        assert frame.facts.origin.owner == "alice"
    origin = (await resolved(request, owner="bob", key_name="laptop")).facts.origin
    assert (origin.owner, origin.key_name, origin.request_id) == ("bob", "laptop", "1")


async def test_wrong_arguments_of_helpers_are_not_blamed_on_a_stage() -> None:
    with pytest.raises(TypeError, match=r'turn\("a", "b"\), and not a list'):
        await turn(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"await turn"):
        await run(shout, turn("a"))  # type: ignore[arg-type]
    for given in (CreateResponse(input="Hi"), "Hi", ItemDelta("a")):
        with pytest.raises(TypeError, match=rf"not with a {type(given).__name__}"):
            await run(shout, given)  # type: ignore[arg-type]

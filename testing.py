"""Helpers for tests of stages, engines, stores, tools, parsers and dialects of one's own; the recipes use them.

They need neither pytest nor a model.  What they find wrong is an `AssertionError`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.api.cli.replayer import recorded_files, replay_of, unedited
from penstock.api.dialect import Dialect
from penstock.api.dialects.named import problems
from penstock.api.http.bodies import Problem
from penstock.api.http.conventions import RequestError
from penstock.api.http.wire import Reading, Wire
from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.errors import EngineFailed, InvalidRequest, ServerStopping, StageError
from penstock.pipeline.field_types import WrongType, check_fields
from penstock.pipeline.frame_order import ORDERS, EngineOrder, OneForOne
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    Prompt,
    ResolvedRequest,
    TokenChunk,
    TurnFinished,
    with_facts,
)
from penstock.pipeline.junction import Junction
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.lifecycle.rules import InvariantBroken, rule
from penstock.pipeline.members import missing_members
from penstock.pipeline.plugins import Install, all_guarded, guarded
from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import FILES, UnreadableRecording, read_recording
from penstock.stages.converse.sessions import GRACE
from penstock.stages.emit.emit import Emit
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import Guarded, OutputStart, TextParser
from penstock.stages.normalize.normalize import Normalize
from penstock.stages.services.engines.custom import misfit
from penstock.stages.services.engines.engine import Engine, TextBackend
from penstock.stages.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.services.store.database import (
    NOW,
    OCTETS,
    Database,
    DatabaseRefused,
    NullDatabase,
    Statement,
    Unit,
    Value,
)
from penstock.stages.services.store.store import Store
from penstock.stages.services.tools import Host, Session, ToolResult

__all__ = [
    "BrokenRule",
    "ExampleCalls",
    "Script",
    "ScriptedEngine",
    "check_database",
    "check_dialect",
    "check_engine",
    "check_events",
    "check_host",
    "check_parser",
    "recorded",
    "replayed",
    "resolved",
    "run",
    "turn",
]

_read_event = msgspec.json.Decoder[ResponseEvent](ResponseEvent).decode


# Stages


def recorded(recording: Path | str, after: str) -> list[Any]:
    """Return the frames that a recording holds of the stage ``after``; raise `UnreadableRecording` if it has none."""
    files = recorded_files(Path(recording))
    if after not in files:
        raise UnreadableRecording(Path(recording), None, f"it has the output of {', '.join(files)}, not of {after}")
    return list(read_recording(files[after], FILES[after][1]).frames)


async def resolved(body: str | CreateResponse, models: tuple[str, ...] = ("tiny",)) -> ResolvedRequest:
    """Return a request, or an input, as ``normalize`` gives it."""
    request = CreateResponse(input=body) if isinstance(body, str) else body
    [frame] = await run(Normalize(Store(NullDatabase()), models), [request])
    return frame  # type: ignore[no-any-return]


async def turn(*pieces: str, owner: str = "") -> list[ParsedFrame]:
    """Return a turn as ``parse`` gives it: a message that arrives in ``pieces``, each of which is a token.

    ``owner`` is that of the request.
    """
    request = await resolved("Hi")
    facts = with_facts(request, origin=replace(request.facts.origin, owner=owner)).facts
    finished = TurnFinished("stop", cached_tokens=0, output_tokens=len(pieces), reasoning_tokens=0, duration=0.0)
    deltas = map(ItemDelta, pieces)
    return [GenerationStarted(facts, 1), MessageOpened(), *deltas, ItemClosed(complete=True), finished]


async def run(stage: Stage[Any, Any] | Pipeline[Any, Any], frames: Iterable[Any]) -> list[Any]:
    """Return what a stage, or a pipeline, gives for ``frames``, checked as in a server.

    ``frames`` may be a part of a turn: the order of what the stage gives is then not checked.  Raises `StageFault`.
    """
    name = getattr(stage, "__name__", type(stage).__name__)
    pipeline = stage if isinstance(stage, Pipeline) else Pipeline.start(name, stage)
    source = list(frames)
    checked = all_guarded(pipeline, has_order=_are_whole(pipeline.accepts(), source))
    async with checked.open(source_of(source)) as given:
        return [frame async for frame in given]


def _are_whole(junction: Junction, source: Sequence[Any]) -> bool:
    """Return True if the frames of a source are in the order of their junction, from its beginning to its end."""
    order = ORDERS.get(junction.frames, OneForOne)()
    if isinstance(order, OneForOne):
        return True
    try:
        for frame in source:
            order.feed(frame)
        order.finish()
    except InvariantBroken:
        return False
    return True


async def replayed(
    recording: Path | str, install: Install = unedited, since: str | None = None, upto: str | None = None
) -> list[Any]:
    """Return the last frames of a replay with the stages of ``install``: without ``upto``, the events.

    The stages are checked as in a server.  The error of a stage is raised.  ``penstock replay`` has the same options.
    """
    replay = await replay_of(Path(recording), since, upto, lambda pipeline: guarded(install(pipeline), pipeline))
    if replay.trace.fault:
        raise replay.trace.fault[1]
    if replay.trace.error:
        raise replay.trace.error
    return replay.trace.junctions[-1].frames


# The wire


def check_events(stream: Iterable[ResponseEvent] | bytes) -> Response:
    """Check a whole stream of events, or the body of a streamed answer, and return the final response.

    Raises an `AssertionError` that names the first broken rule: of the order, the numbers, the items and their texts.
    """
    checker = StreamChecker()
    last: ResponseEvent | None = None
    for last in _events_of(stream) if isinstance(stream, bytes) else stream:
        checker.feed(last)
    checker.finish()
    assert isinstance(last, TerminalEvent)
    return last.response


def _events_of(body: bytes) -> Iterable[ResponseEvent]:
    *events, done, rest = body.split(b"\n\n")
    rule((done, rest) == (b"data: [DONE]", b""), "a stream ends with data: [DONE]")
    for event in events:
        if not event.startswith(b":"):
            name, data = event.split(b"\n")
            decoded = _read_event(data.removeprefix(b"data: "))
            rule(name == b"event: %b" % str(decoded.__struct_config__.tag).encode(), "an event is named by its type")
            yield decoded


# Dialects


async def check_dialect(
    dialect: Dialect,
    bodies: Iterable[bytes],
    heard: Callable[[bytes], Any],
    recordings: Iterable[Path | str] = (),
    *,
    seconds: float = 30.0,
) -> None:
    """Check that a dialect keeps all rules of `Dialect`, without a server.

    ``bodies`` are right requests.  ``heard`` returns what a client makes of a whole stream: the body of the same answer
    without a stream.  The answers are a short text, one that fails, and those of ``recordings``.  Raises `BrokenRule`
    at the first rule that the dialect breaks, or if a rule takes more than ``seconds``.
    """
    answers = [await _emitted(False), await _emitted(True), *[await _events(recording) for recording in recordings]]
    tester = _Speaker(dialect, tuple(bodies), heard, answers)
    for name, check in _DIALECT_RULES.items():
        await _keep(name, check(tester), seconds)


async def _emitted(fails: bool) -> list[ResponseEvent]:
    """Return the events of a short text, which may break off."""
    frames = await turn("Hel", "lo")

    async def source() -> AsyncGenerator[ParsedFrame, None]:
        for frame in frames[: 3 if fails else None]:
            yield frame
        if fails:
            raise EngineFailed("The engine has failed.")

    async with Pipeline.start("emit", Emit()).open(source()) as emitted:
        return [frame async for frame in emitted if isinstance(frame, ResponseEvent)]


async def _events(recording: Path | str) -> list[ResponseEvent]:
    return [frame for frame in await replayed(recording) if isinstance(frame, ResponseEvent)]


@dataclass(frozen=True)
class _Speaker:
    """A dialect, with what it has to read and to write."""

    dialect: Dialect
    bodies: tuple[bytes, ...]
    heard: Callable[[bytes], Any]
    answers: Sequence[Sequence[ResponseEvent]]

    @property
    def wires(self) -> list[Wire]:
        """The forms of the answers: that of the dialect, and those that the bodies ask for."""
        return [self.dialect.wire, *(self.dialect.read(body).wire for body in self.bodies)]

    def check_frame(self, wire: Wire, frame: object, name: str) -> None:
        rule(isinstance(frame, bytes), f"{name} is bytes, not {frame!r}")
        assert isinstance(frame, bytes)
        is_whole = wire.content_type != "text/event-stream" or frame.endswith(b"\n\n") or not frame
        rule(is_whole, f"{name} ends with an empty line, as all of text/event-stream: {frame!r}")


_WRONG_BODIES = (b"", b"{", b"[]", b"null", b"5", b'"Hi"', b"\xff\xfe", b'{"a": NaN}', b'{"a":' + b"[" * 100_000)


async def _check_read(speaker: _Speaker) -> None:
    rule(bool(speaker.bodies), "give the bodies of right requests")
    for body in speaker.bodies:
        reading = speaker.dialect.read(body)
        rule(isinstance(reading, Reading), f"read returns a Reading, not {reading!r}")
        rule(isinstance(reading.request, CreateResponse), "the request of a Reading is a CreateResponse")
        rule(isinstance(reading.wire, Wire), "the wire of a Reading is a Wire")


async def _check_wrong_bodies(speaker: _Speaker) -> None:
    for body in _WRONG_BODIES:
        shown = f"read raises InvalidRequest for {body[:20]!r}"
        try:
            speaker.dialect.read(body)
        except InvalidRequest:
            continue
        except Exception as error:
            raise InvariantBroken(f"{shown}, not {type(error).__name__}: {error}") from error
        raise InvariantBroken(shown)


async def _check_encode(speaker: _Speaker) -> None:
    for wire in speaker.wires:
        speaker.check_frame(wire, wire.end, "end")
        speaker.check_frame(wire, wire.keep_alive, "keep_alive")
        for answer in speaker.answers:
            async with wire.translated(source_of(answer)) as events:
                async for event in events:
                    speaker.check_frame(wire, wire.encode(event), "what encode returns")


async def _check_fold(speaker: _Speaker) -> None:
    for wire in speaker.wires:
        for answer in speaker.answers:
            async with wire.translated(source_of(answer)) as events:
                stream = b"".join([wire.encode(event) async for event in events]) + wire.end
            try:
                async with wire.translated(source_of(answer)) as events:
                    body = _as_json(await wire.fold(events))
            except StageError:
                continue
            heard = _as_json(speaker.heard(stream))
            rule(heard == body, f"a stream says what the body of the answer says: {heard!r} is not {body!r}")


def _as_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


async def _check_conventions(speaker: _Speaker) -> None:
    conventions = speaker.dialect.conventions
    rule(bool(conventions.key_headers), "key_headers names a header")
    for status in (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503):
        refusal = RequestError(status, Problem("What is wrong.", "server_error", None, None), "req_1")
        answered, body = conventions.error(refusal)
        rule(400 <= answered <= 599, f"the status of an error is one of an error, not {answered}")
        msgspec.convert(_as_json(body), conventions.error_body)
        for wire in speaker.wires:
            if wire.fault:
                speaker.check_frame(wire, wire.fault(refusal), "what fault returns")


async def _check_routes(speaker: _Speaker) -> None:
    for problem in problems(speaker.dialect):
        raise InvariantBroken(problem)


_DIALECT_RULES: dict[str, Callable[[_Speaker], Awaitable[None]]] = {
    "read": _check_read,
    "wrong bodies": _check_wrong_bodies,
    "encode": _check_encode,
    "fold": _check_fold,
    "errors": _check_conventions,
    "routes": _check_routes,
}
"""The rules of a dialect, each with its check."""


# Engines


class BrokenRule(AssertionError):
    """An engine broke a rule of `Engine`, or another part one of its own; ``rule`` is the name of the rule."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.rule = name


async def check_engine(engine: Engine, token_ids: Sequence[int] = range(100, 116), *, seconds: float = 30.0) -> None:
    """Check that an engine keeps all rules of `Engine`; stop and close it at the end.

    ``token_ids`` is a prompt that the engine answers with several tokens.  Raises `BrokenRule` at the first rule that
    it breaks, or if a rule takes more than ``seconds``.
    """
    if isinstance(engine, TextBackend):
        cure = "check it with `await run(backend.answer, [await resolved('Hi')])`"
        raise BrokenRule("members", f"{type(engine).__name__} is a text backend, and this is for token ids: {cure}")
    tester = _Tester(engine, tuple(token_ids))
    for name, check in _RULES.items():
        await _keep(name, check(tester), seconds)


async def _keep(name: str, check: Awaitable[None], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await check
    except InvariantBroken as broken:
        raise BrokenRule(name, str(broken)) from None
    except TimeoutError:
        raise BrokenRule(name, f"it took more than {seconds:g} seconds") from None
    except Exception as error:
        raise BrokenRule(name, f"it raised {type(error).__name__}: {error}") from error


class _Tester:
    """An engine, and generations on it."""

    def __init__(self, engine: Engine, token_ids: tuple[int, ...]) -> None:
        self.engine = engine
        self.token_ids = token_ids
        self.tasks = asyncio.all_tasks()

    async def prompt(self, ends: tuple[int, ...] = (), **sampling: Any) -> Prompt:
        """Return the prompt of one more response, with greedy sampling; ``ends`` are its stop tokens."""
        request = await resolved("Hi", tuple(self.engine.models))
        chosen = replace(request.facts.sampling, **{"temperature": 0.0, "max_tokens": _SHORT, **sampling})
        return Prompt(with_facts(request, sampling=chosen).facts, self.token_ids, ends)

    async def generate(self, ends: tuple[int, ...] = (), **sampling: Any) -> tuple[list[int], GenerationFinished]:
        """Return the tokens and the end of one generation."""
        prompt = await self.prompt(ends, **sampling)
        async with self.engine.open(prompt) as frames:
            return await self.read(frames, prompt)

    async def read(self, frames: AsyncIterator[EngineFrame], prompt: Prompt) -> tuple[list[int], GenerationFinished]:
        """Return the tokens of the frames up to their end; raise `InvariantBroken` for a wrong frame."""
        order, tokens, last = EngineOrder(), list[int](), None
        async for frame in frames:
            rule(isinstance(frame, TokenChunk | GenerationFinished), f"{frame!r} is no frame of an engine")
            try:
                check_fields(frame)
            except WrongType as wrong:
                raise InvariantBroken(str(wrong)) from None
            order.feed(frame)
            last = frame
            if isinstance(frame, TokenChunk):
                tokens += frame.token_ids
        order.finish()
        assert isinstance(last, GenerationFinished)
        within = all(0 <= token < self.engine.vocabulary_size for token in tokens)
        rule(within, "token ids are below vocabulary_size")
        most = prompt.facts.sampling.max_tokens or len(tokens)
        rule(len(tokens) <= most, f"at most max_tokens are generated: they were {len(tokens)}, with max_tokens={most}")
        return tokens, last


Check: TypeAlias = Callable[[_Tester], Awaitable[None]]

_SHORT, _LONG = 32, 1000
"""Tokens of a generation that ends by itself, and of one that is still running."""


async def _check_members(tester: _Tester) -> None:
    problem = misfit(tester.engine)
    rule(problem is None, problem or "")
    rule(tester.engine.is_alive, "is_alive is True while the engine can serve requests")


async def _check_frames(tester: _Tester) -> None:
    tokens, finished = await tester.generate()
    few = f"the prompt of the check is answered with several tokens, not with {len(tokens)}: give another as token_ids"
    rule(len(tokens) > 1, few)
    rule(finished.reason in ("stop", "length"), "a generation ends with 'stop' or 'length'")
    rule(finished.duration >= 0, "duration is in seconds since the generation began")
    rule(0 <= finished.cached_tokens <= len(tester.token_ids), "cached_tokens are tokens of the prompt")


async def _check_max_tokens(tester: _Tester) -> None:
    whole, _ = await tester.generate()
    for limit in range(1, min(3, len(whole))):
        tokens, finished = await tester.generate(max_tokens=limit)
        is_cut = len(tokens) == limit
        rule(finished.reason == ("length" if is_cut else "stop"), "the reason is 'length' if max_tokens ended it")


async def _check_stop_tokens(tester: _Tester) -> None:
    whole, _ = await tester.generate()
    stop = whole[len(whole) // 2]
    for stops, sampling in (((stop,), {}), ((), {"stop_token_ids": (stop,)})):
        tokens, finished = await tester.generate(stops, **sampling)
        place = "the prompt" if stops else "the request's sampling"
        rule(stop not in tokens[:-1], f"no token follows one of the stop_token_ids of {place}")
        is_stopped = tokens[-1:] == [stop] and len(tokens) < _SHORT
        rule(not is_stopped or finished.reason == "stop", "the reason is 'stop' after a stop token")


async def _check_concurrency(tester: _Tester) -> None:
    prompts = [await tester.prompt() for _ in range(4)]
    async with AsyncExitStack() as running:
        streams = [await running.enter_async_context(tester.engine.open(prompt)) for prompt in prompts]
        was_running = await tester.engine.cancel(prompts[0].facts.response_id)
        ends = [(await tester.read(stream, prompt))[1] for stream, prompt in zip(streams, prompts, strict=True)]
    rule(not was_running or ends[0].reason == "cancelled", "a generation that was cancelled ends with 'cancelled'")
    rule(all(end.reason != "cancelled" for end in ends[1:]), "cancel ends no generation of another response")


async def _check_cancel(tester: _Tester) -> None:
    rule(not await tester.engine.cancel("resp_unknown"), "cancel returns False if the response has no generation")
    for number in range(2):
        prompt = await tester.prompt(max_tokens=_LONG)
        async with tester.engine.open(prompt) as frames:
            if number:
                await anext(frames)
            was_running = await tester.engine.cancel(prompt.facts.response_id)
            rule(was_running or bool(number), "cancel returns True for a generation that has just been accepted")
            _, finished = await tester.read(frames, prompt)
        ended_so = finished.reason == "cancelled"
        rule(ended_so == was_running, "the reason is 'cancelled' if and only if cancel returned True")


async def _check_leaving(tester: _Tester) -> None:
    prompt = await tester.prompt(max_tokens=_LONG)
    async with tester.engine.open(prompt) as frames:
        await anext(frames)
    is_running = await tester.engine.cancel(prompt.facts.response_id)
    rule(not is_running, "leaving the block of open ends the generation: cancel finds none after it")
    await tester.generate()


async def _check_errors(tester: _Tester) -> None:
    unusable: tuple[dict[str, Any], ...] = ({"logit_bias": {tester.engine.vocabulary_size: 1.0}}, {"temperature": -1.0})
    for sampling in unusable:
        try:
            await tester.generate(**sampling)
        except InvalidRequest:
            pass
        except InvariantBroken:
            raise
        except Exception as error:
            problem = f"{type(error).__name__} for {sampling}: what the engine cannot use is InvalidPrompt, or ignored"
            raise InvariantBroken(problem) from error
    rule(tester.engine.is_alive, "a wrong request leaves the engine alive")
    await tester.generate()


async def _check_stop(tester: _Tester) -> None:
    prompt = await tester.prompt(max_tokens=_LONG)
    async with tester.engine.open(prompt) as frames:
        await tester.engine.stop()
        try:
            await tester.read(frames, prompt)
        except EngineFailed:
            pass
        else:
            raise InvariantBroken("stop ends a running generation with EngineFailed")
    try:
        await tester.generate()
    except ServerStopping:
        return
    raise InvariantBroken("a prompt after stop is refused with ServerStopping")


async def _check_close(tester: _Tester) -> None:
    await tester.engine.close()
    await _check_tasks(tester.tasks)


async def _check_tasks(before: set[asyncio.Task[Any]]) -> None:
    """Raise `InvariantBroken` if a task runs that did not run ``before``."""
    running = asyncio.all_tasks() - before - {asyncio.current_task()}
    if running:
        await asyncio.wait(running, timeout=0.1)
    names = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in running if not task.done())
    rule(not names, f"close leaves no task running: {', '.join(names)}")


_RULES: dict[str, Check] = {
    check.__name__.removeprefix("_check_"): check
    for check in (
        _check_members,
        _check_frames,
        _check_max_tokens,
        _check_stop_tokens,
        _check_concurrency,
        _check_cancel,
        _check_leaving,
        _check_errors,
        _check_stop,
        _check_close,
    )
}


# Hosts


@dataclass(frozen=True)
class ExampleCalls:
    """Calls that a host gets from `check_host`, each as the name of a function and the text that a model writes."""

    quick: tuple[str, str]
    """A call that succeeds."""
    wrong: tuple[str, str]
    """A call that fails, such as one whose arguments the function does not have."""
    slow: tuple[str, str] | None = None
    """A call that would take a minute; None if the host has none that takes longer than a moment."""


async def check_host(
    host: Host, calls: ExampleCalls, request: ResolvedRequest | None = None, *, seconds: float = 60.0
) -> None:
    """Check that a host, and its sessions for a ``request``, keep the rules of `Host` and `Session`; close it.

    Raises `BrokenRule` at the first rule that it breaks, or if a rule takes more than ``seconds``.
    """
    tester = _HostTester(host, calls, request or await resolved("Hi"))
    try:
        for name, check in _HOST_RULES.items():
            await _keep(name, check(tester), seconds)
    except BrokenRule:
        with suppress(Exception):
            await host.close()
        raise


_PATIENCE = 30.0
"""Seconds that a call of the check may take which takes only a moment: the first one may start a program."""

_MOMENT = 0.3
"""Seconds for which a slow call runs before it is stopped."""

_UNREADABLE = ("", "{", "null", "[1]", '{"\\ud800": NaN}', "[" * 10_000, "\x00")
"""Texts that a model may write instead of arguments."""


class _HostTester:
    """A host, and sessions of it."""

    def __init__(self, host: Host, calls: ExampleCalls, request: ResolvedRequest) -> None:
        self.host = host
        self.calls = calls
        self.request = request
        self.tasks = asyncio.all_tasks()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[Session, None]:
        """Open a session for the length of a block."""
        session = self.host.session(self.request)
        try:
            yield session
        finally:
            await session.close()

    async def run(self, session: Session, call: tuple[str, str], seconds: float = _PATIENCE) -> ToolResult:
        """Return the result of a call."""
        try:
            result = await session.run(*call, seconds)
        except Exception as error:
            problem = f"errors are in the result, and not raised: {type(error).__name__}: {error}"
            raise InvariantBroken(problem) from error
        rule(isinstance(result, ToolResult), f"run returns a ToolResult, not {result!r}")
        texts = [result.result, *([] if result.error is None else [result.error])]
        rule(all(isinstance(text, str) for text in texts), f"the result and the error of {result!r} are texts")
        return result

    async def succeeds(self, session: Session) -> None:
        """Make the quick call."""
        result = await self.run(session, self.calls.quick)
        rule(result.error is None, f"the quick call succeeds; its error was {result.error!r}")

    @asynccontextmanager
    async def running(self, session: Session) -> AsyncGenerator[asyncio.Task[ToolResult], None]:
        """Make the slow call for the length of a block, if there is one, and the quick one otherwise."""
        await self.succeeds(session)
        task = asyncio.create_task(self.run(session, self.calls.slow or self.calls.quick))
        await asyncio.wait({task}, timeout=_MOMENT if self.calls.slow else 0)
        rule(not (self.calls.slow and task.done()), f"the slow call takes longer than {_MOMENT:g} seconds")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _check_host_members(tester: _HostTester) -> None:
    problems = missing_members(tester.host, Host)
    rule(not problems, "; ".join(problems))
    session = tester.host.session(tester.request)
    problems = missing_members(session, Session)
    rule(not problems, "; ".join(problems))
    await session.close()


async def _check_run(tester: _HostTester) -> None:
    async with tester.session() as session:
        await tester.succeeds(session)
        await tester.succeeds(session)


async def _check_host_errors(tester: _HostTester) -> None:
    async with tester.session() as session:
        result = await tester.run(session, tester.calls.wrong)
        rule(bool(result.error or result.result), "the model reads why a call failed")
        for text in _UNREADABLE:
            await tester.run(session, (tester.calls.quick[0], text))
        await tester.succeeds(session)


async def _check_time_limit(tester: _HostTester) -> None:
    if tester.calls.slow is None:
        return
    async with tester.session() as session:
        await tester.succeeds(session)
        try:
            async with asyncio.timeout(_MOMENT + GRACE):
                result = await tester.run(session, tester.calls.slow, _MOMENT)
        except TimeoutError:
            raise InvariantBroken("run ends by itself when its seconds are over") from None
        rule(bool(result.error or result.result), "the model reads that a call took too long")
        await tester.succeeds(session)


async def _check_cancellation(tester: _HostTester) -> None:
    async with tester.session() as session, tester.session() as other:
        async with tester.running(session) as task:
            task.cancel()
            await asyncio.wait({task})
            rule(task.cancelled() or not tester.calls.slow, "a call that is cancelled raises CancelledError")
        await tester.succeeds(other)


async def _check_host_concurrency(tester: _HostTester) -> None:
    async with tester.session() as session, tester.session() as other:
        await asyncio.gather(*(tester.succeeds(each) for each in (session, other) * 3))


async def _check_session_close(tester: _HostTester) -> None:
    async with tester.session() as session, tester.session() as other:
        async with tester.running(session) as task:
            await asyncio.create_task(session.close())
            await asyncio.wait({task}, timeout=_PATIENCE)
            rule(task.done(), "close stops the calls that run")
            if not task.cancelled():
                task.result()
        await session.close()
        await tester.run(session, tester.calls.quick)
        await tester.succeeds(other)
    unused = tester.host.session(tester.request)
    await unused.close()


async def _check_host_close(tester: _HostTester) -> None:
    await tester.host.close()
    await tester.host.close()
    await _check_tasks(tester.tasks)


_HOST_RULES: dict[str, Callable[[_HostTester], Awaitable[None]]] = {
    "members": _check_host_members,
    "run": _check_run,
    "errors": _check_host_errors,
    "seconds": _check_time_limit,
    "cancellation": _check_cancellation,
    "concurrency": _check_host_concurrency,
    "session": _check_session_close,
    "close": _check_host_close,
}


# Databases


async def check_database(database: Database, *, seconds: float = 30.0) -> None:
    """Check that a database keeps the rules of `Database` that a `Store` relies on; open and close it.

    It may hold rows already: what the check writes stays in it, under an owner of its own.  Raises `BrokenRule` at the
    first rule that it breaks, or if a rule takes more than ``seconds``.
    """
    try:
        for name, check in _DATABASE_RULES.items():
            await _keep(name, check(database), seconds)
    except BrokenRule:
        with suppress(Exception):
            await database.close()
        raise


_ADD = "insert into secrets (name, value) values ($1, $2) on conflict do nothing"
_FIND = "select value from secrets where name = $1"
_REMOVE = "delete from secrets where name = $1"

_CLOCK_SECONDS = 3600.0
"""Seconds by which the clock of a database may differ from that of this machine."""


def _named(name: str) -> str:
    return f"check_database {name}"


def _unit(sql: str, *arguments: Value) -> Unit:
    return Unit((Statement(sql, arguments),), counted=True)


async def _check_database_members(database: Database) -> None:
    problems = missing_members(database, Database)
    rule(not problems, "; ".join(problems))


async def _check_opening(database: Database) -> None:
    await database.open()
    rule(list(await database.read("select 1")) != [], "a database that is open reads")


async def _check_values(database: Database) -> None:
    for name, value in (("bytes", bytes(range(256))), ("nothing", b""), ("text é👩 \u2028", b"x" * 2**20)):
        await database.write([_unit(_REMOVE, _named(name)), _unit(_ADD, _named(name), value)])
        rows = await database.read(_FIND, _named(name))
        rule([bytes(row[0]) for row in rows] == [value], "what was written is read unchanged")
    ((number, text, size, now),) = await database.read(
        f"select cast($1 as double precision), $2, {OCTETS}('é'), {NOW}", 0.5, "é"
    )
    rule(
        (float(number), str(text), int(size)) == (0.5, "é", 2),
        "arguments and expressions have the values of their types",
    )
    rule(abs(float(now) - time.time()) < _CLOCK_SECONDS, "the clock is that of this time")


async def _check_counts(database: Database) -> None:
    name = _named("counts")
    await database.write([_unit(_REMOVE, name)])
    counts = await database.write([_unit(_ADD, name, b"1"), _unit(_ADD, name, b"2"), _unit(_REMOVE, name)])
    rule(
        counts == [(1,), (0,), (1,)],
        "write returns the numbers of rows that each statement of counted units has changed",
    )


async def _check_transactions(database: Database) -> None:
    name = _named("transactions")
    await database.write([_unit(_REMOVE, name)])
    try:
        await database.write([_unit(_ADD, name, b"1"), _unit("insert into secrets (name) values ($1)", name)])
    except DatabaseRefused:
        pass
    else:
        raise InvariantBroken("a row that breaks a rule of its table raises DatabaseRefused")
    rule(not await database.read(_FIND, name), "units are executed together or not at all")


async def _check_reading(database: Database) -> None:
    names = [_named(f"many {number}") for number in range(50)]
    writing = database.write([_unit(_ADD, name, b"1") for name in names])
    await asyncio.gather(writing, *(database.read(_FIND, name) for name in names))
    found = await asyncio.gather(*(database.read(_FIND, name) for name in names))
    rule(all(map(len, found)), "many reads, and one write, may run at the same time")
    rule(await database.size() >= 0, "size is the size on disk in bytes")
    await database.write([_unit(_REMOVE, name) for name in names])


async def _check_closing(database: Database) -> None:
    await database.close()
    await database.close()


_DATABASE_RULES: dict[str, Callable[[Database], Awaitable[None]]] = {
    "members": _check_database_members,
    "open": _check_opening,
    "values": _check_values,
    "counts": _check_counts,
    "transactions": _check_transactions,
    "concurrency": _check_reading,
    "close": _check_closing,
}


# Parsers of chat models


def check_parser(
    parser: Callable[[OutputStart], TextParser],
    examples: Mapping[str, Sequence[Piece]],
    start: OutputStart | None = None,
) -> None:
    """Check that a parser of a chat model's output keeps the rules of `TextParser`.

    ``examples`` are outputs in the markup of the family, each with the pieces that it stands for.  The functions that
    they call are declared.  A parser that needs more, such as a prompt, gets another ``start``.  Raises `BrokenRule` at
    the first rule that it breaks.
    """
    calls = {piece.name: None for pieces in examples.values() for piece in pieces if isinstance(piece, CallPiece)}
    functions = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in calls]
    tester = _ParserTester(parser, start or OutputStart(functions), examples)
    for name, check in _PARSER_RULES.items():
        try:
            check(tester)
        except InvariantBroken as broken:
            raise BrokenRule(name, str(broken)) from None
        except Exception as error:
            raise BrokenRule(name, f"it raised {type(error).__name__}: {error}") from error


_PLAIN = "Plain text, 5 > 3. \nIt's {so} [1]: yes.\n\n"
_WORDS = "and some words "
_FEW, _GROWTH, _MOST_WORK = 50, 4, 6
"""Parts of a short output, and the factors by which a long one has more and may take more work."""

_MOST_PLACES = 8
"""Places in an example at which the work is counted."""


@dataclass(frozen=True)
class _ParserTester:
    """A parser, and outputs for it."""

    make: Callable[[OutputStart], TextParser]
    start: OutputStart
    examples: Mapping[str, Sequence[Piece]]

    def read(self, parts: Iterable[str], *, cut: bool = False) -> list[Piece]:
        """Return the pieces of an output in ``parts``, joined."""
        reader = self.make(self.start)
        pieces = [piece for part in parts for piece in reader.feed(part)]
        return _joined([*pieces, *reader.finish(cut=cut)])

    def beginnings(self) -> Iterable[str]:
        """Yield the beginnings of each example, which leave the parser in any state."""
        return (output[:length] for output in self.examples for length in range(len(output) + 1))


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        rule(isinstance(piece, Piece), f"{piece!r} is no piece")
        last = joined[-1] if joined else None
        if isinstance(piece, CallPiece):
            joined.append(piece)
        elif isinstance(last, type(piece)) and not isinstance(last, CallPiece):
            joined[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            joined.append(type(piece)(piece.text))
    return joined


def _same(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    return [_read_arguments(piece) for piece in one] == [_read_arguments(piece) for piece in other]


def _read_arguments(piece: Piece) -> object:
    """Return the arguments of a piece as JSON, if they are that, and otherwise the piece."""
    with suppress(ValueError):
        return json.loads(piece.text) if isinstance(piece, ArgumentsPiece) else piece
    return piece


def _check_parser_members(tester: _ParserTester) -> None:
    problems = missing_members(tester.make(tester.start), TextParser)
    rule(not problems, "; ".join(problems))


def _check_examples(tester: _ParserTester) -> None:
    for output, meant in tester.examples.items():
        found = tester.read([output])
        rule(_same(found, _joined(meant)), f"{output!r} gives {found}, and it should be {list(meant)}")


def _check_chunks(tester: _ParserTester) -> None:
    for output in tester.examples:
        whole = tester.read([output])
        for at in range(len(output)):
            _check_equal(whole, tester.read([output[:at], output[at:]]), f"{output!r} is cut at {output[at:]!r}")
    for begun in tester.beginnings():
        for output in (begun, begun + _PLAIN):
            for cut in (False, True):
                found = tester.read(output, cut=cut)
                _check_equal(tester.read([output], cut=cut), found, f"{output!r} comes in characters")


def _check_equal(whole: Sequence[Piece], found: Sequence[Piece], case: str) -> None:
    rule(whole == found, f"chunks make no difference: if {case}, it gives {found} instead of {whole}")


def _check_parser_text(tester: _ParserTester) -> None:
    found = tester.read([_PLAIN])
    rule(_text(found) == _PLAIN, f"plain text is returned as it is: {_PLAIN!r} gives {found}")
    for begun in tester.beginnings():
        for output in (begun, begun + _PLAIN):
            rest = iter(output)
            found = tester.read([output])
            rule(all(letter in rest for letter in _text(found)), f"text is returned once: {output!r} gives {found}")


def _text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece | ContentPiece))


def _check_arguments(tester: _ParserTester) -> None:
    for begun in tester.beginnings():
        pieces = tester.read([begun])
        for at, piece in enumerate(pieces):
            follows = at > 0 and isinstance(pieces[at - 1], CallPiece)
            rule(follows or not isinstance(piece, ArgumentsPiece), f"arguments follow their call: {begun!r}")
            is_whole = at + 1 < len(pieces) or begun in tester.examples
            if isinstance(piece, ArgumentsPiece) and is_whole:
                given = _read_arguments(piece)
                rule(isinstance(given, dict), f"the arguments of a call are a JSON object: {begun!r} gives {piece}")


def _check_idle(tester: _ParserTester) -> None:
    """Check that text which an idle parser need not see is returned as it is, with the kind of the text before it."""
    for output in tester.examples:
        parser = Guarded(tester.make(tester.start), "")
        pieces: list[Piece] = []
        is_idle = False
        for letter in output:
            if is_idle and letter not in parser.triggers:
                is_thought = bool(pieces) and isinstance(pieces[-1], ReasoningPiece)
                pieces.append(ReasoningPiece(letter) if is_thought else ContentPiece(letter))
            else:
                pieces += parser.feed(letter)
                is_idle = letter not in parser.triggers and parser.is_idle
        pieces += parser.finish(cut=False)
        cure = "give the characters that marks begin with as triggers, and is_idle False while text is held back"
        rule(_joined(pieces) == tester.read([output]), f"an idle parser need not see text: {output!r}: {cure}")


def _check_work(tester: _ParserTester) -> None:
    for output in tester.examples:
        for at in range(0, len(output), max(1, len(output) // _MOST_PLACES)):
            few, many = (_work(tester, output[:at], count) for count in (_FEW, _GROWTH * _FEW))
            rule(
                many <= _MOST_WORK * few,
                f"the work for a part of the text does not grow with the output: after {output[:at]!r}, {_GROWTH} "
                f"times as many parts take {many / few:.1f} times the work",
            )


def _work(tester: _ParserTester, begun: str, parts: int) -> int:
    """Count the lines run for an output, and the characters of the texts that functions get; C code is not seen."""
    work = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal work
        work += 1
        if event == "call":
            work += sum(len(value) for value in frame.f_locals.values() if isinstance(value, str))
        return trace

    reader = tester.make(tester.start)
    list(reader.feed(begun))
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(parts):
            list(reader.feed(_WORDS))
        list(reader.finish(cut=False))
    finally:
        sys.settrace(previous)
    return work


_PARSER_RULES: dict[str, Callable[[_ParserTester], None]] = {
    "members": _check_parser_members,
    "examples": _check_examples,
    "chunks": _check_chunks,
    "text": _check_parser_text,
    "arguments": _check_arguments,
    "idle": _check_idle,
    "work": _check_work,
}

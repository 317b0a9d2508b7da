"""The check of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.errors import EngineFailed, InvalidRequest, ServerStopping
from penstock.pipeline.field_types import WrongType, check_fields
from penstock.pipeline.frame_order import EngineOrder
from penstock.pipeline.frames import (
    EngineFrame,
    GenerationFinished,
    Prompt,
    TokenChunk,
    with_facts,
)
from penstock.pipeline.lifecycle.rules import InvariantBroken, rule
from penstock.services.engines.custom import misfit
from penstock.services.engines.engine import Engine, TextBackend
from penstock.testing.rules import BrokenRule, check_tasks, keep_all
from penstock.testing.stages import resolved


async def check_engine(engine: Engine, token_ids: Sequence[int] = range(100, 116), *, seconds: float = 30.0) -> None:
    """Check that an engine keeps all rules of `Engine`; stop and close it at the end.

    ``token_ids`` is a prompt that the engine answers with several tokens.  Raises `BrokenRule` at the first rule that
    it breaks, or if a rule takes more than ``seconds``.
    """
    if isinstance(engine, TextBackend):
        cure = "check it with `await run(backend.answer, [await resolved('Hi')])`"
        raise BrokenRule("members", f"{type(engine).__name__} is a text backend, and this is for token ids: {cure}")
    tester = _Tester(engine, tuple(token_ids))
    await keep_all(_RULES, tester, seconds)


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
    await check_tasks(tester.tasks)


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

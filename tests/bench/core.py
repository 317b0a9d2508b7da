"""The engine core below both servers: no model, but tokens in the steps that a measurement asks for.

It stands where vLLM's client of its engine cores stands.  All in front of that is what each server really runs:
`AsyncLLM`, its output processor, and one collector per stream.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgspec

from penstock.pipeline.frames import TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import TEXT_TOKENS, load_encoding
from tests.support.paths import HARMONY

RECORDING = HARMONY / "long_reasoning/tokens.jsonl"

FILL = 64
"""Tokens per step of what comes ahead of the measured text."""

MARK = "~"
"""The text of each token that comes at a rate: it is nowhere else in a stream, so clients can count such tokens."""

SETTLING = 0.3
"""Seconds behind a window whose work counts: a log that is written every quarter of a second is written by then."""


class Window(msgspec.Struct, frozen=True, tag=True):
    """Tokens for each stream, in steps of ``step``.

    ``rate`` is steps per second, whether they are read or not.  Without one a step comes once that before it is read:
    as fast as it goes, but such a core is never ahead of the frontend.
    """

    tokens: int
    step: int
    rate: float = 0.0


class Case(msgspec.Struct, frozen=True, tag=True):
    """So many streams, which think for ``reasoning`` tokens, and whose answers are then measured.

    Without ``detokenizes`` no request asks vLLM for text, whatever its frontend wants.
    """

    streams: int
    reasoning: int
    detokenizes: bool = True


class End(msgspec.Struct, frozen=True, tag=True):
    """All streams of the case end."""


class Look(msgspec.Struct, frozen=True, tag=True):
    """Nothing but an answer: what the process has taken so far."""


Command: TypeAlias = Case | Window | End | Look
"""``(Look | Case . (Window | Look)* . End)*``, each answered when it is done"""


class Measured(msgspec.Struct, frozen=True):
    """What a command took, in seconds of CPU, and all that the process has ``used`` by then.

    ``begun`` is when it began, by the clock that all processes of a machine share.  ``memory`` is
    that of the process in bytes: before it, and once it is done.
    """

    cpu: float
    used: float
    begun: float
    memory: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Text:
    """A recorded response whose text comes over and over."""

    tokens: tuple[int, ...]

    def run(self, length: int) -> list[int]:
        """So many tokens of it."""
        return list(islice(cycle(self.tokens), length))

    def thoughts(self, length: int) -> list[int]:
        """A message on the analysis channel, if it is not empty."""
        markup = load_encoding().encode_markup
        if not length:
            return []
        return [
            *markup("<|channel|>analysis<|message|>"),
            *self.run(length),
            *markup("<|end|><|start|>assistant"),
        ]

    def answer(self) -> list[int]:
        """How the measured text begins."""
        return load_encoding().encode_markup("<|channel|>final<|message|>")


def recorded_text() -> Text:
    """The words of the longest recording."""
    chunks = (frame for frame in read_frames(RECORDING, TokenFrame) if isinstance(frame, TokenChunk))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Text(tuple(token for token in tokens[3:] if token < TEXT_TOKENS))


class SteppedCore:
    """What `AsyncLLM` asks of its engine cores, as far as our requests go.

    Outside of a case every request gets a greeting, which is how servers warm up and how a first token is timed.
    """

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.states: Mapping[str, Any] = {}
        """The streams of the output processor, by the engine's id of their requests."""
        self.case: Case | None = None
        self._open: list[str] = []
        self._arrived = asyncio.Condition()
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._text = recorded_text()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """What a model of text does."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """There are no images."""

    def shutdown(self, timeout: float | None = None) -> None:
        """There is nothing to end."""

    async def add_request_async(self, request: Any) -> None:
        """Take a request into the case that is measured, or answer it at once."""
        if self.case is None:
            greeting = [*self._text.answer(), *self._text.run(1), *load_encoding().encode_markup("<|return|>")]
            self._put([request.request_id], greeting, is_last=True)
            return
        async with self._arrived:
            self._open.append(request.request_id)
            self._arrived.notify_all()

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Nothing runs here that could be aborted."""

    async def get_output_async(self) -> Any:
        """The outputs of the next step."""
        return await self._outputs.get()

    async def run(self, command: Command, ready: Callable[[], object]) -> Measured:
        """Do what is asked; ``ready`` says that clients may come."""
        if isinstance(command, Look):  # without a look at the memory, which takes time
            await asyncio.sleep(SETTLING)
            return Measured(0.0, time.process_time(), time.monotonic())
        before, begun, used = resident(), time.monotonic(), time.process_time()
        match command:
            case Case():
                self.case, self._open = command, []
                ready()
                await self._begin(command)
            case Window(rate=0.0):
                await self._steps(command, self._text.run(command.tokens))
            case Window():
                begun = await self._run_freely(command)
            case End():
                self._put(self._open, load_encoding().encode_markup("<|return|>"), is_last=True)
                self.case = None
        await asyncio.sleep(SETTLING)
        now = time.process_time()
        return Measured(now - used, now, begun, (before, resident()))

    async def _begin(self, case: Case) -> None:
        """Wait for the streams of a case, and let them think."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._open) == case.streams)
        for part in (self._text.thoughts(case.reasoning), [*self._text.answer(), *self._text.run(FILL)]):
            await self._steps(Window(len(part), FILL), part)

    async def _steps(self, window: Window, tokens: list[int]) -> None:
        """Give every stream its tokens, each step once the last stream has read that before it."""
        for at in range(0, len(tokens), window.step):
            self._put(self._open, tokens[at : at + window.step])
            await asyncio.sleep(0)
            while self._is_unread:
                await asyncio.sleep(0)
            for _ in range(2):  # what was taken is on its way through the frontend until its task waits again
                await asyncio.sleep(0)

    async def _run_freely(self, window: Window) -> float:
        """Give every stream its tokens at a rate, and wait for who is behind; returns when the first were due."""
        tokens = load_encoding().encode(MARK) * window.step
        start = time.monotonic()
        for number in range(window.tokens // window.step):
            await asyncio.sleep(max(0.0, start + number / window.rate - time.monotonic()))
            self._put(self._open, tokens)
        while self._is_unread:
            await asyncio.sleep(0.01)
        return start

    @property
    def _is_unread(self) -> bool:
        """Whether any stream has not taken yet what there is for it."""
        return bool(self._outputs.qsize()) or any(state.queue.output is not None for state in self.states.values())

    def _put(self, request_ids: Iterable[str], tokens: list[int], *, is_last: bool = False) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: PLC0415 - takes seconds

        end = FinishReason.STOP if is_last else None
        outputs = [EngineCoreOutput(request_id, tokens, finish_reason=end) for request_id in request_ids]
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))


def resident() -> int:
    """The memory of this process, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def install() -> list[SteppedCore]:
    """Let every `AsyncLLM` of this process have such a core; the list has them once they are made."""
    from vllm.v1.engine import async_llm  # noqa: PLC0415 - takes seconds

    cores: list[SteppedCore] = []

    class SteppedLLM(async_llm.AsyncLLM):  # type: ignore[misc] # vLLM is not read by mypy
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.engine_core.states = self.output_processor.request_states

        async def add_request(self, request_id: str, prompt: Any, params: Any, *rest: Any, **options: Any) -> Any:
            if (case := self.engine_core.case) and not case.detokenizes:
                params.detokenize = False
            return await super().add_request(request_id, prompt, params, *rest, **options)

    def stepped(**_: Any) -> SteppedCore:
        cores.append(SteppedCore())
        return cores[-1]

    async_llm.EngineCoreClient.make_async_mp_client = stepped
    async_llm.AsyncLLM = SteppedLLM
    return cores

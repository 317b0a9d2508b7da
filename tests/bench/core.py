"""The engine core below both servers: it has no model, and emits tokens in the steps that a measurement commands.

It replaces vLLM's client of its engine cores.  Everything above it is the real code of each server: `AsyncLLM`, its
output processor, and one collector per stream.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
"""Tokens per step before the measured text."""

MARK = "~"
"""Text of each token in a window with a rate.  It occurs nowhere else in a stream, so clients can count the tokens."""

SETTLING = 0.3
"""Seconds after a window that still count: the event log is sealed every quarter of a second, so by then it is."""


class Window(msgspec.Struct, frozen=True, tag=True):
    """Tokens for each stream, in steps of ``step``.

    ``rate`` is steps per second, even if the frontend has not read the last step.  Without a rate, a step waits until
    the previous one is read: the frontend runs at full speed, but never has more than one step to read.
    """

    tokens: int
    step: int
    rate: float = 0.0


class Case(msgspec.Struct, frozen=True, tag=True):
    """A number of streams: each emits ``reasoning`` tokens of reasoning, then an answer, which is measured.

    Without ``detokenizes``, vLLM detokenizes no request, even if its frontend wants text.
    """

    streams: int
    reasoning: int
    detokenizes: bool = True


class End(msgspec.Struct, frozen=True, tag=True):
    """End all streams of the case."""


class Look(msgspec.Struct, frozen=True, tag=True):
    """Report the CPU time of the process so far; do nothing else."""


Command: TypeAlias = Case | Window | End | Look
"""``(Look | Case . (Window | Look)* . End)*``, each answered once it is done."""


class Measured(msgspec.Struct, frozen=True):
    """CPU seconds of one command, and the total that the process has ``used`` since its start.

    What the core itself takes is not counted in ``cpu``.  ``begun`` is the start of the command on the monotonic clock,
    which all processes of a machine share.  ``memory`` is the resident memory of the process in bytes, before and after
    the command.
    """

    cpu: float
    used: float
    begun: float
    memory: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Text:
    """The text tokens of a recorded response, repeated without end."""

    tokens: tuple[int, ...]

    def run(self, length: int) -> list[int]:
        """Return the first ``length`` tokens."""
        return list(islice(cycle(self.tokens), length))

    def thoughts(self, length: int) -> list[int]:
        """Return a message on the analysis channel with ``length`` tokens; nothing if ``length`` is 0."""
        markup = load_encoding().encode_markup
        if not length:
            return []
        return [*markup("<|channel|>analysis<|message|>"), *self.run(length), *markup("<|end|><|start|>assistant")]

    def answer(self) -> list[int]:
        """Return the header of the final message, which precedes the measured text."""
        return load_encoding().encode_markup("<|channel|>final<|message|>")


def recorded_text() -> Text:
    chunks = (frame for frame in read_frames(RECORDING, TokenFrame) if isinstance(frame, TokenChunk))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Text(tuple(token for token in tokens[3:] if token < TEXT_TOKENS))


class SteppedCore:
    """The part of vLLM's engine core client that `AsyncLLM` uses for our requests.

    Outside of a case, every request gets a short greeting: servers warm up with it, and it times the first token.
    """

    engine_ranks_managed = (0,)

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.states: Mapping[str, Any] = {}
        """Streams of the output processor, by the engine's request id."""
        self.case: Case | None = None
        self._open: list[str] = []
        self._own = 0.0
        """CPU seconds that the core has taken to make its outputs, and to look whether they are read."""
        self._arrived = asyncio.Condition()
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._text = recorded_text()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Do nothing: there are no images."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: there is no engine process."""

    async def add_request_async(self, request: Any) -> None:
        """Add a request to the current case; without a case, answer it at once."""
        if self.case is None:
            greeting = [*self._text.answer(), *self._text.run(1), *load_encoding().encode_markup("<|return|>")]
            self._put([request.request_id], greeting, is_last=True)
            return
        async with self._arrived:
            self._open.append(request.request_id)
            self._arrived.notify_all()

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Do nothing: no model is running."""

    async def get_output_async(self) -> Any:
        return await self._outputs.get()

    async def run(self, command: Command, ready: Callable[[], object]) -> Measured:
        """Run a command; ``ready`` is called when a case accepts its clients."""
        if isinstance(command, Look):  # without a look at the memory, which takes time
            await asyncio.sleep(SETTLING)
            return Measured(0.0, time.process_time(), time.monotonic())
        before, begun, used, own = resident(), time.monotonic(), time.process_time(), self._own
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
        return Measured(now - used - (self._own - own), now, begun, (before, resident()))

    async def _begin(self, case: Case) -> None:
        """Wait for all streams of a case, then emit their reasoning and the start of the answer."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._open) == case.streams)
        for part in (self._text.thoughts(case.reasoning), [*self._text.answer(), *self._text.run(FILL)]):
            await self._steps(Window(len(part), FILL), part)

    async def _steps(self, window: Window, tokens: list[int]) -> None:
        """Emit the tokens to every stream, each step after all streams have read the one before."""
        for at in range(0, len(tokens), window.step):
            self._put(self._open, tokens[at : at + window.step])
            await asyncio.sleep(0)
            while self._is_unread:
                await asyncio.sleep(0)
            for _ in range(2):  # what was taken is on its way through the frontend until its task waits again
                await asyncio.sleep(0)

    async def _run_freely(self, window: Window) -> float:
        """Emit tokens at a rate, then wait until all are read; return the time at which the first were due."""
        tokens = load_encoding().encode(MARK) * window.step
        start = time.monotonic()
        for number in range(window.tokens // window.step):
            if (early := start + number / window.rate - time.monotonic()) > 0:  # all steps that are due have been made
                await asyncio.sleep(early)
            self._put(self._open, tokens)
        while self._is_unread:
            await asyncio.sleep(0.01)
        return start

    @property
    def _is_unread(self) -> bool:
        if self._outputs.qsize():
            return True
        with self._uncounted():
            return any(state.queue.ready.is_set() for state in self.states.values())

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Do not count the CPU time of a block."""
        begun = time.thread_time()
        yield
        self._own += time.thread_time() - begun

    def _put(self, request_ids: Iterable[str], tokens: list[int], *, is_last: bool = False) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: PLC0415 - takes seconds

        end = FinishReason.STOP if is_last else None
        with self._uncounted():
            # a list for each, as from an engine: vLLM extends the lists of a request that it joins
            outputs = [EngineCoreOutput(request_id, [*tokens], finish_reason=end) for request_id in request_ids]
        self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def install() -> list[SteppedCore]:
    """Give every `AsyncLLM` of this process a `SteppedCore`; the returned list collects them as they are created."""
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

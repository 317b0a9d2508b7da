"""The stand-in engine core below every server: it has no model, and emits tokens in steps that it is told to make.

    python -m tests.bench.core HANDSHAKE FILE

It speaks vLLM's protocol to the frontend at the address HANDSHAKE, as the first data parallel rank, so it serves
penstock, vLLM's two frontends, and a bare one alike.  Commands arrive as lines of JSON on standard input, and each gets
its answer on standard output.  In FILE, the clients count the tokens that they have read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TypeAlias

import msgspec
import zmq

from penstock.pipeline.frames import TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.harmony.vocabulary import TEXT_TOKENS, load_encoding
from tests.bench.engine_protocol import ABORT, ADD, STOP, Core
from tests.bench.readers import COUNT, MARK
from tests.support.paths import HARMONY

RECORDING = HARMONY / "long_reasoning/tokens.jsonl"

FILL = 64
"""Tokens per step before the measured text."""

FILLING = 0.01
"""Seconds between these steps."""

SETTLING = 0.3
"""Seconds after a window that still count: the event log is sealed every quarter of a second, so by then it is."""

AHEAD = 2
"""Steps that the clients have not read yet, at full speed: the next one waits in the server while it works on one."""

CONTEXT = 131_072

READY = b"ready for clients"
MARKED = b"done: "
"""Before each answer, as other lines may come."""


class Window(msgspec.Struct, frozen=True, tag=True):
    """Tokens for each stream, in steps of ``step``.

    ``rate`` is steps per second, even if the server has not passed on the last step.  Without a rate, a step waits
    until the clients have read all but the last `AHEAD`: the server runs at full speed, but never has more to read.
    """

    tokens: int
    step: int
    rate: float = 0.0


class Case(msgspec.Struct, frozen=True, tag=True):
    """A number of streams: each emits ``reasoning`` tokens of reasoning, then an answer, which is measured."""

    streams: int
    reasoning: int = 0


class End(msgspec.Struct, frozen=True, tag=True):
    """End all streams of the case."""


Command: TypeAlias = Case | Window | End
"""``(Case . Window* . End)*``, each answered once it is done."""


class Done(msgspec.Struct, frozen=True):
    """A command is done; it ``begun`` at a time of the monotonic clock, which all processes of a machine share."""

    begun: float


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
    """The requests of a core, and the steps that they get.

    Outside of a case, every request gets a short greeting: servers warm up with it, and it times the first token.
    """

    def __init__(self, core: Core, read: Path) -> None:
        self._core = core
        self._read = os.open(read, os.O_RDWR | os.O_CREAT)
        self._case: Case | None = None
        self._open: dict[str, None] = {}
        self._emitted = 0
        """Measured tokens of all streams of the case."""
        self._text = recorded_text()
        (self._mark,) = load_encoding().encode(MARK.decode())
        (self._return,) = load_encoding().encode_markup("<|return|>")

    def run(self, command: Command, ready: Callable[[], object]) -> Done:
        """Run a command; ``ready`` is called when a case accepts its clients."""
        begun = time.monotonic()
        match command:
            case Case():
                self._case, self._open, self._emitted = command, {}, 0
                os.pwrite(self._read, COUNT.pack(0), 0)
                ready()
                self._begin(command)
            case Window(rate=0.0):
                self._as_read(command)
            case Window():
                begun = self._at_a_rate(command)
            case End():
                self._case = None
                self._core.step(self._open, (self._return,), STOP)
        return Done(begun)

    def receive(self, seconds: float = 0.0) -> None:
        """Take what has come, after a wait for something to come."""
        for kind, request_ids in self._core.read(seconds):
            if kind == ADD and self._case is None:
                self._core.step(request_ids, (*self._text.answer(), self._mark, self._return), STOP)
            elif kind == ADD:
                self._open |= dict.fromkeys(request_ids)
            elif kind == ABORT:
                for request_id in request_ids:
                    self._open.pop(request_id, None)

    def _begin(self, case: Case) -> None:
        """Wait for all streams of a case, then emit their reasoning and the start of the answer."""
        while len(self._open) < case.streams:
            self.receive(FILLING)
        ahead = [*self._text.thoughts(case.reasoning), *self._text.answer()]
        for at in range(0, len(ahead), FILL):
            self._core.step(self._open, ahead[at : at + FILL])
            self._wait_until(time.monotonic() + FILLING)
        self._as_read(Window(FILL, FILL))

    def _as_read(self, window: Window) -> None:
        for _ in range(window.tokens // window.step):
            self._emit(window.step)
            self._wait_for_clients(self._emitted - (AHEAD - 1) * window.step * len(self._open))
        self._wait_for_clients(self._emitted)

    def _at_a_rate(self, window: Window) -> float:
        """Emit tokens at a rate, then wait until all are read; return the time at which the first were due."""
        start = time.monotonic()
        for number in range(window.tokens // window.step):
            self._wait_until(start + number / window.rate)
            self._emit(window.step)
        self._wait_for_clients(self._emitted)
        return start

    def _emit(self, tokens: int) -> None:
        self._core.step(self._open, (self._mark,) * tokens)
        self._emitted += tokens * len(self._open)

    def _wait_until(self, moment: float) -> None:
        while (early := moment - time.monotonic()) > 0:
            self.receive(early)
            time.sleep(min(early % 0.001, max(0.0, moment - time.monotonic())))  # ZeroMQ waits whole milliseconds

    def _wait_for_clients(self, tokens: int) -> None:
        """Wait until the clients have read so many measured tokens of the case."""
        while COUNT.unpack(os.pread(self._read, COUNT.size, 0))[0] < tokens and self._open:
            self.receive(0.0005)
            time.sleep(0.0005)


def main(handshake: str, read: Path) -> None:
    """Serve until standard input ends."""
    core = Core(handshake, CONTEXT)
    stepped, poller = SteppedCore(core, read), zmq.Poller()
    poller.register(core.requests, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        if sys.stdin.fileno() not in dict(poller.poll()):
            stepped.receive()
        elif line := sys.stdin.buffer.readline():
            done = stepped.run(msgspec.json.decode(line, type=Command), lambda: say(READY))
            say(MARKED + msgspec.json.encode(done))
        else:
            break
    core.close()


def say(line: bytes) -> None:
    os.write(sys.stdout.fileno(), line + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

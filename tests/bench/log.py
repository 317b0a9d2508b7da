"""The cost of the event log: bytes kept per token, and microseconds to write and to replay a token."""

from __future__ import annotations

import statistics
import time
from itertools import cycle, islice

from penstock.pipeline import frames
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.services.runs.event_log import EventLog
from tests.support.frames import written_events
from tests.support.paths import HARMONY

RECORDING = HARMONY / "long_reasoning/parsed.jsonl"
TOKENS = 16_000
ROUNDS = 15

BLOCKS = (5, 25, 250)
"""Events in a quarter of a second, at 20, 100 and 1,000 tokens per second."""


def thinking() -> tuple[Response, list[ResponseEvent]]:
    """Return a response and its events: long reasoning in the words of the recording, one token per event."""
    started, *sequence = read_frames(RECORDING, frames.ParsedFrame)
    assert isinstance(started, frames.GenerationStarted)
    words = [frame for frame in sequence if isinstance(frame, frames.ItemDelta)]
    end = frames.TurnFinished("stop", cached_tokens=0, output_tokens=TOKENS, reasoning_tokens=TOKENS, duration=1.0)
    thoughts = islice(cycle(words), TOKENS)
    return started.facts.response, written_events(
        (started, frames.ReasoningOpened(), *thoughts, frames.ItemClosed(complete=True), end)
    )


def kept(response: Response, events: list[ResponseEvent], size: int) -> tuple[float, float, float]:
    """Return bytes per token, objects included, and microseconds to write and read a token, in blocks of ``size``."""
    log, started = EventLog(response), time.process_time()
    for number, event in enumerate(events, start=1):
        log.append(event)
        if number % size == 0:
            log.seal()
    log.seal()
    sealed = time.process_time()
    assert sum(1 for _ in log.read()) == len(events)
    took = time.process_time() - sealed
    return log.size / TOKENS, (sealed - started) * 1e6 / TOKENS, took * 1e6 / TOKENS


def log_figures() -> str:
    response, events = thinking()
    lines = ["events in a block   bytes per token   us to keep one   us to read it again"]
    for size in BLOCKS:
        rounds = [kept(response, events, size) for _ in range(ROUNDS)]
        held, write, read = (statistics.median(column) for column in zip(*rounds, strict=True))
        lines.append(f"{size:17d}{held:18.1f}{write:17.2f}{read:22.2f}")
    return "\n".join(lines)

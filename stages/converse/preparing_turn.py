"""The turn of a response that is only prepared: the engine reads the prompt, which is then in its prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.pipeline import frames


@dataclass(slots=True)
class PreparingTurn:
    """State machine, one per response: all output is dropped."""

    facts: frames.RequestFacts
    """The facts of the request; those of its prompt ask for a single token."""
    finished: frames.TurnFinished | None = None
    is_plain: bool = False

    def feed(self, frame: frames.ParsedFrame) -> Iterator[frames.ConversedFrame]:
        """Take the next frame of the model, and yield it if it is no output."""
        if isinstance(frame, frames.GenerationStarted):
            yield frames.ResponseStarted(self.facts)
            yield frame
        elif isinstance(frame, frames.TurnFinished):
            reason: frames.FinishReason = "cancelled" if frame.reason == "cancelled" else "stop"
            self.finished = replace(frame, reason=reason, output_tokens=0, reasoning_tokens=0, raw_messages=None)
            yield self.finished

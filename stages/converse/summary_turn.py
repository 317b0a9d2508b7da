"""The turn in which the model writes the summary of a compaction: its output becomes one item, the compaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.errors import CompactionFailed


@dataclass(slots=True)
class SummaryTurn:
    """State machine, one per compaction: the model's messages are the summary, and its other output is dropped."""

    facts: frames.RequestFacts
    """The facts of the request, which those of the summary's own prompt do not replace."""
    is_first: bool
    """True if the response has not begun."""
    finished: frames.TurnFinished | None = None
    is_plain: bool = False
    _texts: list[str] = field(default_factory=list)
    _is_message: bool = False
    _is_refused: bool = False

    def feed(self, frame: frames.ParsedFrame) -> Iterator[frames.ConversedFrame]:
        """Take the next frame of the model, and yield those of the compaction.

        Raises `CompactionFailed` if the turn ends without a summary.  A cancelled turn has no compaction.
        """
        match frame:
            case frames.GenerationStarted():
                if self.is_first:
                    yield frames.ResponseStarted(self.facts)
                yield frame
            case frames.ItemDelta(text):
                if self._is_message:
                    self._texts.append(text)
            case frames.TurnFinished():
                yield from self._finish(frame)
            case frames.AnnotationAdded():
                pass
            case _:
                self._begin_or_end(frame)

    def _begin_or_end(self, frame: frames.ItemOpened | frames.ItemClosed) -> None:
        if self._is_message:
            self._texts.append("\n\n")
        self._is_message = isinstance(frame, frames.MessageOpened)
        self._is_refused |= isinstance(frame, frames.RefusalOpened)

    def _finish(self, finished: frames.TurnFinished) -> Iterator[frames.ConversedFrame]:
        self.finished = finished
        summary = "".join(self._texts).strip()
        if finished.reason == "cancelled":
            yield finished
            return
        if not summary or self._is_refused or finished.reason == "content_filter":
            raise CompactionFailed("The conversation could not be compacted: the model wrote no summary of it.")
        self.finished = replace(finished, reason="stop")
        yield frames.CompactionOpened()
        yield frames.ItemDelta(summary)
        yield frames.ItemClosed(complete=True)
        yield self.finished


def turn_without_model(facts: frames.RequestFacts, text: str) -> Iterator[frames.ParsedFrame]:
    """Yield a turn with this message that no model has written; it is empty if the text is."""
    yield frames.GenerationStarted(facts, prompt_tokens=0)
    if text:
        yield from (frames.MessageOpened("final_answer"), frames.ItemDelta(text), frames.ItemClosed(complete=True))
    yield frames.TurnFinished("stop", cached_tokens=0, output_tokens=0, reasoning_tokens=0, duration=0.0)

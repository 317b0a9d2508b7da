"""The turns of the model: an ordinary one, the summary of a compaction, and one that is only prepared.

``converse`` passes the frames of a turn on up to the first call that the server has to run.  Everything after the text
of that call is held until the turn is over, so that items stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.errors import CompactionFailed
from penstock.pipeline.frames import (
    AnnotationAdded,
    ClientCallOpened,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ParsedFrame,
    ProgramOpened,
    ReasoningOpened,
    ServedOutputOpened,
    ServerCallOpened,
    ShellCallOpened,
    ShellOutputOpened,
    ToolSearchOpened,
    ToolSearchOutputOpened,
    TurnFinished,
)
from penstock.services.tools import ContainerFiles, FileSource, Source
from penstock.stages.converse.citations import Citations
from penstock.stages.converse.file_citations import FileCitations
from penstock.stages.models.client_actions import problem_of


@dataclass(frozen=True)
class ToolCall:
    """A call that the server has to run; ``name`` is the function within its ``namespace``.

    ``output`` opens the item of the output, if that is an item of its own.
    """

    namespace: str
    name: str
    text: str
    output: ServedOutputOpened | None = None

    @property
    def is_program(self) -> bool:
        """True if it is a program, whose calls and result are items of their own."""
        return (self.namespace, self.name) == ProgramOpened.tool


@dataclass(slots=True)
class ModelTurn:
    """State machine, one per turn; ``source`` finds the page or file of a cursor, None if there are none.

    ``files`` are those that the calls of the response have left.
    """

    source: Callable[[int], Source | FileSource | None] | None = None
    files: Sequence[ContainerFiles] = ()
    calls: list[ToolCall] = field(default_factory=list)
    """The complete calls of the turn, in order."""
    held: list[ParsedFrame] = field(default_factory=list)
    """The frames that have to wait, beginning with the end of the first call."""
    finished: TurnFinished | None = None
    waits_for_client: bool = False
    """True if the client has to act before the model can go on: run a call, or approve one."""
    has_async_call: bool = False
    """True if the client runs a call without whose output the model goes on."""
    ends_refused: bool = False
    """True if the turn's last item is a call that the model cannot make: it reads an error instead of a result."""
    is_plain: bool = field(init=False)
    """True if deltas may be passed on without `feed`."""
    _citations: Citations | None = field(init=False)
    _file_citations: FileCitations | None = field(init=False)
    _opening: ServerCallOpened | FunctionCallOpened | None = None
    """The call that is open, if its text matters here."""
    _texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._citations = Citations(self.source) if self.source else None
        self._file_citations = FileCitations(self.files) if self.files else None
        self.is_plain = self._cites_nothing

    @property
    def _cites_nothing(self) -> bool:
        return self._citations is None and self._file_citations is None

    @property
    def may_go_on(self) -> bool:
        """True if the turn made calls, and none for which the model has to wait."""
        return bool(self.calls or self.has_async_call) and not self.waits_for_client

    def feed(self, frame: ParsedFrame) -> Iterable[ParsedFrame]:
        """Take one frame and return the frames that may be passed on now."""
        self._note(frame)
        self.is_plain = self._opening is None and not self.calls and self._cites_nothing
        if self.calls:
            self.held.append(frame)
            return ()
        if isinstance(frame, TurnFinished):
            return ()
        return (frame,) if isinstance(frame, GenerationStarted) else self._cited(frame)

    def _cited(self, frame: ParsedFrame) -> Iterable[ParsedFrame]:
        """Return the frames that replace a frame, with citations of pages, then of files."""
        passed = self._citations.feed(frame) if self._citations else (frame,)
        if self._file_citations is None:
            return passed
        return [cited for each in passed for cited in self._file_citations.feed(each)]

    def _note(self, frame: ParsedFrame) -> None:
        match frame:
            case ItemDelta(text):
                if self._opening is not None:
                    self._texts.append(text)
            case ItemClosed(complete):
                opening, self._opening = self._opening, None
                if isinstance(opening, FunctionCallOpened):
                    self.ends_refused = complete and bool(problem_of(opening.form, "".join(self._texts)))
                    self.waits_for_client |= not self.ends_refused
                elif opening is not None and complete:
                    self.calls.append(ToolCall(*opening.tool, "".join(self._texts), output_of(opening)))
            case TurnFinished():
                self.finished = frame
            case GenerationStarted() | AnnotationAdded():
                pass
            case _:
                self._note_opened(frame)

    def _note_opened(self, frame: ItemOpened) -> None:
        self.ends_refused = False
        match frame:
            case ReasoningOpened(recipient):
                self.ends_refused = recipient is not None
            case FunctionCallOpened(is_async=True):
                self.has_async_call = True
            case FunctionCallOpened(form=form) if form != "function":
                self._opening, self._texts = frame, []
            case _ if isinstance(frame, ServerCallOpened):
                self._opening, self._texts = frame, []
            case _:
                self.waits_for_client |= isinstance(frame, ClientCallOpened)


def output_of(opening: ServerCallOpened) -> ServedOutputOpened | None:
    """Return the frame that opens the item of a call's output; None if that is no item of its own, or a program's."""
    match opening:
        case ShellCallOpened():
            return ShellOutputOpened()
        case ToolSearchOpened():
            return ToolSearchOutputOpened()
        case _:
            return None


@dataclass(slots=True)
class PreparingTurn:
    """A turn that is only prepared: the engine reads the prompt, which is then in its prefix cache.

    State machine, one per response: all output is dropped.
    """

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


@dataclass(slots=True)
class SummaryTurn:
    """A turn in which the model writes the summary of a compaction.

    State machine, one per compaction: the model's messages are the summary, and its other output is dropped.
    """

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

"""The transcript of a response so far, as the items that the model reads in its next turn.

The state machine watches the frames that leave ``converse``.  It builds the items like ``emit``, with the same ids.
Calls for the client need no item here, because the response ends with them, except for asynchronous functions.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.hosted_kinds import kinds, takes_text
from penstock.pipeline.protocol.items import FunctionCall, FunctionCallOutput, Item, Program, ProgramOutput, of_type
from penstock.stages.models.harmony.vocabulary import hosted_tools
from penstock.stages.models.output_items import Draft, Drafts
from penstock.stages.models.refusals import refusal_of


class Transcript:
    """State machine, one per response."""

    __slots__ = ("_draft", "_drafts", "_results", "_returned", "_tokens", "items", "take_text")

    def __init__(self, facts: frames.RequestFacts) -> None:
        self._drafts = Drafts(facts, is_shown=False)
        self._draft: Draft | None = None
        self.take_text: Callable[[str], object] = StringIO().write
        """Take more text of the open item: as `feed` does with a delta, without a call of Python."""
        self.items: list[Item] = []
        self._tokens: dict[str, frames.TokenIds] = {}
        self._results: dict[str, str] = {}
        self._returned: dict[str, tuple[str, ...]] = {}

    def feed(self, frame: frames.ConversedFrame) -> None:
        """Take the next frame."""
        match frame:
            case frames.ItemDelta(text):
                self.take_text(text)
            case frames.CallStarted():
                self._open.started = frame
            case frames.CallFinished():
                self._open.finished = frame
            case frames.ItemClosed():
                self._close(self._open, frame)
            case (
                frames.ResponseStarted() | frames.GenerationStarted() | frames.AnnotationAdded() | frames.TurnFinished()
            ):
                pass
            case _:
                self._draft = self._drafts.begin(frame)
                self.take_text = self._draft.written.write

    @property
    def latest_call_id(self) -> str:
        """The ``call_id`` of the latest program."""
        return of_type(self.items, Program)[-1].call_id

    def continued(self, conversation: frames.ResolvedRequest) -> frames.ResolvedRequest:
        """Return the conversation with the items added since the last call of this method."""
        if not self.items:
            return conversation
        items, self.items = self.items, []
        return replace(
            frames.with_facts(conversation, input=(*conversation.facts.input, *items)),
            tokens={**conversation.tokens, **self._tokens},
            results={**conversation.results, **self._results},
            returned={**conversation.returned, **self._returned},
            said=(),
        )

    @property
    def _open(self) -> Draft:
        if self._draft is None:
            raise RuntimeError("a frame of an item came before the first item")
        return self._draft

    def _close(self, draft: Draft, closed: frames.ItemClosed) -> None:
        draft.settle(complete=closed.complete)
        opening = draft.opening
        is_async = isinstance(opening, frames.FunctionCallOpened) and opening.is_async
        if isinstance(opening, frames.ClientCallOpened | frames.McpListToolsOpened) and not is_async:
            return
        if isinstance(opening, frames.ReasoningOpened) and opening.recipient is not None and closed.complete:
            self._refuse(draft, opening.recipient, opening.refusal)
            return
        item = draft.item(draft.final_status("completed" if closed.complete else "incomplete"))
        self.items.append(item)
        if closed.token_ids:
            self._tokens[item.id] = closed.token_ids
        if draft.hidden_result is not None:
            self._results[item.id] = draft.hidden_result
        if draft.finished and draft.finished.images:
            self._returned[item.id] = draft.finished.images

    def _refuse(self, draft: Draft, recipient: str, refusal: str) -> None:
        """Add the call of a tool that the model cannot call, and the error that it reads."""
        error = refusal or refusal_of(recipient)
        hosted = hosted_tools().get(recipient)
        if hosted and takes_text(hosted):
            call = kinds()[hosted.namespace].called(hosted.name, draft.text, draft.key)
            if isinstance(call, Program):
                output_id = ProgramOutput.new_id(draft.key)
                self.items += (call, ProgramOutput(output_id, call.call_id, error, "incomplete"))
                return
            self.items.append(replace(call, status="completed"))
            self._results[call.id] = error
            return
        namespace, _, name = recipient.rpartition(".")
        item_id, output_id = FunctionCall.new_id(draft.key), FunctionCallOutput.new_id(draft.key)
        self.items += (
            FunctionCall(
                item_id,
                call_id=draft.call_id,
                name=name,
                arguments=draft.text,
                status="completed",
                namespace=namespace or UNSET,
            ),
            FunctionCallOutput(output_id, draft.call_id, error, "completed"),
        )

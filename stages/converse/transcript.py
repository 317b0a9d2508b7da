"""The transcript of a response so far, as the items that the model reads in its next turn.

The state machine watches the frames that leave ``converse``.  It builds the items like ``emit``, with the same ids.
Calls for the client need no item here, because the response ends with them, except for asynchronous functions.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.protocol.items import CodeInterpreterCall, FunctionCall, FunctionCallOutput, Item, Reasoning
from penstock.pipeline.protocol.response import Response
from penstock.stages.models.output_items import Draft, Drafts


class Transcript:
    """State machine, one per response."""

    def __init__(self, response: Response) -> None:
        self._drafts = Drafts(response, is_shown=False)
        self._draft: Draft | None = None
        self._texts: list[str] = []
        self.take_text = self._texts.append
        """Take more text of the open item: as `feed` does with a delta, without a call of Python."""
        self.items: list[Item] = []
        self._tokens: dict[str, frames.TokenIds] = {}
        self._results: dict[str, str] = {}

    def feed(self, frame: frames.ConversedFrame) -> None:
        """Take the next frame."""
        match frame:
            case frames.ItemDelta(text):
                self._texts.append(text)
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
                self._texts.clear()
                self._draft = self._drafts.begin(frame)
                self._draft.texts = self._texts

    def continued(self, conversation: frames.ResolvedRequest) -> frames.ResolvedRequest:
        """Return the conversation with the items added since the last call of this method."""
        items, self.items = self.items, []
        return replace(
            frames.with_facts(conversation, input=(*conversation.facts.input, *items)),
            tokens={**conversation.tokens, **self._tokens},
            results={**conversation.results, **self._results},
        )

    def answer(self, recipient: str, result: str) -> None:
        """Turn the latest item, which addresses a tool that does not exist, into a call with this result."""
        key, call_id = self._open.key, self._open.call_id
        item = self.items.pop()
        text = item.text if isinstance(item, Reasoning) else ""
        if recipient == "python":
            call = CodeInterpreterCall(CodeInterpreterCall.new_id(key), text, "", "completed")
            self.items.append(call)
            self._results[call.id] = result
            return
        namespace, _, name = recipient.rpartition(".")
        self.items += (
            FunctionCall(FunctionCall.new_id(key), call_id, name, text, "completed", namespace or UNSET),
            FunctionCallOutput(FunctionCallOutput.new_id(key), call_id, result, "completed"),
        )

    @property
    def _open(self) -> Draft:
        if self._draft is None:
            raise RuntimeError("a frame of an item came before the first item")
        return self._draft

    def _close(self, draft: Draft, closed: frames.ItemClosed) -> None:
        is_async = isinstance(draft.opening, frames.FunctionCallOpened) and draft.opening.is_async
        if isinstance(draft.opening, frames.ClientCallOpened | frames.McpListToolsOpened) and not is_async:
            return
        item = draft.item(draft.final_status("completed" if closed.complete else "incomplete"))
        self.items.append(item)
        if closed.token_ids:
            self._tokens[item.id] = closed.token_ids
        if draft.hidden_result is not None:
            self._results[item.id] = draft.hidden_result

"""The transcript of a response so far, as the items that the model reads in its next turn.

The state machine watches the frames that leave ``converse``, and gives each item the id that ``emit`` gives it.  Calls
for the client need no item here, because the response ends with them.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    CodeCallOpened,
    ConversedFrame,
    CustomToolCallOpened,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    McpApprovalOpened,
    McpCallOpened,
    McpListToolsOpened,
    MessageOpened,
    Opened,
    ReasoningOpened,
    RefusalOpened,
    ResolvedRequest,
    ResponseStarted,
    ShellCallOpened,
    ShellOutput,
    ShellOutputOpened,
    TokenIds,
    TurnFinished,
    WebCallOpened,
    mcp_error,
)
from penstock.pipeline.protocol.items import (
    CallStatus,
    CodeInterpreterCall,
    FunctionCall,
    FunctionCallOutput,
    Item,
    ItemStatus,
    McpCall,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from penstock.pipeline.protocol.response import Response, item_key
from penstock.stages.models.shell_calls import shell_action

SANDBOX = {"type": "container_reference"}
"""The ``environment`` that marks a shell call as one for the server's sandbox, not for the client."""


class Transcript:
    """State machine, one per response."""

    def __init__(self, response: Response) -> None:
        self._response_id = response.id
        self._count = 0
        self._opening: Opened | None = None
        self._started = CallStarted()
        self._finished = CallFinished()
        self._shell_call_id = ""
        self.texts: list[str] = []
        """The pieces of the open item's text; a fast path may append to it directly instead of calling `feed`."""
        self.items: list[Item] = []
        self._tokens: dict[str, TokenIds] = {}
        self._results: dict[str, str] = {}

    def feed(self, frame: ConversedFrame) -> None:
        """Take the next frame."""
        match frame:
            case ItemDelta(text):
                self.texts.append(text)
            case CallStarted():
                self._started = frame
            case CallFinished():
                self._finished = frame
            case ItemClosed():
                self._close(frame)
            case ResponseStarted() | GenerationStarted() | AnnotationAdded() | TurnFinished():
                pass
            case _:
                self._opening = frame
                self.texts.clear()
                self._started, self._finished = CallStarted(), CallFinished()

    def continued(self, conversation: ResolvedRequest) -> ResolvedRequest:
        """Return the conversation with the items added since the last call of this method."""
        items, self.items = self.items, []
        return replace(
            conversation,
            input=(*conversation.input, *items),
            tokens={**conversation.tokens, **self._tokens},
            results={**conversation.results, **self._results},
        )

    def answer(self, recipient: str, result: str) -> None:
        """Turn the latest item, which addresses a tool that does not exist, into a call with this result."""
        key = self._key(self._count - 1)
        item = self.items.pop()
        text = item.text if isinstance(item, Reasoning) else ""
        if recipient == "python":
            self.items.append(CodeInterpreterCall(f"ci_{key}", text, "", "completed"))
            self._results[f"ci_{key}"] = result
            return
        namespace, _, name = recipient.rpartition(".")
        self.items += (
            FunctionCall(f"fc_{key}", f"call_{key}", name, text, "completed", namespace or UNSET),
            FunctionCallOutput(f"fco_{key}", f"call_{key}", result, "completed"),
        )

    def _close(self, closed: ItemClosed) -> None:
        if self._opening is None:
            raise RuntimeError("an end came while no item was open")
        item = self._item(self._opening, "".join(self.texts), "completed" if closed.complete else "incomplete")
        self._opening, self._count = None, self._count + 1
        if item is None:
            return
        self.items.append(item)
        if closed.token_ids:
            self._tokens[item.id] = closed.token_ids
        if isinstance(item, CodeInterpreterCall | WebSearchCall | ShellCallOutput):
            self._results[item.id] = self._finished.result

    def _item(self, opening: Opened, text: str, status: ItemStatus) -> Item | None:
        key, finished = self._key(self._count), self._finished
        outcome: CallStatus = "failed" if finished.error else status
        match opening:
            case ReasoningOpened():
                return Reasoning(f"rs_{key}", content=(ReasoningText(text),), status=status)
            case MessageOpened(phase):
                return Message(f"msg_{key}", status, "assistant", (OutputText(text),), phase or UNSET)
            case RefusalOpened():
                return Message(f"msg_{key}", status, "assistant", (Refusal(text),), "final_answer")
            case McpCallOpened(label, name, approved):
                output, error = (None, mcp_error(finished)) if finished.error else (finished.result, None)
                return McpCall(f"mcp_{key}", label, name, text, outcome, output, error, approved)
            case CodeCallOpened():
                return CodeInterpreterCall(f"ci_{key}", text, "", outcome)
            case WebCallOpened():
                return WebSearchCall(f"ws_{key}", self._started.action or {}, outcome)
            case ShellCallOpened():
                self._shell_call_id = f"call_{key}"
                return ShellCall(f"sh_{key}", self._shell_call_id, shell_action(text), status, SANDBOX)
            case ShellOutputOpened():
                outputs = finished.data.outputs if isinstance(finished.data, ShellOutput) else ()
                return ShellCallOutput(f"sho_{key}", self._shell_call_id, outputs, status)
            case McpListToolsOpened() | McpApprovalOpened() | FunctionCallOpened() | CustomToolCallOpened():
                return None

    def _key(self, index: int) -> str:
        return item_key(self._response_id, index)

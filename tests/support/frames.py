"""Frames of whole responses, in the order of their grammar, and the events that the writer makes of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from msgspec.structs import replace

from pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    CodeCallOpened,
    ConversedFrame,
    CustomToolCallOpened,
    EmittedFrame,
    FinishReason,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ItemResult,
    ItemTokens,
    McpApprovalOpened,
    McpCallOpened,
    McpListToolsOpened,
    MessageOpened,
    RawMessages,
    ReasoningOpened,
    RefusalOpened,
    ResponseStarted,
    ShellCallOpened,
    ShellOutputOpened,
    TurnFinished,
    WebCallOpened,
)
from pipeline.protocol.events import (
    Event,
    OutputItemAdded,
    OutputItemDone,
    OutputTextAnnotationAdded,
    ResponseEvent,
    ShellCallOutputContentDelta,
    ShellCallOutputContentDone,
    to_sse,
)
from pipeline.protocol.items import InputText, Logprob, Message, Phase, TopLogprob
from pipeline.protocol.response import ReasoningOptions
from pipeline.protocol.tools import ClientForm
from stages.emit.emit import ResponseWriter
from tests.support.stored_responses import response

INPUT = (Message("msg_in", "completed", "user", (InputText("How is Oslo?"),)),)

SUMMARISED = ReasoningOptions("medium", "auto")
"""The reasoning options of a request that asks for a summary."""

NOTE = {"type": "url_citation", "url": "https://a.example/", "title": "A", "start_index": 0, "end_index": 2}

SEARCH = {"type": "search", "query": "Oslo"}
FOUND = {**SEARCH, "sources": [{"type": "url", "url": "https://a.example/"}]}
LOGS = {"type": "logs", "logs": "2\n"}
LISTED = {"name": "ask", "input_schema": {"type": "object"}, "description": "Asks."}
WRITTEN = {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
HUNG = {"stdout": "", "stderr": "b\n", "outcome": {"type": "timeout"}}

FORMS: dict[ClientForm, str] = {
    "local_shell": '{"command": ["ls", "-l"], "timeout_ms": 5}',
    "shell": '{"commands": ["ls", "", "pwd"], "max_output_length": 9}',
    "apply_patch": '{"type": "create_file", "path": "a.txt", "diff": "+a"}',
}
"""Arguments of each form."""

Piece = str | ItemDelta | AnnotationAdded
Frames = tuple[ConversedFrame, ...]


def started(
    response_id: str = "resp_1", prompt_tokens: int = 7, raw_messages: RawMessages | None = None, **fields: Any
) -> GenerationStarted:
    """The first frame of a response."""
    begun: dict[str, Any] = {"status": "in_progress", "completed_at": None, "output": ()}
    return GenerationStarted(response(response_id, **(begun | fields)), INPUT, prompt_tokens, raw_messages=raw_messages)


def item(opening: ItemOpened, *pieces: Piece, complete: bool = True) -> Frames:
    """One item, whole."""
    grow = (ItemDelta(piece) if isinstance(piece, str) else piece for piece in pieces)
    return (opening, *grow, ItemClosed(complete))


def reasoning(*texts: str, complete: bool = True) -> Frames:
    """Some thinking."""
    return item(ReasoningOpened(), *texts, complete=complete)


def message(*pieces: Piece, phase: Phase | None = "final_answer", complete: bool = True) -> Frames:
    """Some words to the user."""
    return item(MessageOpened(phase), *pieces, complete=complete)


def refusal(*texts: str, complete: bool = True) -> Frames:
    """Some words on why there is no answer."""
    return item(RefusalOpened(), *texts, complete=complete)


def function_call(*texts: str, name: str = "get_weather", complete: bool = True) -> Frames:
    """A call."""
    return item(FunctionCallOpened(name), *texts, complete=complete)


def custom_tool_call(*texts: str, name: str = "shell", complete: bool = True) -> Frames:
    """A call of a custom tool."""
    return item(CustomToolCallOpened(name), *texts, complete=complete)


def form_call(form: ClientForm, *texts: str, complete: bool = True) -> Frames:
    """A call that the client runs and that has an item of its own."""
    return item(FunctionCallOpened(form, form=form), *texts or (FORMS[form],), complete=complete)


def approval(*texts: str, complete: bool = True) -> Frames:
    """A call that the client has to approve of."""
    return item(McpApprovalOpened("wiki", "ask"), *texts, complete=complete)


def served(
    opening: ItemOpened | McpListToolsOpened | ShellOutputOpened,
    *texts: str,
    outcome: CallFinished | None = None,
    action: dict[str, Any] | None = None,
    complete: bool = True,
) -> Frames:
    """An item of what the server runs; what is not ``complete`` was cut before it ran."""
    ran = (CallStarted(action), outcome or CallFinished()) if complete else ()
    return (opening, *map(ItemDelta, texts), *ran, ItemClosed(complete))


def mcp_list(*tools: dict[str, Any], error: str | None = None) -> Frames:
    """What an MCP server offers."""
    return served(McpListToolsOpened("wiki"), outcome=CallFinished(error=error, data=tools))


def mcp_call(*texts: str, result: str = "Fine.", error: str | None = None, complete: bool = True) -> Frames:
    """A call of a tool of an MCP server."""
    outcome = CallFinished(result, error)
    return served(McpCallOpened("wiki", "ask"), *texts, outcome=outcome, complete=complete)


def code_call(
    *texts: str, outputs: tuple[dict[str, Any], ...] = (), error: str | None = None, complete: bool = True
) -> Frames:
    """Code that runs."""
    return served(CodeCallOpened(), *texts, outcome=CallFinished("2\n", error, outputs), complete=complete)


def web_call(
    *texts: str, found: tuple[dict[str, Any], ...] = (), error: str | None = None, complete: bool = True
) -> Frames:
    """A search."""
    outcome = CallFinished("Oslo is a city.", error, found)
    return served(WebCallOpened("search"), *texts, outcome=outcome, action=SEARCH, complete=complete)


def shell_call(*texts: str, complete: bool = True) -> Frames:
    """A call of the sandbox's shell."""
    return item(ShellCallOpened(), *texts, complete=complete)


def shell_output(*outputs: dict[str, Any], error: str | None = None) -> Frames:
    """What came of it."""
    return served(ShellOutputOpened(), outcome=CallFinished("a\n", error, outputs))


def spelled(text: str, alternatives: int = 0) -> ItemDelta:
    """A delta with logprobs: a token for each character, or two for one of several bytes."""
    tokens = [part for raw in map(str.encode, text) for part in (raw[:1], raw[1:]) if part]
    others = tuple(TopLogprob(chr(97 + rank), (97 + rank,), -1.0 - rank) for rank in range(alternatives))
    return ItemDelta(text, tuple(Logprob(_token_text(raw), tuple(raw), -0.5, others) for raw in tokens))


def _token_text(raw: bytes) -> str:
    return raw.decode() if raw.isascii() else "".join(f"\\x{byte:02x}" for byte in raw)


def finished(reason: FinishReason = "stop", **fields: Any) -> TurnFinished:
    """The last frame."""
    counts: dict[str, Any] = {"cached_tokens": 4, "output_tokens": 20, "reasoning_tokens": 8, "duration": 2.0}
    return TurnFinished(reason, **(counts | fields))


def served_turns() -> Frames:
    """Two turns with all that the server runs itself, ahead of an answer."""
    first = started()
    return (
        ResponseStarted(first.response, first.input),
        *mcp_list(LISTED),
        *mcp_list(error="It is down."),
        first,
        *reasoning("So."),
        *mcp_call('{"q":', '"a"}'),
        *mcp_call("{}", error="No."),
        *code_call("1 +", " 1", outputs=(LOGS,)),
        *code_call("1 /", error="It hung."),
        *web_call("{}", found=(FOUND,)),
        *web_call("{}", error="It is down."),
        *shell_call('{"cmd": ["ls"]}'),
        *shell_output(WRITTEN, HUNG),
        finished(),
        started(prompt_tokens=50),
        *message("Hel", "lo!"),
        finished(),
    )


def asking_turn() -> Frames:
    """A turn with all that the client has to do something about."""
    forms = (frame for form in FORMS for frame in form_call(form))
    return (started(), *approval('{"q":', '"a"}'), *forms, *custom_tool_call("ls"), *function_call("{}"), finished())


def whole_turn() -> Frames:
    """A turn with the items that a model writes most."""
    items = (*reasoning("Let me ", "think."), *message("Hel", "lo!"), *function_call('{"city":', '"Oslo"}'))
    return (started(), *items, finished())


def rare_turn() -> Frames:
    """A turn with the items that a model writes least, and with all that may stand beside text."""
    text = message(spelled("Hé", 2), AnnotationAdded(NOTE), spelled("y", 2))
    return (started(top_logprobs=2), *text, *refusal("No."), *custom_tool_call("ls"), finished())


def summarised_turn() -> Frames:
    """A turn whose thinking comes out as a summary."""
    return (started(reasoning=SUMMARISED), *reasoning("So."), finished())


def in_background(frames: Frames) -> Frames:
    """The same turn, of a response that waits before it begins."""
    first, *rest = frames
    assert isinstance(first, GenerationStarted | ResponseStarted)
    return (replace(first, response=replace(first.response, background=True, status="queued")), *rest)


def written(frames: Iterable[ConversedFrame]) -> list[ResponseEvent]:
    """The events of a response that ends."""
    writer = ResponseWriter()
    events = [event for frame in frames for event in writer.feed(frame)]
    return only_events([*events, *writer.finish()])


def only_events(frames: Iterable[EmittedFrame]) -> list[ResponseEvent]:
    """What is for the client of all that the writer says."""
    return [frame for frame in frames if not isinstance(frame, ResponseStarted | ItemTokens | ItemResult)]


def is_news(event: Event) -> bool:
    """Whether nobody can tell an event ahead of its time, deltas of texts aside: what is new, and what tools return."""
    if isinstance(event, OutputItemDone):
        outcome = [getattr(event.item, name, None) for name in ("tools", "output", "outputs", "error")]
        return any(outcome) or event.item.id.startswith("ws_")
    return isinstance(
        event,
        OutputItemAdded | OutputTextAnnotationAdded | ShellCallOutputContentDelta | ShellCallOutputContentDone,
    )


def types(events: Iterable[Event]) -> list[str]:
    """The names of events, without what all of them begin with."""
    return [str(event.__struct_config__.tag).removeprefix("response.") for event in events]


def on_the_wire(event: Event) -> dict[str, Any]:
    """The JSON of an event, as its SSE frame carries it."""
    name, data, *rest = to_sse(event).decode().split("\n")
    assert rest == ["", ""]
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    return body


async def source(
    frames: Iterable[ConversedFrame], error: BaseException | None = None
) -> AsyncGenerator[ConversedFrame, None]:
    """Frames as a stage's source, which breaks at its end if there is an ``error``."""
    for frame in frames:
        yield frame
    if error:
        raise error

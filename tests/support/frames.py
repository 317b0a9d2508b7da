"""Frames of whole responses, in the order of their grammar, and the events that the writer makes of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from hypothesis import strategies as st
from msgspec import convert
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.items import InputText, ListedTool, Logprob, Message, Phase, TopLogprob
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.pipeline.protocol.response import ReasoningOptions
from penstock.pipeline.protocol.tools import ClientForm
from penstock.stages.emit.emit import ResponseWriter
from tests.support.stored_responses import facts, response

INPUT = (Message("msg_in", "completed", "user", (InputText("How is Oslo?"),)),)

SUMMARY_OPTIONS = ReasoningOptions("medium", "auto")
"""The reasoning options of a request that asks for a summary."""

CITATION = {"type": "url_citation", "url": "https://a.example/", "title": "A", "start_index": 0, "end_index": 2}

SEARCH = {"type": "search", "query": "Oslo"}
FOUND_PAGES = {**SEARCH, "sources": [{"type": "url", "url": "https://a.example/"}]}
LOGS = {"type": "logs", "logs": "2\n"}
LISTED_TOOL = {"name": "ask", "input_schema": {"type": "object"}, "description": "Asks."}
SHELL_OUTPUT = {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
LOADED_TOOL = {"type": "function", "name": "ask", "parameters": {"type": "object"}, "strict": None}
SHELL_TIMEOUT = {"stdout": "", "stderr": "b\n", "outcome": {"type": "timeout"}}

PROGRAM = "call_10000"
"""The ``call_id`` of a program that is the first item of the response `started`."""

FORMS: dict[ClientForm, str] = {
    "local_shell": '{"command": ["ls", "-l"], "timeout_ms": 5}',
    "shell": '{"commands": ["ls", "cd a", "pwd"], "max_output_length": 9}',
    "apply_patch": '{"type": "create_file", "path": "a.txt", "diff": "+a"}',
    "tool_search": '{"query": "weather"}',
    "computer": '{"actions": [{"type": "click", "x": 1, "y": 2, "button": "left"}, {"type": "wait"}]}',
    "computer_use_preview": '{"action": {"type": "scroll", "x": 1, "y": 2, "scroll_x": 0, "scroll_y": 9}}',
}
"""Arguments of each form."""

Piece = str | frames.ItemDelta | frames.AnnotationAdded
Frames = tuple[frames.ConversedFrame, ...]


def started(
    response_id: str = "resp_1", prompt_tokens: int = 7, raw_messages: frames.RawMessages | None = None, **fields: Any
) -> frames.GenerationStarted:
    begun: dict[str, Any] = {"status": "in_progress", "completed_at": None, "output": ()}
    if raw_messages is not None:
        begun |= {"input_messages": None, "output_messages": None}
    wants_raw = raw_messages is not None
    of_request = facts(response(response_id, **(begun | fields)), input=INPUT, wants_raw_messages=wants_raw)
    return frames.GenerationStarted(of_request, prompt_tokens, raw_messages)


def raw_started(
    raw: RawPrompt, prompt: frames.TokenIds = (), logprobs: int | None = None, **sampling: Any
) -> frames.GenerationStarted:
    """The beginning of the output after a raw prompt of these tokens."""
    begun = started(prompt_tokens=len(prompt) or 7, top_logprobs=logprobs or 0)
    wanted = frames.Sampling(1.0, 1.0, logprobs=logprobs, **sampling)
    return replace(begun, facts=replace(begun.facts, raw=raw, input=(), sampling=wanted), prompt=prompt)


def item(opening: frames.ItemOpened, *pieces: Piece, complete: bool = True) -> Frames:
    grow = (frames.ItemDelta(piece) if isinstance(piece, str) else piece for piece in pieces)
    return (opening, *grow, frames.ItemClosed(complete))


def reasoning(*texts: str, complete: bool = True) -> Frames:
    return item(frames.ReasoningOpened(), *texts, complete=complete)


def message(*pieces: Piece, phase: Phase | None = "final_answer", complete: bool = True) -> Frames:
    return item(frames.MessageOpened(phase), *pieces, complete=complete)


def refusal(*texts: str, complete: bool = True) -> Frames:
    return item(frames.RefusalOpened(), *texts, complete=complete)


def function_call(*texts: str, name: str = "get_weather", complete: bool = True) -> Frames:
    return item(frames.FunctionCallOpened(name), *texts, complete=complete)


def custom_tool_call(*texts: str, name: str = "shell", complete: bool = True) -> Frames:
    return item(frames.CustomToolCallOpened(name), *texts, complete=complete)


def form_call(form: ClientForm, *texts: str, complete: bool = True) -> Frames:
    """A call of a built-in tool that the client runs; it has its own item type."""
    return item(frames.FunctionCallOpened(form, form=form), *texts or (FORMS[form],), complete=complete)


def approval(*texts: str, complete: bool = True) -> Frames:
    return item(frames.McpApprovalOpened("wiki", "ask"), *texts, complete=complete)


def server_item(
    opening: frames.ItemOpened | frames.McpListToolsOpened | frames.ServedOutputOpened,
    *texts: str,
    outcome: frames.CallFinished | None = None,
    action: dict[str, Any] | None = None,
    complete: bool = True,
) -> Frames:
    """A call that the server runs; if it is not ``complete``, it was cut before it ran."""
    ran = (frames.CallStarted(action), outcome or frames.CallFinished()) if complete else ()
    return (opening, *map(frames.ItemDelta, texts), *ran, frames.ItemClosed(complete))


def mcp_list(*tools: dict[str, Any], error: str | None = None) -> Frames:
    return server_item(
        frames.McpListToolsOpened("wiki"),
        outcome=frames.CallFinished("", error, frames.ListedTools(convert(tools, tuple[ListedTool, ...]))),
    )


def mcp_call(*texts: str, result: str = "Fine.", error: str | None = None, complete: bool = True) -> Frames:
    outcome = frames.CallFinished(result, error)
    return server_item(frames.McpCallOpened("wiki", "ask"), *texts, outcome=outcome, complete=complete)


def code_call(
    *texts: str, outputs: tuple[dict[str, Any], ...] = (), error: str | None = None, complete: bool = True
) -> Frames:
    outcome = frames.CallFinished("2\n", error, frames.CodeOutputs(outputs) if outputs else None)
    return server_item(frames.CodeCallOpened(), *texts, outcome=outcome, complete=complete)


def web_call(
    *texts: str, found: tuple[dict[str, Any], ...] = (), error: str | None = None, complete: bool = True
) -> Frames:
    outcome = frames.CallFinished("Oslo is a city.", error, frames.BrowserAction(found[0]) if found else None)
    return server_item(frames.WebCallOpened("search"), *texts, outcome=outcome, action=SEARCH, complete=complete)


def shell_call(*texts: str, complete: bool = True) -> Frames:
    return item(frames.ShellCallOpened(), *texts, complete=complete)


def shell_output(*outputs: dict[str, Any], error: str | None = None) -> Frames:
    return server_item(
        frames.ShellOutputOpened(), outcome=frames.CallFinished("a\n", error, frames.ShellOutput(outputs))
    )


def tool_search(*texts: str, complete: bool = True) -> Frames:
    return item(frames.ToolSearchOpened(), *texts, complete=complete)


def program(*texts: str, complete: bool = True) -> Frames:
    return item(frames.ProgramOpened(), *texts, complete=complete)


def called_by(call_id: str, call: Frames) -> Frames:
    """A call that the program with this ``call_id`` makes."""
    opening, *rest = call
    return (replace(opening, caller=call_id), *rest)


def program_output(call_id: str, result: str = "6\n", error: str | None = None) -> Frames:
    return server_item(frames.ProgramOutputOpened(call_id), outcome=frames.CallFinished(result, error))


def loaded_tools(*tools: dict[str, Any], error: str | None = None) -> Frames:
    return server_item(
        frames.ToolSearchOutputOpened(), outcome=frames.CallFinished(error or "", error, frames.LoadedTools(tools))
    )


def spelled_delta(text: str, alternatives: int = 0) -> frames.ItemDelta:
    """A delta with logprobs: one token for each character, or two for a character of several bytes."""
    tokens = [part for raw in map(str.encode, text) for part in (raw[:1], raw[1:]) if part]
    others = tuple(TopLogprob(chr(97 + rank), (97 + rank,), -1.0 - rank) for rank in range(alternatives))
    return frames.ItemDelta(text, tuple(Logprob(_token_text(raw), tuple(raw), -0.5, others) for raw in tokens))


def _token_text(raw: bytes) -> str:
    return raw.decode() if raw.isascii() else "".join(f"\\x{byte:02x}" for byte in raw)


def finished(reason: frames.FinishReason = "stop", **fields: Any) -> frames.TurnFinished:
    counts: dict[str, Any] = {"cached_tokens": 4, "output_tokens": 20, "reasoning_tokens": 8, "duration": 2.0}
    return frames.TurnFinished(reason, **(counts | fields))


def server_turns() -> Frames:
    first = started()
    return (
        frames.ResponseStarted(first.facts),
        *mcp_list(LISTED_TOOL),
        *mcp_list(error="It is down."),
        first,
        *reasoning("So."),
        *mcp_call('{"q":', '"a"}'),
        *mcp_call("{}", error="No."),
        *code_call("1 +", " 1", outputs=(LOGS,)),
        *code_call("1 /", error="It hung."),
        *web_call("{}", found=(FOUND_PAGES,)),
        *web_call("{}", error="It is down."),
        *shell_call('{"cmd": ["ls"]}'),
        *shell_output(SHELL_OUTPUT, SHELL_TIMEOUT),
        finished(),
        started(prompt_tokens=50),
        *message("Hel", "lo!"),
        finished(),
    )


def client_turn() -> Frames:
    forms = (frame for form in FORMS for frame in form_call(form))
    return (started(), *approval('{"q":', '"a"}'), *forms, *custom_tool_call("ls"), *function_call("{}"), finished())


def whole_turn() -> Frames:
    items = (*reasoning("Let me ", "think."), *message("Hel", "lo!"), *function_call('{"city":', '"Oslo"}'))
    return (started(), *items, finished())


def rare_turn() -> Frames:
    text = message(spelled_delta("Hé", 2), frames.AnnotationAdded(CITATION), spelled_delta("y", 2))
    return (started(top_logprobs=2), *text, *refusal("No."), *custom_tool_call("ls"), finished())


def summary_turn() -> Frames:
    return (started(reasoning=SUMMARY_OPTIONS), *reasoning("So."), finished())


def background_turn(sequence: Frames) -> Frames:
    first, *rest = sequence
    assert isinstance(first, frames.GenerationStarted | frames.ResponseStarted)
    queued = replace(first.facts.response, background=True, status="queued")
    return (replace(first, facts=replace(first.facts, response=queued)), *rest)


def written_events(sequence: Iterable[frames.ConversedFrame]) -> list[events.ResponseEvent]:
    writer = ResponseWriter()
    sent = [event for frame in sequence for event in writer.feed(frame)]
    return client_events([*sent, *writer.finish()])


def client_events(sequence: Iterable[frames.EmittedFrame]) -> list[events.ResponseEvent]:
    """Keep the events; drop the frames that only the store reads."""
    return [
        frame
        for frame in sequence
        if not isinstance(frame, frames.ResponseStarted | frames.ItemTokens | frames.ItemResult)
    ]


def is_unforeseen(event: events.Event) -> bool:
    """Return True if an event has new content: an item, an annotation or tool output; text deltas do not count."""
    if isinstance(event, events.OutputItemDone):
        outcome = [getattr(event.item, name, None) for name in ("tools", "output", "outputs", "error")]
        return any(outcome) or event.item.id.startswith("ws_")
    return isinstance(
        event,
        events.OutputItemAdded
        | events.OutputTextAnnotationAdded
        | events.ShellCallOutputContentDelta
        | events.ShellCallOutputContentDone,
    )


def event_types(sent: Iterable[events.Event]) -> list[str]:
    """The types of events, without the prefix ``response.``."""
    return [str(event.__struct_config__.tag).removeprefix("response.") for event in sent]


def sse_json(event: events.Event) -> dict[str, Any]:
    name, data, *rest = events.to_sse(event).decode().split("\n")
    assert rest == ["", ""]
    body: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    return body


async def frame_source(
    sequence: Iterable[frames.ConversedFrame], error: BaseException | None = None
) -> AsyncGenerator[frames.ConversedFrame, None]:
    """Yield frames as the source of a stage, then raise ``error`` if there is one."""
    for frame in sequence:
        yield frame
    if error:
        raise error


_names = st.sampled_from(["get_weather", "clock"])
_namespaces = st.sampled_from([None, "home"])


# str.splitlines splits at the excluded characters and SSE does not; test_events covers them.
_characters = st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029")
_text = st.text(_characters, min_size=1, max_size=5)
_texts = st.lists(_text, max_size=3)
_citations = st.builds(lambda end: frames.AnnotationAdded({**CITATION, "end_index": end}), st.integers(0, 9))
_errors = st.none() | _text


def _plain_items(opening: st.SearchStrategy[frames.ItemOpened]) -> st.SearchStrategy[Frames]:
    return st.builds(lambda opened, texts: item(opened, *texts), opening, _texts)


def _outputs(*one_of: dict[str, Any]) -> st.SearchStrategy[tuple[dict[str, Any], ...]]:
    return st.lists(st.sampled_from(one_of), max_size=3).map(tuple)


@st.composite
def _shells(draw: st.DrawFn) -> Frames:
    call = shell_call(*draw(st.just(['{"cmd": ["ls"]}']) | st.just(['{"commands": ["ls", "pwd"]}']) | _texts))
    return (*call, *shell_output(*draw(_outputs(SHELL_OUTPUT, SHELL_TIMEOUT)), error=draw(_errors)))


@st.composite
def _programs(draw: st.DrawFn) -> Frames:
    return (*program(*draw(_texts)), *draw(_calls_of_program(PROGRAM)))


@st.composite
def _calls_of_program(draw: st.DrawFn, call_id: str) -> Frames:
    """The calls of a program, and its output unless it waits for the client."""
    calls = draw(st.lists(_called, max_size=3))
    output = draw(st.just(()) | st.builds(program_output, st.just(call_id), _text, _errors))
    return (*(frame for call in calls for frame in called_by(call_id, call)), *output)


@st.composite
def _form_calls(draw: st.DrawFn) -> Frames:
    form = draw(st.sampled_from(list(FORMS)))
    return form_call(form, *draw(st.just([FORMS[form]]) | _texts))


def _messages(alternatives: int | None) -> st.SearchStrategy[Frames]:
    """Messages with ``alternatives`` top logprobs for each token, or without logprobs if it is None."""
    deltas = _text if alternatives is None else _text.map(lambda text: spelled_delta(text, alternatives))
    phases: st.SearchStrategy[Phase | None] = st.sampled_from(["commentary", "final_answer", None])
    pieces: st.SearchStrategy[list[Piece]] = st.lists(deltas | _citations, max_size=4)
    return st.builds(lambda phase, texts: message(*texts, phase=phase), phases, pieces)


_listings = st.builds(lambda error, tools: mcp_list(*tools, error=error), _errors, _outputs(LISTED_TOOL))

_refused_calls = st.builds(
    lambda opening, texts: server_item(opening, *texts, outcome=frames.CallFinished("No.", ran=False)),
    st.sampled_from([frames.McpCallOpened("wiki", "ask"), frames.CodeCallOpened(), frames.WebCallOpened("search")]),
    _texts,
)

_called: st.SearchStrategy[Frames] = st.one_of(
    _plain_items(st.just(frames.McpApprovalOpened("wiki", "ask"))),
    _plain_items(st.builds(frames.FunctionCallOpened, _names, _namespaces)),
    _plain_items(st.builds(frames.CustomToolCallOpened, _names, _namespaces)),
    st.builds(lambda texts, error: mcp_call(*texts, error=error), _texts, _errors),
    st.builds(lambda texts, error, out: code_call(*texts, error=error, outputs=out), _texts, _errors, _outputs(LOGS)),
    st.builds(
        lambda texts, error, found: web_call(*texts, error=error, found=found), _texts, _errors, _outputs(FOUND_PAGES)
    ),
    _refused_calls,
    _shells(),
)
"""The calls that a model makes, and a program as well."""

_items: st.SearchStrategy[Frames] = st.one_of(
    _plain_items(st.just(frames.ReasoningOpened()) | st.just(frames.RefusalOpened())),
    _called,
    _form_calls(),
    _programs(),
)


def _cut_item(sequence: Frames) -> Frames:
    """Cut an item at the end of its text; if there are several items, keep only the first."""
    end = next(at for at, frame in enumerate(sequence) if isinstance(frame, frames.CallStarted | frames.ItemClosed))
    return (*sequence[:end], frames.ItemClosed(complete=False))


@st.composite
def _turns(
    draw: st.DrawFn, first: frames.GenerationStarted, alternatives: int | None, reason: frames.FinishReason
) -> Frames:
    """One turn; if it was cut, its last item may be incomplete."""
    items = draw(st.lists(_items | _messages(alternatives), max_size=3))
    if items and reason != "stop" and draw(st.booleans()):
        items[-1] = _cut_item(items[-1])
    thought = draw(st.integers(0, 50))
    counts = {"output_tokens": thought + draw(st.integers(0, 50)), "reasoning_tokens": thought}
    cached, duration = draw(st.integers(0, first.prompt_tokens)), draw(st.floats(0, 99))
    end = finished(reason, **counts, cached_tokens=cached, duration=duration, raw_messages=first.raw_messages)
    return (first, *(frame for item in items for frame in item), end)


@st.composite
def response_frames(draw: st.DrawFn) -> Frames:
    reason: frames.FinishReason = draw(
        st.sampled_from(["stop", "length", "content_filter", "max_tool_calls", "max_turns", "steered"])
    )
    alternatives = draw(st.sampled_from([None, 0, 2]))
    raw: frames.RawMessages | None = draw(st.sampled_from([None, ({"role": "user"},)]))
    reasoning = draw(st.sampled_from([ReasoningOptions(None, None), SUMMARY_OPTIONS]))
    prompts = draw(st.lists(st.integers(1, 99), min_size=1, max_size=3))
    begun = [started("resp_1", size, raw, reasoning=reasoning, top_logprobs=alternatives or 0) for size in prompts]
    listed = draw(st.lists(_listings, max_size=2))
    resumed = draw(st.just(()) | _calls_of_program("call_of_earlier"))
    ahead = (
        frames.ResponseStarted(begun[0].facts),
        *(frame for listing in listed for frame in listing),
        *resumed,
    )
    earlier = [draw(_turns(first, alternatives, "stop")) for first in begun[:-1]]
    last = draw(_turns(begun[-1], alternatives, reason))
    return (*(ahead if listed or resumed else ()), *(frame for turn in (*earlier, last) for frame in turn))

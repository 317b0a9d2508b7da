"""Frames: what passes between the stages, one tagged union per junction.

    CreateResponse -> normalize -> Conversation -> converse -> ConversedFrame -> emit -> EmittedFrame
                   -> persist -> ResponseEvent

and within ``converse``, once for each turn of the model:

    Conversation -> render -> Prompt -> generate -> TokenFrame -> parse -> ParsedFrame

The first frame of every junction carries all that the stages behind it need to know of the request, ids and times
included, so that one recorded junction is complete and replays to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Item, Logprob, Phase
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.protocol.tools import ClientForm, Toolset


class _Frame(msgspec.Struct, frozen=True, gc=False, tag=True, omit_defaults=True):
    pass


class Sampling(msgspec.Struct, frozen=True):
    """How the engine picks tokens, in the terms of vLLM's ``SamplingParams``.

    ``max_tokens`` None means up to the end of the context.  ``stop`` are texts that end generation and are cut off.
    ``logprobs`` is the number of alternatives to report beside each token; None reports nothing at all.
    """

    temperature: float
    top_p: float
    max_tokens: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


class Scheduling(msgspec.Struct, frozen=True):
    """How the engine treats a request beside sampling.

    ``cache_salt`` keeps its prefix cache apart from that of other salts.  A lower ``priority`` goes first.
    ``trace_headers`` are those of W3C Trace Context, as the client sent them.
    """

    cache_salt: str | None = None
    priority: int = 0
    trace_headers: Mapping[str, str] = {}


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request comes from, for the store to keep beside its response.

    ``owner`` tells whose it is: nobody else finds what is stored of it.  ``position`` is how many items the
    conversation of the response had when they were read.  ``recorded`` says that the request asks to be recorded.
    """

    owner: str = ""
    position: int = 0
    recorded: bool = False


TokenIds: TypeAlias = tuple[int, ...]

RawMessages: TypeAlias = tuple[dict[str, Any], ...]
"""Messages in the model's own terms (for Harmony, the JSON of openai_harmony's ``Message``), to debug it by."""


class TemplateOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request says of its model's chat template: another one, and variables for it."""

    source: str | None = None
    variables: Mapping[str, Any] = {}


NO_TEMPLATE_OPTIONS = TemplateOptions()


class Conversation(_Frame, frozen=True):
    """The request, understood: ``input`` came with it, ``history`` from the responses that it continues.

    ``response`` is the response object as it starts out, and ``tools`` what its tool parameters mean.  ``date`` is the
    day of the request, as YYYY-MM-DD.  ``raw_messages`` says whether the response shall hold the raw messages.
    ``tokens`` are those that the engine wrote for items of the history, by the item's id, as `ItemTokens` has them,
    and ``results`` what calls of the history gave the model to read, as `ItemResult` has them.
    ``include`` are those of the request.  ``template`` is for models that have one.  ``structured`` is the request's
    ``structured_outputs``: a way of vLLM's to say what the answer must look like, beside ``text.format``.
    """

    response: Response
    history: tuple[Item, ...]
    input: tuple[Item, ...]
    sampling: Sampling
    date: str
    tools: Toolset = Toolset()
    scheduling: Scheduling = Scheduling()
    raw_messages: bool = False
    origin: Origin = Origin()
    tokens: Mapping[str, TokenIds] = {}
    results: Mapping[str, str] = {}
    include: tuple[str, ...] = ()
    template: TemplateOptions = NO_TEMPLATE_OPTIONS
    structured: Mapping[str, Any] = {}


class ResponseStarted(_Frame, frozen=True):
    """A response begins: from here on a failure is an event, no longer an HTTP status."""

    response: Response
    input: tuple[Item, ...]
    origin: Origin = Origin()


CallSyntax: TypeAlias = Literal["native", "list", "arguments"]
"""How calls are written: in the model's own markup, as a JSON list of objects with ``name`` and ``parameters``, or as
the bare arguments of the one tool that may be called.  The last two are what a grammar makes of a model whose markup
nobody has described.
"""


class ChatTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """What it takes to read what a model with a chat template writes.

    ``variables`` are those with which the template was rendered, ``calls`` how the model writes calls, and
    ``continues`` says that it goes on with the prompt's last message, and so does not think.
    """

    variables: Mapping[str, Any] = {}
    calls: CallSyntax = "native"
    continues: bool = False


class Prompt(_Frame, frozen=True):
    """The conversation as the model reads it; generation stops at any of ``stop_token_ids``.

    ``grammar``, in llguidance's dialect of Lark, is what everything that is generated must match.  ``images`` are data
    URLs, in the order of their placeholders.  ``chat`` is there for models with a chat template.
    """

    response: Response
    input: tuple[Item, ...]
    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    tools: Toolset = Toolset()
    grammar: str | None = None
    scheduling: Scheduling = Scheduling()
    raw_messages: RawMessages | None = None
    origin: Origin = Origin()
    images: tuple[str, ...] = ()
    chat: ChatTurn | None = None


class GenerationStarted(_Frame, frozen=True):
    """The engine has accepted the prompt of a turn; with the first one the response begins, unless it has before.

    ``stop`` are the stop texts of the request, ``raw_messages`` those of the prompt, where they were asked for.
    ``held_to_grammar`` says that the engine holds the model to the prompt's grammar: what breaks it was broken off.
    ``chat`` is the prompt's, and ``prompt`` its tokens: they tell whether the model is in the middle of a thought.
    """

    response: Response
    input: tuple[Item, ...]
    prompt_tokens: int
    tools: Toolset = Toolset()
    stop: tuple[str, ...] = ()
    raw_messages: RawMessages | None = None
    held_to_grammar: bool = False
    origin: Origin = Origin()
    chat: ChatTurn | None = None
    prompt: TokenIds = ()


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """How likely one token was, and the likeliest ones in its place: pairs of token id and logprob, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenChunk(_Frame, frozen=True):
    """All tokens that were ready, in order; never empty.  A slow reader gets bigger chunks.

    ``logprobs`` has one entry for each token, or none where nobody asked for them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


FinishReason: TypeAlias = Literal["stop", "length", "content_filter", "cancelled", "max_tool_calls", "max_turns"]
"""An engine stops, comes to the limit or is told to; that the content was filtered is for a stage of one's own to say.
The last two are what ``converse`` makes of a turn that asks for more than the response may have.
"""


class GenerationFinished(_Frame, frozen=True):
    """The engine is done: it met a stop token, or the limit.  ``duration`` is in seconds since the start.

    ``prompt_tokens`` are those that it read, where it made more of the prompt than there was: of images, many tokens.
    """

    reason: FinishReason
    cached_tokens: int
    duration: float
    prompt_tokens: int | None = None


class ReasoningOpened(_Frame, frozen=True):
    """The model begins to think.

    ``recipient`` is the tool that it addresses, where there is none of that name: it only talks to itself.
    """

    recipient: str | None = None


class MessageOpened(_Frame, frozen=True):
    """The model begins to speak to the user.

    ``phase`` is None where nobody can know yet whether this is the answer.
    """

    phase: Phase | None = None


class RefusalOpened(_Frame, frozen=True):
    """A message begins that says why there is no answer: for guards, as no model of ours marks its refusals."""


class FunctionCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call, for the client to run.

    ``form`` is which item of the wire it becomes.
    """

    name: str
    namespace: str | None = None
    form: ClientForm = "function"


class CustomToolCallOpened(_Frame, frozen=True):
    """The model begins to write the input of a custom tool."""

    name: str
    namespace: str | None = None


class McpListToolsOpened(_Frame, frozen=True):
    """A server of tools is asked what it offers: `CallStarted` and `CallFinished` follow, whose data are the tools."""

    server_label: str


class McpCallOpened(_Frame, frozen=True):
    """The arguments of a call to an MCP server begin; it may be one that the client approved of earlier."""

    server_label: str
    name: str
    approval_request_id: str | None = None


class McpApprovalOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call that the client has to approve of first."""

    server_label: str
    name: str


class CodeCallOpened(_Frame, frozen=True):
    """The model begins to write code for the sandbox."""


class WebCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call to the browser: ``name`` is search, open or find."""

    name: str


class ShellCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call to the shell of the sandbox."""


class ShellOutputOpened(_Frame, frozen=True):
    """The shell of the sandbox runs what the latest `ShellCallOpened` asked for: the output is an item of its own."""


class CallStarted(_Frame, frozen=True):
    """What the open item asks for runs from now on.

    ``action`` is how the item tells it, where that is not the text itself: of a call to the browser its action.
    """

    action: dict[str, Any] | None = None


class CallFinished(_Frame, frozen=True):
    """What the open item asked for is done.

    ``result`` is what the model reads of it, and ``error`` why it failed, where it did.  ``data`` is what the item
    shows beside: of a listing its tools, of code its outputs, of the shell what each command wrote, of the browser the
    action with all that is known of it by now, of a failed MCP call its error.  It is empty where nothing is shown.
    """

    result: str = ""
    error: str | None = None
    data: tuple[dict[str, Any], ...] = ()


def mcp_error(finished: CallFinished) -> dict[str, Any]:
    """The error of a failed MCP call, in one of the forms that the API has for it."""
    if finished.data:
        return finished.data[0]
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": finished.error or ""}]}


class ItemDelta(_Frame, frozen=True):
    """More text of the open item; never empty.

    ``logprobs`` are those of the tokens whose text ends in it, where they were asked for and the item is a message;
    text that was found in a header, which had to be repaired, comes without.
    """

    text: str
    logprobs: tuple[Logprob, ...] = ()


class AnnotationAdded(_Frame, frozen=True):
    """A note on the open message, such as a citation, as the wire has it: for tools that know their sources."""

    annotation: dict[str, Any]


Repair: TypeAlias = Literal[
    "missing start",
    "missing channel",
    "missing message",
    "missing end",
    "unknown channel",
    "foreign role",
    "undeclared tool",
    "stray marker",
    "unexpected header",
]


class ItemClosed(_Frame, frozen=True):
    """The open item ends: ``complete`` unless generation was cut inside it.

    ``repairs`` names what was wrong with the model's markup, for logs and metrics; the item is whole all the same.
    ``token_ids`` are all that the engine wrote for it, markup included; none where the item was repaired or cut, so
    that whoever reads it again reads it in good order.  Of a chat model those of a turn's items, one after the other,
    are all that it generated; which of two items has what stands between them is not settled.
    """

    complete: bool
    repairs: tuple[Repair, ...] = ()
    token_ids: TokenIds = ()


class TurnFinished(_Frame, frozen=True):
    """The model's turn is over.  Tokens are counted as `Usage` counts them; ``prompt_tokens`` are the engine's word.

    ``raw_messages`` are what the model wrote, where they were asked for.
    """

    reason: FinishReason
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    duration: float
    raw_messages: RawMessages | None = None
    prompt_tokens: int | None = None


EngineFrame: TypeAlias = TokenChunk | GenerationFinished
"""``TokenChunk* . GenerationFinished``"""

TokenFrame: TypeAlias = GenerationStarted | TokenChunk | GenerationFinished
"""``GenerationStarted . TokenChunk* . GenerationFinished``"""

ClientCallOpened: TypeAlias = FunctionCallOpened | CustomToolCallOpened | McpApprovalOpened
"""What the client has to do something about before the model can go on."""

ServerCallOpened: TypeAlias = McpCallOpened | CodeCallOpened | WebCallOpened | ShellCallOpened
"""What the server runs itself once the turn is over."""

ItemOpened: TypeAlias = ReasoningOpened | MessageOpened | RefusalOpened | ClientCallOpened | ServerCallOpened

ItemFrame: TypeAlias = ItemOpened | ItemDelta | AnnotationAdded | ItemClosed
"""``ItemOpened . (ItemDelta | AnnotationAdded)* . ItemClosed``, once per item"""

ParsedFrame: TypeAlias = GenerationStarted | ItemFrame | TurnFinished
"""``GenerationStarted . ItemFrame* . TurnFinished``"""

ServedOpened: TypeAlias = ServerCallOpened | McpListToolsOpened | ShellOutputOpened
"""What the server does itself, asked by the model or not."""

Opened: TypeAlias = ItemOpened | ServedOpened

ToolFrame: TypeAlias = McpListToolsOpened | ShellOutputOpened | CallStarted | CallFinished
"""``(CallStarted . CallFinished)`` comes within the item that it is about, behind its last `ItemDelta`"""

ConversedFrame: TypeAlias = ResponseStarted | ParsedFrame | ToolFrame
"""``ResponseStarted? . (items of tools)* . (GenerationStarted . (ItemFrame | ToolFrame)* . TurnFinished)+``"""


class ItemTokens(_Frame, frozen=True):
    """The tokens of an item that is done, as `ItemClosed` has them; never empty."""

    item_id: str
    token_ids: TokenIds


class ItemResult(_Frame, frozen=True):
    """What a call that the server ran gave the model to read, where the item itself does not say it."""

    item_id: str
    result: str


EmittedFrame: TypeAlias = ResponseStarted | ItemTokens | ItemResult | ResponseEvent
"""``ResponseStarted . (ItemTokens | ItemResult | ResponseEvent)+``: what to keep of the request, then the stream"""

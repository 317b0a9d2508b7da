"""Frames: the values that pass between the stages, one tagged union per junction.

    CreateResponse -> normalize -> ResolvedRequest -> converse -> ConversedFrame -> emit -> EmittedFrame
                   -> persist -> ResponseEvent

and within ``converse``, once for each turn of the model:

    ResolvedRequest -> render -> Prompt -> generate -> TokenFrame -> parse -> ParsedFrame

The first frame of every junction carries everything that later stages need to know of the request, ids and times
included.  So a recording of one junction is complete, and replays to the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.pipeline.logs import check_names
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.protocol.items import FileReading, Item, ListedTool, Logprob, Phase
from penstock.pipeline.protocol.light import are_light
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.pipeline.protocol.readings import as_read
from penstock.pipeline.protocol.response import ECHOED, Effort, Response
from penstock.pipeline.protocol.superseded import unsuperseded
from penstock.pipeline.protocol.tools import ClientForm, ContainerUse, Toolset
from penstock.pipeline.tasks import MANY_VALUES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class _Frame(msgspec.Struct, frozen=True, gc=False, tag=True, omit_defaults=True):
    pass


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters of the request, named as in vLLM's ``SamplingParams``.

    The fields from ``stop_token_ids`` on are set only if the request has them.
    """

    temperature: float
    """0 takes the likeliest token each time."""
    top_p: float
    """The share of probability that tokens are drawn from; 1 for all tokens."""
    max_tokens: int | None = None
    """The most tokens of the answer; if it is None, only the end of the context limits it."""
    top_k: int = 0
    """0 for all tokens."""
    min_p: float = 0.0
    """Tokens less probable than this share of the likeliest one are left out."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token was generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the output so far become less likely; 1 changes nothing."""
    seed: int | None = None
    """The same seed and prompt give the same tokens, as far as the engine can."""
    stop: tuple[str, ...] = ()
    """Texts that end a message, and the turn with it; they are cut off.  The parsers search for them."""
    logprobs: int | None = None
    """The number of alternatives to report with each token; None reports no log probabilities."""
    stop_token_ids: tuple[int, ...] | UnsetType = UNSET
    """Tokens that end generation, besides those of the prompt."""
    min_tokens: int | UnsetType = UNSET
    """Tokens before which the output does not end."""
    bad_words: tuple[str, ...] | UnsetType = UNSET
    """Texts that the model must not write."""
    logit_bias: Mapping[int, float] | UnsetType = UNSET
    """Added to the logits, by token id."""
    allowed_token_ids: tuple[int, ...] | UnsetType = UNSET
    """The only tokens that may be generated."""
    watermarking: bool | UnsetType = UNSET
    """vLLM's parameter of that name."""
    extra_args: Mapping[str, Any] | UnsetType = UNSET
    """The request's ``vllm_xargs``, for plug-ins of vLLM."""
    thinking_token_budget: int | UnsetType = UNSET
    """Tokens of the thoughts of a turn after which the engine ends them."""
    ignore_eos: bool | UnsetType = UNSET
    """True if the tokens by which the model ends a text or a turn do not end the output."""
    prompt_logprobs: int | UnsetType = UNSET
    """The number of alternatives to report with each token of the prompt; only for a raw prompt that is echoed."""
    logprob_token_ids: tuple[int, ...] | UnsetType = UNSET
    """The alternatives to report with each token, beside the token itself, in place of the likeliest ones."""

    @property
    def most_alternatives(self) -> int | None:
        """The number of alternatives to keep of those that the engine reports; None for all."""
        return self.logprobs if self.logprob_token_ids is UNSET else None

    @property
    def stops_anywhere(self) -> bool:
        """True if a text or a token of the request may end the output at any point."""
        return bool(self.stop or self.stop_token_ids)


class Scheduling(msgspec.Struct, frozen=True):
    """Engine options of the request that do not concern sampling."""

    cache_salt: str | None = None
    """Requests share the engine's prefix cache only with requests of the same salt."""
    priority: int = 0
    """Requests with a lower number run first, if vLLM has ``--scheduling-policy priority``."""
    trace_headers: Mapping[str, str] = {}
    """The headers of W3C Trace Context, as the client sent them."""
    session: str | UnsetType = UNSET
    """The client's own id of the session that the request belongs to (vLLM's ``session_id``)."""


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """The origin of a request; the store keeps ``owner`` and ``position`` with the response."""

    owner: str = ""
    """The SHA-256 of the API key in hex, or the text of ``request[OWNER]`` in a site that embeds the server; empty if
    there is neither. Only this owner finds the stored response.
    """
    position: int = 0
    """The end of the response's conversation when it was read."""
    recorded: bool = False
    """True if the request asks to be recorded."""
    request_id: str = ""
    """The client's own id of the request."""
    opening: str = ""
    """The opening of the chain of responses that the request continues (see `opening`); empty if it continues none."""
    model: str = ""
    """The served name of the model, if the request gives an alias of it."""
    key_name: str = ""
    """The name of the API key for people: its ``name=``, or else the first 8 digits of the owner."""
    team: str = ""
    """The team of the API key; empty if it has none."""
    api: str = ""
    """The name of the dialect in which the request came, such as ``chat``."""
    line: str = ""
    """The id of the line of a batch that the request is; empty if it is none."""
    key: str = ""
    """In a recording, a digest of the owner: it tells owners apart, and reveals none."""
    session: str = ""
    """The id of the session of the client, or of its coding agent, at most 256 characters; empty if it sends none."""


TokenIds: TypeAlias = tuple[int, ...]

RawMessages: TypeAlias = tuple[dict[str, Any], ...]
"""Messages in the model's own format (for Harmony, the JSON of openai_harmony's ``Message``), for debugging."""


class TemplateOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request's options for the chat template."""

    source: str | None = None
    """Another template than the model's own."""
    variables: Mapping[str, Any] = {}
    """Variables for the template."""


NO_TEMPLATE_OPTIONS = TemplateOptions()


class Compacting(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request's wish to have the conversation compacted."""

    at_once: bool = False
    """True if the response is the compaction alone, as for a ``compaction_trigger``."""
    threshold: int | None = None
    """The tokens of a prompt from which the conversation is compacted before the model reads it."""


class Purpose(msgspec.Struct, frozen=True, omit_defaults=True):
    """The purpose of a request's next turn, which is an answer by default."""

    compacting: Compacting | None = None
    """Set if the conversation may be compacted."""
    generates: bool = True
    """False if the response shall only be prepared: the engine reads its prompt, and it has no output."""
    summarizes: bool = False
    """True if the turn shall write the summary of a compaction: ``summarize`` then changes the request."""
    summary: str | None = None
    """The summary, if ``summarize`` has made it without the model."""


TO_ANSWER = Purpose()


class RequestFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts of a request, carried by the first frame of every junction."""

    response: Response
    """The response object at its start, as ``response.created`` shows it."""
    input: tuple[Item, ...]
    """The items that came with the request; after a turn with calls of this server, the items of the turn follow."""
    sampling: Sampling
    """The sampling parameters; the response shows some of them (see `with_sampling`)."""
    date: str
    """The day of the request, as YYYY-MM-DD."""
    tools: Toolset = Toolset()
    """The tools, read from the tool parameters."""
    scheduling: Scheduling = Scheduling()
    """The other options of the engine."""
    origin: Origin = Origin()
    """The owner and the ids of the client."""
    wants_raw_messages: bool = False
    """True if the response shall include the raw messages."""
    wants_token_ids: bool = False
    """True if the answer shall have the ids of all tokens."""
    wants_weight_versions: bool = False
    """True if the answer shall have the versions of its weights."""
    include: tuple[str, ...] = ()
    """The request's parameter ``include``."""
    template: TemplateOptions = NO_TEMPLATE_OPTIONS
    """For models with a chat template."""
    structured: Mapping[str, Any] = {}
    """The request's ``structured_outputs``, vLLM's constraints on the answer beside ``text.format``."""
    hides_reasoning: bool = False
    """True if the response shall have no reasoning items."""
    updates: Mapping[str, Any] = {}
    """The ``effort`` and the ``format`` that items of the conversation have set, if any has."""
    purpose: Purpose = TO_ANSWER
    """The purpose of the turn."""
    results: Mapping[str, str] = {}
    """The results of calls in ``input`` that came as raw messages, and the summaries of its compactions, by item id."""
    options: Mapping[str, Mapping[str, Any]] = {}
    """The options of the built-in tools, by namespace, in JSON: each kind reads its own (see `HostedKind`)."""
    raw: RawPrompt | None = None
    """The prompt, if the client has laid it out; there are then no items and no tools, and the output is plain text."""

    @property
    def response_id(self) -> str:
        """The id of the response."""
        return self.response.id

    def container(self, namespace: str) -> ContainerUse:
        """Return the container of a built-in tool: by default one of this response, which all its tools share."""
        if given := self.options.get(namespace):
            return msgspec.convert(given, ContainerUse)
        return ContainerUse(f"cntr_{self.response_id.removeprefix('resp_')}")

    @property
    def model(self) -> str:
        """The name of the model that answers, as the engine serves it; the response has the name of the request."""
        return self.origin.model or self.response.model

    @property
    def effort(self) -> Effort | None:
        """The effort of the answer: that of the latest update, or else that of the request, which the response has."""
        effort: Effort | None = self.updates.get("effort", self.response.reasoning.effort)
        return effort

    @property
    def text_format(self) -> Mapping[str, Any]:
        """The format of the answer: that of the latest update, or else that of the request; empty for none."""
        return self.updates.get("format") or self.response.text.get("format") or {}

    @property
    def engine_id(self) -> str:
        """The name of the request in the engine: the id of the response, which is unique, after that of the client."""
        return "-".join(filter(None, (self.origin.request_id, self.response_id)))


_NO_TOOLS = Toolset()

_NONE_UNSEEN: Mapping[str, str] = {}


class ResolvedRequest(_Frame, frozen=True, dict=True, gc=True):
    """The request, validated, with the history that it continues."""

    facts: RequestFacts
    history: tuple[Item, ...] = ()
    """The items before those of the request: of earlier responses or of the conversation."""
    tokens: Mapping[str, TokenIds] = {}
    """The tokens that the engine generated for earlier items, by item id (see `ItemTokens`)."""
    results: Mapping[str, str] = {}
    """The text that the model reads as the result of a call, or a compaction, by the item's id (see `ItemResult`)."""
    files: Mapping[str, tuple[FileReading, ...]] = {}
    """The readings that take the place of an item's files, by the item's id."""
    said: tuple[str, ...] = ()
    """The ids of the messages that the client sends now: what cannot be read in them refuses the request."""
    unseen: Mapping[str, str] = {}
    """The reasons why images are not shown, by their URLs; the model reads a sentence in place of these."""
    returned: Mapping[str, tuple[str, ...]] = {}
    """The images, as data URLs, that calls of this response have returned beside their text, by the id of the item."""

    @property
    def items(self) -> tuple[Item, ...]:
        """All items that the model reads: those that no compaction has superseded (see `unsuperseded`).

        They have texts and images in the place of files, which so count among the texts that a compaction leaves.  They
        are put together once for each frame: a stage that changes the history or the input makes a new one.
        """
        known = vars(self)  # not `cached_property`: its lock would be one for all requests, before Python 3.12
        if "items" not in known:
            known["items"] = unsuperseded(self._read(self.history), self._read(self.facts.input))
        items: tuple[Item, ...] = known["items"]
        return items

    def _read(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        if not self.files and not self.unseen:
            return items
        said = frozenset(self.said)
        return tuple(
            as_read(item, self.files.get(item.id, ()), _NONE_UNSEEN if item.id in said else self.unseen)
            for item in items
        )

    @property
    def is_long(self) -> bool:
        """True if a look at all items takes so long that it must not happen in the event loop (see `apart`)."""
        return len(self.history) + len(self.facts.input) > MANY_VALUES

    @property
    def is_light(self) -> bool:
        """True if its prompt takes less time than a thread that would make it (see `apart`)."""
        facts = self.facts
        is_free = facts.text_format.get("type", "text") == "text" and not facts.structured
        is_plain = is_free and facts.tools == _NO_TOOLS and not (self.files or self.unseen or self.results)
        if facts.raw is not None:
            return is_plain and facts.raw.is_light
        return is_plain and are_light((*self.history, *facts.input), facts.response.instructions)


class ResponseStarted(_Frame, frozen=True):
    """The response begins: from here on a failure is an event, no longer an HTTP status."""

    facts: RequestFacts


CallSyntax: TypeAlias = Literal["native", "list", "arguments"]
"""The syntax of calls: the model's own markup, a JSON list of objects with ``name`` and ``parameters``, or the bare
arguments of the only tool that may be called.  A grammar enforces one of the last two if vLLM has no description of
the model's markup.
"""


class ChatTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts for parsing the output of a model with a chat template."""

    variables: Mapping[str, Any] = {}
    """The variables that the template was rendered with."""
    calls: CallSyntax = "native"
    """The syntax of calls."""
    continues: bool = False
    """True if the model continues the prompt's last message, and so does not think first."""
    thinks: bool = False
    """True if the model continues the prompt's last thought, which was cut."""


Channel: TypeAlias = Literal["analysis", "commentary", "final"]
"""The channel of a Harmony message."""


class Prompt(_Frame, frozen=True):
    """The prompt of a turn."""

    facts: RequestFacts
    token_ids: tuple[int, ...]
    """All tokens that the model reads."""
    stop_token_ids: tuple[int, ...]
    """Generation stops at any of these tokens."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, which the whole output must match."""
    raw_messages: RawMessages | None = None
    """The prompt as messages, if the request wants them."""
    images: tuple[str, ...] = ()
    """Data URLs, in the order of their placeholders."""
    chat: ChatTurn | None = None
    """Set for models with a chat template."""
    channel: Channel | None = None
    """For Harmony: the channel of the prompt's last message, if the model is to continue it."""


class GenerationStarted(_Frame, frozen=True):
    """The engine has accepted the prompt of a turn; the first turn begins the response, unless it has begun."""

    facts: RequestFacts
    prompt_tokens: int
    """The number of tokens in the prompt."""
    raw_messages: RawMessages | None = None
    """The prompt as messages; None if the request does not want them."""
    held_to_grammar: bool = False
    """True if the prompt has a grammar: output that does not match it was cut short by the engine."""
    chat: ChatTurn | None = None
    """The same as in the prompt."""
    prompt: TokenIds = ()
    """The tokens of the prompt, if ``chat`` is set: they show whether the model is in the middle of a thought.  Those
    of another one, if the answer begins with it or shall have its ids.
    """
    channel: Channel | None = None
    """The same as in the prompt."""


AnyFrame = TypeVar("AnyFrame", bound="msgspec.Struct | CreateResponse | DataclassInstance")
FactsFrame = TypeVar("FactsFrame", bound=ResolvedRequest | ResponseStarted | Prompt | GenerationStarted)


def replace(frame: AnyFrame, **changes: Any) -> AnyFrame:
    """Return a copy of any frame, or of a struct or dataclass inside one, with changed fields.

    The parameters of a `CreateResponse` are validated as if a client had sent them.  Raises `TypeError` for a field
    that does not exist, and `ValueError` for a wrong parameter.
    """
    if isinstance(frame, CreateResponse):
        return frame.replaced(changes)
    if isinstance(frame, msgspec.Struct):
        check_names("field", changes, type(frame).__struct_fields__)
        return msgspec.structs.replace(frame, **changes)
    if not dataclasses.is_dataclass(frame):
        raise TypeError(f"replace copies frames and what is in them, not a value of the type {type(frame).__name__}")
    check_names("field", changes, [field.name for field in dataclasses.fields(frame)])
    return dataclasses.replace(frame, **changes)


def with_facts(frame: FactsFrame, **changes: Any) -> FactsFrame:
    """Return the frame with changed facts."""
    return replace(frame, facts=replace(frame.facts, **changes))


PARAMETERS: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "extra_args": "vllm_xargs",
}
"""The fields of `Sampling` with another name in the API."""

_NAMES = {name: PARAMETERS.get(name, name) for name in Sampling.__struct_fields__}

_SHOWN = {name: shown for name, shown in _NAMES.items() if shown in ECHOED}
"""The fields of `Sampling` that a response echoes, each with its name in the API."""


def echo_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that echo these fields of `Sampling`."""
    fields = {_SHOWN[name]: value for name, value in sampling.items() if name in _SHOWN}
    if "top_logprobs" in fields:
        fields["top_logprobs"] = fields["top_logprobs"] or 0
    return fields


def with_sampling(frame: FactsFrame, **changes: Any) -> FactsFrame:
    """Return the frame with changed `Sampling`, which the response shows to the client.

    The engine reads ``facts.sampling`` and the client ``facts.response``: a change of the first alone hides from the
    client how its answer was made.
    """
    response = replace(frame.facts.response, **echo_of(changes))
    return with_facts(frame, sampling=replace(frame.facts.sampling, **changes), response=response)


def with_summary(frame: FactsFrame, summary: str) -> FactsFrame:
    """Return the frame with the summary of a compaction: the model then writes none."""
    return with_facts(frame, purpose=replace(frame.facts.purpose, summary=summary))


class TokenLogprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The log probability of a token."""

    logprob: float
    """The natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place: pairs of token id and log probability, likeliest first."""
    rank: int | UnsetType = UNSET
    """Its place among all tokens, 1 for the likeliest: of a token of the prompt, if the engine reports it."""


class TokenChunk(_Frame, frozen=True):
    """All tokens that were ready, in order: a slow reader gets bigger chunks."""

    token_ids: tuple[int, ...]
    """Never empty."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token; empty if the request does not want them."""
    cached_tokens: int = 0
    """The same as in `GenerationFinished`, in the first chunk, if the engine knows it by then."""
    prompt_tokens: int | None = None
    """The same as in `GenerationFinished`, in the first chunk, if the engine knows it by then."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the prompt after the first, in the first chunk, if `Sampling.prompt_logprobs` is set."""


FinishReason: TypeAlias = Literal[
    "stop", "length", "content_filter", "cancelled", "max_tool_calls", "max_turns", "steered"
]
"""The reason for the end of a turn.  Engines give ``stop``, ``length`` and ``cancelled``.  ``content_filter`` is for an
operator's own stages.  ``converse`` gives the others: if a turn needs more tool calls or turns than are allowed, or if
its client steers the response.
"""


class GenerationFinished(_Frame, frozen=True):
    """The engine has finished the turn."""

    reason: FinishReason
    """``stop``, ``length`` or ``cancelled``."""
    cached_tokens: int
    """Tokens of the prompt that the engine had in its prefix cache."""
    duration: float
    """Seconds since the turn began."""
    prompt_tokens: int | None = None
    """The engine's own count for a prompt with images, which it expands to many tokens each."""
    weights: tuple[WeightSpan, ...] = ()
    """The versions of the weights that wrote the output, in order; empty if the engine names none."""


class ReasoningOpened(_Frame, frozen=True):
    """The model begins to think."""

    recipient: str | None = None
    """Set if the model addresses a tool that it cannot call; the text then counts as reasoning."""
    refusal: str = ""
    """The error that the model reads as the result of such a call."""


class MessageOpened(_Frame, frozen=True):
    """The model begins to speak to the user."""

    phase: Phase | None = None
    """None if it is not known yet whether this is the final answer."""


class RefusalOpened(_Frame, frozen=True):
    """A message begins that explains why there is no answer.

    The guards among an operator's own stages use it: no supported model marks its refusals.
    """


class FunctionCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call for the client to run."""

    name: str
    """The name of the function."""
    namespace: str | None = None
    """The namespace of the function, if it is in one."""
    form: ClientForm = "function"
    """Selects the type of its item on the wire."""
    is_async: bool = False
    """True if the model goes on without the output."""
    caller: str = ""
    """The calling program's ``call_id``, if any."""


class CustomToolCallOpened(_Frame, frozen=True):
    """The model begins to write the input of a custom tool."""

    name: str
    """The name of the tool."""
    namespace: str | None = None
    """The namespace of the tool, if it is in one."""
    caller: str = ""
    """The calling program's ``call_id``, if any."""


class McpListToolsOpened(_Frame, frozen=True):
    """An MCP server lists its tools: `CallStarted` follows, then `CallFinished` with `ListedTools`."""

    server_label: str
    """The label of the server in the request."""


class McpCallOpened(_Frame, frozen=True):
    """The arguments of a call to an MCP server begin."""

    server_label: str
    """The label of the server in the request."""
    name: str
    """The name of the tool."""
    approval_request_id: str | None = None
    """Set if the client has approved the call."""
    caller: str = ""
    """The calling program's ``call_id``, if any."""

    @property
    def tool(self) -> tuple[str, str]:
        """The namespace and the name of the tool that it calls."""
        return self.server_label, self.name


class McpApprovalOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call that the client must approve first."""

    server_label: str
    """The label of the server in the request."""
    name: str
    """The name of the tool."""
    caller: str = ""
    """The calling program's ``call_id``, if any."""


class CodeCallOpened(_Frame, frozen=True):
    """The model begins to write code for the sandbox."""

    tool: ClassVar[tuple[str, str]] = ("python", "python")
    caller: str = ""
    """The calling program's ``call_id``, if any."""


class WebCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call to the browser."""

    name: str
    """``search``, ``open`` or ``find``."""
    caller: str = ""
    """The calling program's ``call_id``, if any."""

    @property
    def tool(self) -> tuple[str, str]:
        """The namespace and the name of the tool that it calls."""
        return "browser", self.name


class FileSearchOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a search in files."""

    tool: ClassVar[tuple[str, str]] = ("file_search", "search")
    caller: str = ""
    """The calling program's ``call_id``, if any."""


class ShellCallOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a call to the shell of the sandbox."""

    tool: ClassVar[tuple[str, str]] = ("container", "exec")
    caller: str = ""
    """The calling program's ``call_id``, if any."""


class ShellOutputOpened(_Frame, frozen=True):
    """The shell of the sandbox runs the latest `ShellCallOpened`; its output is an item of its own."""


class ProgramOpened(_Frame, frozen=True):
    """The model begins to write a program that calls tools."""

    tool: ClassVar[tuple[str, str]] = ("program", "program")


class ProgramOutputOpened(_Frame, frozen=True):
    """A program has ended: its result is an item of its own, after its calls."""

    call_id: str
    """That of the program."""


class ToolSearchOpened(_Frame, frozen=True):
    """The model begins to write the arguments of a search for deferred tools, which this server makes."""

    tool: ClassVar[tuple[str, str]] = ("functions", "tool_search")


class ToolSearchOutputOpened(_Frame, frozen=True):
    """This server runs the latest `ToolSearchOpened`; what it finds is an item of its own."""


class CompactionOpened(_Frame, frozen=True):
    """A compaction of the conversation: its text is the summary, which the client gets sealed."""


class CallStarted(_Frame, frozen=True):
    """The call of the open item begins to run."""

    action: dict[str, Any] | None = None
    """Set for a call whose item shows an action instead of the text: one to the browser, or a search in files."""


class ListedTools(_Frame, frozen=True):
    """The tools of an MCP server."""

    tools: tuple[ListedTool, ...]
    """Their names, descriptions and schemas, as the item shows them."""


class CodeOutputs(_Frame, frozen=True):
    """The outputs of code, in the forms of `CodeInterpreterCall`."""

    outputs: tuple[dict[str, Any], ...]
    """The text that the code has printed; empty unless the request includes the outputs."""


class ShellOutput(_Frame, frozen=True):
    """The output of each command, in the form of `ShellCallOutput`."""

    outputs: tuple[dict[str, Any], ...]
    """One for each command, with its streams and its outcome."""


class BrowserAction(_Frame, frozen=True):
    """The completed action of a call to the browser, in a form of `WebSearchCall`."""

    action: dict[str, Any]
    """Its type, and its query, address or pattern; with the sources if the request includes them."""
    results: tuple[dict[str, Any], ...] | UnsetType = UNSET
    """The pages that a search has found, with their titles and snippets, if the request includes them."""


class FileSearchResults(_Frame, frozen=True):
    """The queries of a search in files, and what it has found, in the form of `FileSearchCall`."""

    queries: tuple[str, ...]
    """The texts that were searched for."""
    results: tuple[dict[str, Any], ...] | None
    """The chunks with their files and scores, best first; None unless the request includes them."""


class McpError(_Frame, frozen=True):
    """The error of a call to an MCP server, in one of the API's forms for it."""

    error: dict[str, Any]
    """The error as the item shows it."""


class LoadedTools(_Frame, frozen=True):
    """The tools that a search has found."""

    tools: tuple[dict[str, Any], ...]
    """Their wire forms, as the item shows them."""


CallData: TypeAlias = (
    ListedTools | CodeOutputs | ShellOutput | BrowserAction | FileSearchResults | McpError | LoadedTools
)
"""Content of an item beside the text of its call, by the kind of the item."""


class CallFinished(_Frame, frozen=True):
    """The call of the open item is done."""

    result: str = ""
    """The text for the model."""
    error: str | None = None
    """The reason if the call failed."""
    data: CallData | None = None
    """Content of the item beside the text of its call."""
    ran: bool = True
    """False if the call was refused, because of ``max_tool_calls``."""
    images: tuple[str, ...] = ()
    """Images for a model that sees some, as data URLs: they follow the text."""


def mcp_error(finished: CallFinished) -> dict[str, Any]:
    """Return the error of a failed MCP call, in one of the API's forms for it."""
    if isinstance(finished.data, McpError):
        return finished.data.error
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": finished.error or ""}]}


class ItemDelta(_Frame, frozen=True):
    """More text of the open item."""

    text: str
    """Never empty without log probabilities."""
    logprobs: tuple[Logprob, ...] = ()
    """The log probabilities of the tokens whose text ends in this delta.

    Empty unless the request wants them and the item is a message; text that was recovered from a malformed header has
    none.  After a raw prompt, tokens without a text are among them.
    """


class AnnotationAdded(_Frame, frozen=True):
    """An annotation of the open message in its wire form, such as the citation of a tool's source."""

    annotation: dict[str, Any]
    """Its type and fields; indices count characters of the open part of the message."""


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
    "unread output",
    "wrapped input",
    "empty call",
]
"""An error in the model's markup that `parse` has repaired.

``unread output`` is text that vLLM's parser leaves out, such as that after a mark in the middle of a sentence.
``wrapped input`` is the input of a custom tool that the model wrote in JSON of another form.
``empty call`` is the markup of a call with nothing in it, which is dropped.
"""


class ItemClosed(_Frame, frozen=True):
    """The open item ends."""

    complete: bool
    """False if generation was cut inside the item."""
    repairs: tuple[Repair, ...] = ()
    """The errors in the model's markup, for logs and metrics; the item itself is in order."""
    token_ids: TokenIds = ()
    """All tokens that the engine generated for the item, markup included. Empty if the item was repaired or cut, so
    that later prompts render it in correct markup. For models with a chat template, the tokens of a turn's items
    add up to all that the model generated in the turn; a token between two items may belong to either.
    """
    stopped: bool = False
    """True if a text of `Sampling.stop` ended the message, and the turn with it: no further item follows."""


class TurnFinished(_Frame, frozen=True):
    """The model's turn is over; tokens are counted as in `Usage`."""

    reason: FinishReason
    """The reason from `GenerationFinished`, or that of a stage that has ended the turn."""
    cached_tokens: int
    """Tokens of the prompt from the prefix cache."""
    output_tokens: int
    """All tokens of the turn, those of reasoning included."""
    reasoning_tokens: int
    """Tokens of the turn that belong to reasoning."""
    duration: float
    """Seconds since the turn began."""
    raw_messages: RawMessages | None = None
    """The model's output; None if the request does not want it."""
    prompt_tokens: int | None = None
    """The engine's own count, from `GenerationFinished`."""
    stop_reason: str | int | None = None
    """The text of `Sampling.stop`, or the token of its ``stop_token_ids``, that ended the turn."""
    repairs: tuple[Repair, ...] = ()
    """The errors in the model's markup while no item was open."""


EngineFrame: TypeAlias = TokenChunk | GenerationFinished
"""The frames that an engine gives for a prompt."""

TokenFrame: TypeAlias = GenerationStarted | TokenChunk | GenerationFinished

ClientCallOpened: TypeAlias = FunctionCallOpened | CustomToolCallOpened | McpApprovalOpened
"""Calls that the client must run or approve before the model can continue."""

HostedCallOpened: TypeAlias = CodeCallOpened | WebCallOpened | FileSearchOpened | ShellCallOpened | ProgramOpened
"""Calls of the built-in tools."""

ServerCallOpened: TypeAlias = McpCallOpened | HostedCallOpened | ToolSearchOpened
"""Calls that this server runs after the turn."""

ItemOpened: TypeAlias = ReasoningOpened | MessageOpened | RefusalOpened | ClientCallOpened | ServerCallOpened

ParsedFrame: TypeAlias = GenerationStarted | ItemOpened | ItemDelta | AnnotationAdded | ItemClosed | TurnFinished

ServedOutputOpened: TypeAlias = ShellOutputOpened | ToolSearchOutputOpened | ProgramOutputOpened
"""Outputs of calls of this server that are items of their own."""

ServedOpened: TypeAlias = ServerCallOpened | McpListToolsOpened | ServedOutputOpened
"""Items for work of this server, requested by the model or not."""

Opened: TypeAlias = ItemOpened | ServedOpened | CompactionOpened

ToolFrame: TypeAlias = McpListToolsOpened | ServedOutputOpened | CallStarted | CallFinished
"""The work of this server, besides the items that the model begins."""

ConversedFrame: TypeAlias = ResponseStarted | ParsedFrame | ToolFrame | CompactionOpened


class ItemTokens(_Frame, frozen=True):
    """The tokens of a finished item, from its `ItemClosed`; never empty."""

    item_id: str
    """The id of the item in the response."""
    token_ids: TokenIds
    """All tokens of the item, markup included."""


class ItemResult(_Frame, frozen=True):
    """The result of a call that this server ran, or a summary, as the model reads it, if the item does not show it."""

    item_id: str
    """The id of the item in the response."""
    result: str
    """The text for the model."""


EmittedFrame: TypeAlias = ResponseStarted | ItemTokens | ItemResult | ResponseEvent

GRAMMAR: Mapping[str, str] = {
    "EngineFrame": "TokenChunk* . GenerationFinished",
    "TokenFrame": "(GenerationStarted . EngineFrame)+",
    "ParsedFrame": """
        (GenerationStarted . ((Text | Call) . ItemClosed[complete] | OpenCall . ItemClosed[cut])*
         . (TurnFinished | (Text | Call) . ItemClosed[cut] . TurnFinished[cut]))+
    """,
    "Text": """
        MessageOpened . (ItemDelta | AnnotationAdded)*
        | (ReasoningOpened | RefusalOpened) . ItemDelta* | Asked
    """,
    "Asked": "(ClientCallOpened | ShellCallOpened | ToolSearchOpened | ProgramOpened) . ItemDelta*",
    "OpenCall": "Asked | Call",
    "Call": "(McpCallOpened | CodeCallOpened | WebCallOpened | FileSearchOpened) . ItemDelta*",
    "ConversedFrame": """
        (ResponseStarted . ((Run | Asked) . ItemClosed[complete])*)?
        . (GenerationStarted . ((Run | Text | Summary) . ItemClosed[complete] | OpenCall . ItemClosed[cut])*
           . (TurnFinished | (Work . CallStarted? | Run | Text | Summary) . ItemClosed[cut] . TurnFinished[cut]))+
    """,
    "Run": "Work . CallStarted . CallFinished",
    "Summary": "CompactionOpened . ItemDelta*",
    "Work": "Call | McpListToolsOpened | ServedOutputOpened",
    "EmittedFrame": "ResponseStarted . (ItemTokens | ItemResult | Event)+",
    "ResponseEvent": """
        ResponseCreated . ResponseQueued?
        . (ResponseInProgress . (OutputItemAdded . (ItemEvent | ShellEvent)* . OutputItemDone)*)? . TerminalEvent
    """,
}
"""The order of the frames at each junction, and the rules that it is made of.

``.`` means "then", ``|`` "or", ``*`` any number, ``+`` at least one, ``?`` at most one.  A word is a frame, one of a
union of frames, or another rule.  ``ItemClosed[cut]`` is an `ItemClosed` that is not ``complete``: the turn was cut, or
the model left a call open.  ``TurnFinished[cut]`` is a `TurnFinished` with another reason than ``stop``.
"""


def variant_of(frame: Any) -> str:
    """Return the variant of a frame, as `GRAMMAR` names it; an empty text if its class has none."""
    if isinstance(frame, ItemClosed):
        return "complete" if frame.complete else "cut"
    if isinstance(frame, TurnFinished):
        return "stop" if frame.reason == "stop" else "cut"
    return ""

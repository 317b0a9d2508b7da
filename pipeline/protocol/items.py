"""The items of a conversation, on the wire, in the store and between stages.

Input and output share one union, because the output of a response is input of the next request.  Fields that
the protocol leaves out, instead of sending null, are `msgspec.UNSET`.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
CallStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
"""The status of a call that this server runs itself."""
Phase: TypeAlias = Literal["commentary", "final_answer"]
Role: TypeAlias = Literal["user", "assistant", "system", "developer"]
ImageDetail: TypeAlias = Literal["low", "high", "auto", "original"]
FileDetail: TypeAlias = Literal["low", "high", "auto"]


_CACHED = frozenset({"prompt_cache_breakpoint"})
"""The unused key of parts: vLLM caches prefixes by itself."""


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    unused: ClassVar[frozenset[str]] = _CACHED

    text: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image for the model: an address on the web, a data URL, or the id of a stored file.

    ``detail`` is the detail that the client wants; it is kept, but models here treat all images alike.
    """

    unused: ClassVar[frozenset[str]] = _CACHED

    image_url: str | UnsetType = UNSET
    detail: ImageDetail = "auto"
    file_id: str | UnsetType = UNSET

    @property
    def url(self) -> str:
        """The address; empty if the image is a stored file, which is not read yet."""
        return self.image_url if isinstance(self.image_url, str) else ""

    @property
    def text(self) -> str:
        """The empty string: an image has no text."""
        return ""


class InputFile(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="input_file"):
    """A file for the model, as the client sent it: an address on the web, a data URL or base64, or a stored file's id.

    The model reads its text (see `as_read`), and sees pages of a PDF as far as ``detail`` wants that.
    """

    unused: ClassVar[frozenset[str]] = _CACHED

    filename: str | UnsetType = UNSET
    file_data: str | UnsetType = UNSET
    file_url: str | UnsetType = UNSET
    detail: FileDetail | UnsetType = UNSET
    file_id: str | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The empty string: the text of a file is not known before it is read."""
        return ""


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that the model could have generated, and the natural logarithm of its probability."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """A generated token, its log probability, and the likeliest tokens in its place, likeliest first."""

    token: str
    bytes: tuple[int, ...]
    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote for the user.

    ``logprobs`` belong to its tokens, if the request wants them; text recovered from a malformed header has none.
    """

    text: str
    annotations: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[Logprob, ...] = ()


class Refusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The model's explanation of why it does not answer."""

    refusal: str

    @property
    def text(self) -> str:
        """The explanation, which the model reads as it reads other text."""
        return self.refusal


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Raw text of the model's thinking."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A summary of the model's thinking."""

    text: str


InputPart: TypeAlias = InputText | InputImage | InputFile
"""Content for the model from a client or one of its tools."""

FileReading: TypeAlias = str | tuple[InputText | InputImage, ...]
"""The part of a prompt that a file becomes: its text alone, or texts and images."""

MessagePart: TypeAlias = InputPart | OutputText | Refusal
PartType = TypeVar("PartType")
OutputPart: TypeAlias = OutputText | Refusal | ReasoningText
"""The parts that ``response.content_part`` events carry."""


class BaseItem(msgspec.Struct, frozen=True, tag_field="type"):
    """The base of all items; one of a request has an empty ``id`` until this server gives it one.

    ``text`` is the text of an item that the model reads or wrote, if it has any: arguments are JSON, as a model writes
    them.  ``tool`` is the namespace and the name of the tool that an item calls.
    """

    id_prefix: ClassVar[str]
    unused: ClassVar[frozenset[str]] = frozenset({"caller"})
    """The keys of an item of the API that mean nothing here."""

    id: str

    @property
    def type(self) -> str:
        """The type of the item, as on the wire."""
        return str(self.__struct_config__.tag)

    @classmethod
    def new_id(cls, suffix: str) -> str:
        """Return an id for an item of this type that ends in ``suffix``, with the prefix that OpenAI's ids have."""
        return f"{cls.id_prefix}_{suffix}"


class Caller(msgspec.Struct, frozen=True, omit_defaults=True):
    """The caller of a tool: the model (``direct``), or the program whose ``call_id`` is the ``caller_id``."""

    type: Literal["direct", "program"]
    caller_id: str | UnsetType = UNSET


def caller_named(call_id: str) -> Caller | UnsetType:
    """Return the program with this ``call_id`` as a caller; UNSET, for the model, if it is empty."""
    return Caller("program", call_id) if call_id else UNSET


class Message(BaseItem, frozen=True, tag="message"):
    """A message of one side of the conversation; only messages of the assistant may have a ``phase``."""

    id_prefix: ClassVar[str] = "msg"
    status: ItemStatus
    role: Role
    content: tuple[MessagePart, ...]
    phase: Phase | UnsetType = UNSET

    @property
    def text(self) -> str:
        """All of its text, without its images; parts join without a separator, as they were generated."""
        return "".join(part.text for part in self.content)


class Reasoning(BaseItem, frozen=True, tag="reasoning"):
    """The model's thinking."""

    id_prefix: ClassVar[str] = "rs"
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The raw text of the thinking, or its summary if there is none."""
        return "".join(part.text for part in self.content or self.summary)


class FunctionCall(BaseItem, frozen=True, tag="function_call"):
    """A call of a function for the client to run; ``arguments`` is the model's text, valid JSON or not.

    If ``is_async`` is True, the model goes on without the output, which may follow in any later request, even twice.
    """

    id_prefix: ClassVar[str] = "fc"
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET
    is_async: bool | UnsetType = msgspec.field(default=UNSET, name="async")
    caller: Caller | UnsetType = UNSET

    @property
    def text(self) -> str:
        return self.arguments

    @property
    def tool(self) -> tuple[str | None, str]:
        return self.namespace or None, self.name


class _CallOutput(BaseItem, frozen=True):
    call_id: str
    output: str | tuple[InputPart, ...]
    status: ItemStatus

    @property
    def text(self) -> str:
        """The output as one text, without its images."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class FunctionCallOutput(_CallOutput, frozen=True, tag="function_call_output"):
    """The result of a function call."""

    id_prefix: ClassVar[str] = "fco"
    unused: ClassVar[frozenset[str]] = frozenset({"name", "namespace"})  # its call has them
    caller: Caller | UnsetType = UNSET


class CustomToolCall(BaseItem, frozen=True, tag="custom_tool_call"):
    """A call of a custom tool for the client to run; ``input`` is any text."""

    id_prefix: ClassVar[str] = "ctc"
    unused: ClassVar[frozenset[str]] = frozenset({"async"})
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET
    caller: Caller | UnsetType = UNSET

    @property
    def text(self) -> str:
        return self.input

    @property
    def tool(self) -> tuple[str | None, str]:
        return self.namespace or None, self.name


class CustomToolCallOutput(_CallOutput, frozen=True, tag="custom_tool_call_output"):
    """The result of a custom tool call."""

    id_prefix: ClassVar[str] = "ctco"
    unused: ClassVar[frozenset[str]] = frozenset()
    caller: Caller | UnsetType = UNSET


# Calls that the client runs, with item types of their own


class LocalShellCall(BaseItem, frozen=True, tag="local_shell_call"):
    """A command for the client to run; ``action`` is the API's: of type ``exec``, with a ``command``."""

    id_prefix: ClassVar[str] = "lsh"
    tool: ClassVar[tuple[str | None, str]] = (None, "local_shell")
    call_id: str
    action: dict[str, Any]
    status: ItemStatus

    @property
    def text(self) -> str:
        return _json({key: value for key, value in self.action.items() if key != "type"})


class LocalShellCallOutput(BaseItem, frozen=True, tag="local_shell_call_output"):
    """The result of a local shell call; as in the API, ``id`` is the ``call_id`` of the call."""

    output: str
    status: ItemStatus | None = None

    @property
    def call_id(self) -> str:
        """The ``call_id`` of the call with this result."""
        return self.id

    @property
    def text(self) -> str:
        return self.output


class ShellCall(BaseItem, frozen=True, tag="shell_call"):
    """Commands for a shell: the client's, or this server's sandbox if ``environment`` is set and not ``local``.

    ``action`` has ``commands``, and may have ``timeout_ms`` and ``max_output_length``.
    """

    id_prefix: ClassVar[str] = "sh"
    unused: ClassVar[frozenset[str]] = frozenset()
    call_id: str
    action: dict[str, Any]
    status: ItemStatus
    environment: dict[str, Any] | None = None
    caller: Caller | UnsetType = UNSET

    @property
    def runs_here(self) -> bool:
        """True if this server's sandbox runs the commands."""
        return self.environment is not None and self.environment.get("type") != "local"

    @property
    def text(self) -> str:
        return _json({key: value for key, value in self.action.items() if value is not None})

    @property
    def tool(self) -> tuple[str | None, str]:
        return ("container", "exec") if self.runs_here else (None, "shell")


class ShellCallOutput(BaseItem, frozen=True, tag="shell_call_output"):
    """The output and the outcome of each command of a shell call."""

    id_prefix: ClassVar[str] = "sho"
    call_id: str
    output: tuple[dict[str, Any], ...]
    status: ItemStatus
    max_output_length: int | None = None

    @property
    def text(self) -> str:
        return _json(self.output)


class ApplyPatchCall(BaseItem, frozen=True, tag="apply_patch_call"):
    """A change of one file for the client to make; ``operation`` is the API's."""

    id_prefix: ClassVar[str] = "apc"
    tool: ClassVar[tuple[str | None, str]] = (None, "apply_patch")
    call_id: str
    operation: dict[str, Any]
    status: ItemStatus

    @property
    def text(self) -> str:
        return _json(self.operation)


class ApplyPatchCallOutput(BaseItem, frozen=True, tag="apply_patch_call_output"):
    """The outcome of the change: ``completed``, or ``failed`` if the client could not make it."""

    id_prefix: ClassVar[str] = "apco"
    call_id: str
    status: Literal["completed", "failed"]
    output: str | None = None

    @property
    def text(self) -> str:
        return self.output or self.status


class ToolSearchCall(BaseItem, frozen=True, tag="tool_search_call"):
    """A search for deferred tools, by the client or by this server."""

    id_prefix: ClassVar[str] = "tsc"
    tool: ClassVar[tuple[str | None, str]] = (None, "tool_search")
    call_id: str
    arguments: Any
    status: ItemStatus
    execution: Literal["server", "client"]

    @property
    def text(self) -> str:
        return _json(self.arguments)


class ToolSearchOutput(BaseItem, frozen=True, tag="tool_search_output"):
    """The tools that a search has found, in their wire form: the model can call them from here on."""

    id_prefix: ClassVar[str] = "tso"
    call_id: str
    tools: tuple[dict[str, Any], ...]
    status: ItemStatus
    execution: Literal["server", "client"]

    @property
    def text(self) -> str:
        return _json(self.tools)


class ComputerCall(BaseItem, frozen=True, tag="computer_call"):
    """Actions for the client to do on a computer: ``actions``, or one ``action`` of the preview of the tool."""

    id_prefix: ClassVar[str] = "cu"
    tool: ClassVar[tuple[str | None, str]] = (None, "computer")
    call_id: str
    status: ItemStatus
    pending_safety_checks: tuple[dict[str, Any], ...] = ()
    action: dict[str, Any] | UnsetType = UNSET
    actions: tuple[dict[str, Any], ...] | UnsetType = UNSET

    @property
    def text(self) -> str:
        return _json({"actions": self.actions} if self.actions else {"action": self.action or {}})


class Screenshot(msgspec.Struct, frozen=True, tag_field="type", tag="computer_screenshot"):
    """The screen after the actions; ``image_url`` is that of an `InputImage`."""

    unused: ClassVar[frozenset[str]] = frozenset({"file_id"})  # an id alone is refused

    image_url: str

    @property
    def part(self) -> InputPart:
        """The screen as a part of a message."""
        return InputImage(self.image_url)


class Unseen(Screenshot, frozen=True, tag="computer_screenshot"):
    """A screen that cannot be shown, with the ``sentence`` that the model reads instead; it is never on the wire."""

    sentence: str

    @property
    def part(self) -> InputPart:
        """The sentence."""
        return InputText(self.sentence)


class ComputerCallOutput(BaseItem, frozen=True, tag="computer_call_output"):
    """The screen of a computer after the actions of a call."""

    id_prefix: ClassVar[str] = "cuo"
    call_id: str
    output: Screenshot
    status: CallStatus
    acknowledged_safety_checks: tuple[dict[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The empty string, as the model sees the screen, or what it reads instead."""
        return self.output.part.text


# Calls that this server runs


class ListedTool(msgspec.Struct, frozen=True):
    """A tool as an MCP server describes it; ``input_schema`` is a JSON schema.

    A field that the server leaves out stays unset, because some clients do not accept null for it.
    """

    name: str
    input_schema: dict[str, Any]
    description: str | UnsetType = UNSET
    annotations: dict[str, Any] | UnsetType = UNSET


class McpListTools(BaseItem, frozen=True, tag="mcp_list_tools"):
    """The tools of an MCP server, or the error if they could not be listed."""

    id_prefix: ClassVar[str] = "mcpl"
    server_label: str
    tools: tuple[ListedTool, ...]
    error: str | UnsetType = UNSET
    status: ClassVar[CallStatus] = "completed"  # the item has no status on the wire


class _McpCall(BaseItem, frozen=True):
    server_label: str
    name: str
    arguments: str

    @property
    def text(self) -> str:
        return self.arguments

    @property
    def tool(self) -> tuple[str | None, str]:
        return self.server_label, self.name


class McpCall(_McpCall, frozen=True, tag="mcp_call"):
    """A call of a tool of an MCP server, with its ``output`` or the ``error`` that it failed with."""

    id_prefix: ClassVar[str] = "mcp"
    status: CallStatus
    output: str | None = None
    error: dict[str, Any] | None = None
    approval_request_id: str | None = None
    caller: Caller | UnsetType = UNSET


class McpApprovalRequest(_McpCall, frozen=True, tag="mcp_approval_request"):
    """A call that the client must approve before this server makes it."""

    id_prefix: ClassVar[str] = "mcpr"
    status: ClassVar[CallStatus] = "completed"  # the item has no status on the wire
    caller: Caller | UnsetType = UNSET


class McpApprovalResponse(BaseItem, frozen=True, tag="mcp_approval_response"):
    """The client's decision on the `McpApprovalRequest` with the id ``approval_request_id``."""

    id_prefix: ClassVar[str] = "mcpa"
    approval_request_id: str
    approve: bool
    reason: str | None = None


class CodeInterpreterCall(BaseItem, frozen=True, tag="code_interpreter_call"):
    """Code that runs in the sandbox; ``outputs`` is None unless the request includes them."""

    id_prefix: ClassVar[str] = "ci"
    tool: ClassVar[tuple[str | None, str]] = ("python", "python")
    code: str
    container_id: str
    status: CallStatus
    outputs: tuple[dict[str, Any], ...] | None = None
    caller: Caller | UnsetType = UNSET

    @property
    def text(self) -> str:
        return self.code


_BROWSER_FUNCTIONS = {"search": "search", "open_page": "open", "find_in_page": "find"}
"""The browser's function for each type of action; ``search`` for unknown types."""


class WebSearchCall(BaseItem, frozen=True, tag="web_search_call"):
    """A call to the browser: ``action`` is a ``search``, an ``open_page`` or a ``find_in_page``.

    Only items of earlier releases lack it.  A search has ``results`` if the request includes them.
    """

    id_prefix: ClassVar[str] = "ws"
    status: CallStatus
    action: dict[str, Any] | UnsetType = UNSET
    results: tuple[dict[str, Any], ...] | UnsetType = UNSET
    caller: Caller | UnsetType = UNSET

    @property
    def tool(self) -> tuple[str | None, str]:
        return "browser", _BROWSER_FUNCTIONS.get(str((self.action or {}).get("type")), "search")

    @property
    def is_completed_search(self) -> bool:
        """True for a search that was run, not a page that was opened or a call that was refused."""
        return self.status == "completed" and (self.action or {}).get("type") == "search"


class FileSearchCall(BaseItem, frozen=True, tag="file_search_call"):
    """A search in vector stores; ``results`` is None unless the request includes them."""

    id_prefix: ClassVar[str] = "fs"
    tool: ClassVar[tuple[str | None, str]] = ("file_search", "search")
    queries: tuple[str, ...]
    status: CallStatus
    results: tuple[dict[str, Any], ...] | None = None
    caller: Caller | UnsetType = UNSET

    @property
    def text(self) -> str:
        return _json({"queries": self.queries})


class Compaction(BaseItem, frozen=True, tag="compaction"):
    """A summary, sealed, of the conversation before it: it supersedes most of that (see `unsuperseded`)."""

    id_prefix: ClassVar[str] = "cmp"
    encrypted_content: str
    status: ClassVar[ItemStatus] = "completed"  # the item has no status on the wire

    @property
    def text(self) -> str:
        """The empty string: the summary is sealed."""
        return ""


class AdditionalTools(BaseItem, frozen=True, tag="additional_tools"):
    """Tools that the client adds in the middle of a conversation, in their wire form."""

    id_prefix: ClassVar[str] = "at"
    role: Literal["developer"]
    tools: tuple[dict[str, Any], ...]


# Programs that call tools


class Program(BaseItem, frozen=True, tag="program"):
    """A program of the model that calls tools, whose calls have it as their ``caller``.

    ``fingerprint`` is that of the code (see `fingerprint_of`): a client sends both back, to have the program go on.
    """

    id_prefix: ClassVar[str] = "prog"
    tool: ClassVar[tuple[str | None, str]] = ("program", "program")
    status: ClassVar[ItemStatus] = "completed"  # the item has no status on the wire
    call_id: str
    code: str
    fingerprint: str

    @property
    def text(self) -> str:
        return self.code


class ProgramOutput(BaseItem, frozen=True, tag="program_output"):
    """The result of a program: what it has written.  It is incomplete if the program did not come to its end."""

    id_prefix: ClassVar[str] = "progo"
    call_id: str
    result: str
    status: Literal["completed", "incomplete"]

    @property
    def text(self) -> str:
        return self.result


def fingerprint_of(code: str) -> str:
    """Return the fingerprint of a program: the first 32 digits of its SHA-256."""
    return sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# Calls of tools that only other servers have


class ImageGenerationCall(BaseItem, frozen=True, tag="image_generation_call"):
    """The generation of an image; ``result`` is the image in base64."""

    id_prefix: ClassVar[str] = "ig"
    status: Literal["in_progress", "completed", "generating", "failed"]
    result: str | None = None


class ConfigurationUpdate(BaseItem, frozen=True, tag="configuration_update"):
    """Parameters that the client changes in the middle of a conversation, until a later update replaces them."""

    id_prefix: ClassVar[str] = "cu"
    reasoning: dict[str, Any] | UnsetType = UNSET
    text: dict[str, Any] | UnsetType = UNSET


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


FormCall: TypeAlias = LocalShellCall | ShellCall | ApplyPatchCall | ToolSearchCall | ComputerCall
"""Calls of tools that have an item type of their own; the model knows these tools as functions."""

FormCallOutput: TypeAlias = (
    LocalShellCallOutput | ShellCallOutput | ApplyPatchCallOutput | ToolSearchOutput | ComputerCallOutput
)

Call: TypeAlias = FunctionCall | CustomToolCall | FormCall | Program
CallOutput: TypeAlias = FunctionCallOutput | CustomToolCallOutput | FormCallOutput | ProgramOutput

HostedCall: TypeAlias = CodeInterpreterCall | WebSearchCall | FileSearchCall
"""Calls of built-in tools; a `ShellCall` for the sandbox is another."""

ServedCall: TypeAlias = McpCall | HostedCall
"""Calls that contain their result, because this server runs them."""

CallItem: TypeAlias = Call | ServedCall | McpApprovalRequest
"""Items that the model writes as a call of a tool, run by the client or by this server."""

ServerItem: TypeAlias = McpListTools | McpApprovalRequest | ServedCall
"""Items for work that this server does itself or needs approval for; a `ShellCall` for the sandbox is another."""

ContextItem: TypeAlias = AdditionalTools | ConfigurationUpdate | Compaction
"""Items that change the context of what follows."""

UnreadItem: TypeAlias = ImageGenerationCall
"""Items of tools that only other servers have: the store keeps them for the client, and no model reads them."""

Item: TypeAlias = Message | Reasoning | Call | CallOutput | ServerItem | McpApprovalResponse | ContextItem | UnreadItem
OutputItem: TypeAlias = (
    Message | Reasoning | Call | ShellCallOutput | ToolSearchOutput | ProgramOutput | ServerItem | Compaction
)


OneKind = TypeVar("OneKind", bound=Item)


def of_type(items: Iterable[Item], kind: type[OneKind]) -> list[OneKind]:
    """Return the items of one type.

    Most items of a long conversation are of other types, and isinstance takes ten times as long to reject them.
    """
    return [item for item in items if type(item) is kind]


def caller_of(item: Item) -> str:
    """Return the ``call_id`` of the program that made a call, or whose call an output is of; empty if it is none's."""
    caller = getattr(item, "caller", UNSET)
    return (caller.caller_id or "") if isinstance(caller, Caller) and caller.type == "program" else ""


def parts_of(item: Item) -> tuple[MessagePart, ...]:
    """Return the parts of an item that may have images and files, in order."""
    match item:
        case Message(content=parts):
            return parts
        case FunctionCallOutput(output=tuple(parts)) | CustomToolCallOutput(output=tuple(parts)):
            return parts
        case ComputerCallOutput(output=screen):
            return (screen.part,)
        case _:
            return ()


def images_of(item: Item) -> tuple[InputImage, ...]:
    """Return the images of an item, in order."""
    return tuple(part for part in parts_of(item) if isinstance(part, InputImage))


def joined(parts: Iterable[PartType], between: str = "") -> list[PartType | InputText]:
    """Return parts with each run of texts as one, with ``between`` between them."""
    found: list[PartType | InputText] = []
    for part in parts:
        if isinstance(part, InputText) and found and isinstance(before := found[-1], InputText):
            found[-1] = InputText(f"{before.text}{between}{part.text}")
        else:
            found.append(part)
    return found

"""Tools, and the choice of tools, in a request body.

Headers of MCP servers may hold secrets.  They are validated here so that no HTTP library rejects one later with an
error that quotes it.  Error messages and the repr of these models leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from yarl import URL

from penstock.pipeline.protocol.params.common import (
    FAIL_FAST,
    Body,
    Echoed,
    Name,
    Refused,
    TextOr,
    at_most,
    one_of,
    type_of,
)
from penstock.pipeline.protocol.params.file_search import Filters, MaxResults, RankingOptions, StoreIds
from penstock.pipeline.protocol.params.refusal import UNSUPPORTED
from penstock.pipeline.protocol.params.sent import Sent
from penstock.pipeline.urls import shown_url

MOST_STORES = 20
"""The most vector stores of a file search."""

MOST_SKILLS = 200
"""The most skills of an environment."""

MOST_IN_A_NAMESPACE = 500
"""The most tools in a namespace, which is validated in one piece and so must be short."""


class CallableTool(Echoed):
    """A tool that the model may call, programs, or both; the model alone if the request does not say it."""

    allowed_callers: (
        Annotated[list[Literal["direct", "programmatic"]], Field(fail_fast=True, min_length=1, max_length=2)] | None
    ) = None


class _DeferrableTool(CallableTool):
    """A tool that may be kept out of the prompt until a search loads it."""

    defer_loading: bool | None = None


class FunctionToolParam(_DeferrableTool):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = Field(default=None, alias="async")


class TextFormat(Body):
    type: Literal["text"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class GrammarFormat(Body):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomToolParam(_DeferrableTool):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    is_async: Refused = Field(default=None, alias="async")
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class NamespaceToolParam(Echoed):
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionToolParam | CustomToolParam, Field(discriminator="type")]],
        Field(fail_fast=True, max_length=MOST_IN_A_NAMESPACE),
    ]


class NetworkPolicy(Body):
    """The network of a sandbox, which has none; other keys are refused, as they might hold secrets."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["disabled"]


MOST_FILE_IDS = 50
"""The most files of a container in one request."""


class OwnContainer(Body):
    """A container that the server chooses: that of the conversation, or a new one."""

    file_ids: Annotated[list[Name], Field(fail_fast=True, max_length=MOST_FILE_IDS)] | None = None
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    network_policy: NetworkPolicy | None = None
    skills: Refused = None


class AutoContainer(OwnContainer):
    type: Literal["auto"]


class CodeInterpreterToolParam(CallableTool):
    """The code interpreter, in a container that the request names or the server chooses."""

    type: Literal["code_interpreter"]
    container: TextOr[Name, AutoContainer] | None = None


class LocalSkill(Body):
    """A folder on the client's machine with instructions for a kind of task."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: Annotated[str, StringConstraints(max_length=4_000)]
    path: Annotated[str, StringConstraints(min_length=1, max_length=4_000)]


class LocalEnvironment(Body):
    """The client's machine."""

    type: Literal["local"]
    skills: Annotated[list[LocalSkill], Field(fail_fast=True, max_length=MOST_SKILLS)] | None = None


class ContainerEnvironment(OwnContainer):
    type: Literal["container_auto"]


class ContainerReference(Body):
    """A container by its id."""

    type: Literal["container_reference"]
    container_id: Name


class ShellToolParam(CallableTool):
    type: Literal["shell"]
    environment: (
        Annotated[LocalEnvironment | ContainerEnvironment | ContainerReference, Field(discriminator="type")] | None
    ) = None

    @property
    def runs_here(self) -> bool:
        """True if this server's sandbox runs the commands."""
        return self.environment is not None and self.environment.type != "local"

    @property
    def local_skills(self) -> Sequence[LocalSkill]:
        """The skills on the client's machine."""
        return (isinstance(self.environment, LocalEnvironment) and self.environment.skills) or ()


class ApplyPatchToolParam(CallableTool):
    type: Literal["apply_patch"]


class LocalShellToolParam(Echoed):
    type: Literal["local_shell"]


def _host(domain: str) -> str:
    """Return a domain as it stands in URLs: in lower case, and in ASCII."""
    try:
        host = URL.build(scheme="https", host=domain.removesuffix(".")).raw_host
    except ValueError:
        host = None
    if not host:
        raise PydanticCustomError("domain", "This should be a domain, such as example.org")
    return host


Domain: TypeAlias = Annotated[
    str, StringConstraints(max_length=253, pattern=r"^[\w-]+(\.[\w-]+)*\.?$"), AfterValidator(_host)
]


DomainList: TypeAlias = Annotated[list[Domain], Field(fail_fast=True, min_length=1, max_length=100)]


class WebFilters(Body):
    """The pages that a web search may read; a filter of another name is refused."""

    model_config = ConfigDict(extra="forbid")

    allowed_domains: DomainList | None = None
    blocked_domains: DomainList | None = None


_Place: TypeAlias = Annotated[str, StringConstraints(max_length=200)]


class UserLocation(Body):
    """The approximate place of the user."""

    type: Literal["approximate"] | None = None
    city: _Place | None = None
    region: _Place | None = None
    country: _Place | None = None
    timezone: _Place | None = None

    @property
    def in_words(self) -> str:
        """The place in words; empty if it is not known."""
        places = ", ".join(filter(None, (self.city, self.region, self.country)))
        zone = f"time zone {self.timezone}" if self.timezone else ""
        return f"{places} ({zone})" if places and zone else places or zone


def _with_text(kinds: list[str]) -> list[str]:
    """Refuse a search for images alone."""
    if "text" not in kinds:
        raise PydanticCustomError(UNSUPPORTED, "Searches find text here: this should hold 'text'")
    return kinds


class WebSearchToolParam(CallableTool):
    """A web search, of any version."""

    type: str
    external_web_access: bool | None = None
    filters: WebFilters | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: UserLocation | None = None
    search_content_types: Annotated[list[Literal["text", "image"]], AfterValidator(_with_text)] | None = None


class ComputerToolParam(Echoed):
    """A computer that the client controls for the model; the preview of the tool describes its screen."""

    type: Literal["computer", "computer_use_preview"]
    display_width: Annotated[int, Field(gt=0)] | None = None
    display_height: Annotated[int, Field(gt=0)] | None = None
    environment: Literal["windows", "mac", "linux", "ubuntu", "browser"] | None = None


class ToolSearchToolParam(Echoed):
    """The search for deferred tools: by this server, or by the client, which then describes it."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _is_of_the_client(cls, parameters: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if parameters is not None and info.data.get("execution") != "client":
            raise PydanticCustomError(UNSUPPORTED, "Only a search that the client executes has parameters of its own")
        return parameters


class FileSearchToolParam(CallableTool):
    """A search in vector stores."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[StoreIds, Field(min_length=1, max_length=MOST_STORES)]
    max_num_results: MaxResults | None = None
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None


class ProgramToolParam(Echoed):
    """Programs of the model, which call tools."""

    type: Literal["programmatic_tool_calling"]


# MCP servers

RESERVED = frozenset({"functions", "assistant", "user", "system", "developer", "tool", "all"})
"""Labels that no server may have, because to the model they are roles, recipients or namespaces."""

FRAMING = frozenset(
    {"connection", "content-length", "host", "keep-alive", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers of the connection and the host, which a body may not set."""


def _not_reserved(label: str) -> str:
    if label in RESERVED:
        raise PydanticCustomError("label", "No server can be labelled {label}", {"label": repr(label)})
    return label


def is_web_url(url: str) -> bool:
    """Return True if ``url`` is a URL of http or https with a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that stays open, or a port above 65535
        return False


def _of_a_server(url: str) -> str:
    """Return ``url`` unchanged if it is a web URL without a user or a password."""
    if not is_web_url(url):
        raise PydanticCustomError("server_url", "This should be a URL: http or https, with a host")
    if "@" in urlsplit(url).netloc:
        raise PydanticCustomError(
            "server_url", "A user or password is not allowed in this URL: use headers or authorization"
        )
    return url


def _well_named(headers: dict[str, str]) -> dict[str, str]:
    names = [name.lower() for name in headers]
    if len(set(names)) < len(names):
        raise PydanticCustomError("headers", "Header names should be unique")
    if not FRAMING.isdisjoint(names):
        raise PydanticCustomError("headers", "Headers of the connection cannot be set by a request")
    return headers


_Label: TypeAlias = Annotated[Name, AfterValidator(_not_reserved)]
_Url: TypeAlias = Annotated[
    str, StringConstraints(max_length=2048, pattern=r"^[^\x00-\x20\x7f\\]*$"), AfterValidator(_of_a_server)
]
_HeaderName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$")]
_HeaderValue: TypeAlias = Annotated[
    str, StringConstraints(max_length=8192, pattern=r"^([\x21-\x7e]([\t\x20-\x7e]*[\x21-\x7e])?)?$")
]
_Headers: TypeAlias = Annotated[dict[_HeaderName, _HeaderValue], at_most(50, "headers"), AfterValidator(_well_named)]
_Token: TypeAlias = Annotated[str, StringConstraints(max_length=8192, pattern=r"^[\x21-\x7e]+$")]


class ToolFilterParam(Body):
    """A selection of a server's tools."""

    tool_names: Annotated[list[str], FAIL_FAST] | None = None
    read_only: bool | None = None


class Approval(Body):
    """The tools whose calls the client must approve, and the tools whose calls need no approval."""

    always: ToolFilterParam | None = None
    never: ToolFilterParam | None = None


class McpToolParam(_DeferrableTool):
    """An MCP server: one with a URL, or one in the operator's configuration, by its label."""

    type: Literal["mcp"]
    server_label: _Label
    server_description: str | None = None
    server_url: _Url | None = None
    connector_id: Name | None = None
    tunnel_id: Refused = None
    headers: _Headers | None = Field(default=None, repr=False)
    authorization: _Token | None = Field(default=None, repr=False)
    allowed_tools: (
        Annotated[
            Annotated[list[str], FAIL_FAST, Tag("as_list")] | Annotated[ToolFilterParam, Tag("as_object")],
            Discriminator(lambda value: "as_list" if isinstance(value, list) else "as_object"),
        ]
        | None
    ) = None
    require_approval: TextOr[Literal["always", "never"], Approval] | None = None

    @field_validator("connector_id")
    @classmethod
    def _names_one_server(cls, connector_id: str | None, info: ValidationInfo) -> str | None:
        if connector_id is not None and info.data.get("server_url") is not None:
            raise PydanticCustomError("connector_id", "This and server_url exclude each other")
        return connector_id

    @field_validator("authorization")
    @classmethod
    def _is_set_once(cls, authorization: str | None, info: ValidationInfo) -> str | None:
        headers: Mapping[str, str] = info.data.get("headers") or {}
        if authorization is not None and any(name.lower() == "authorization" for name in headers):
            raise PydanticCustomError("authorization", "This and a header of the same name exclude each other")
        return authorization

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers of every call to the server, ``authorization`` included."""
        token = {} if self.authorization is None else {"Authorization": f"Bearer {self.authorization}"}
        return {**(self.headers or {}), **token}

    @property
    def without_secrets(self) -> dict[str, Any]:
        """The tool without headers, tokens, unknown keys, and the path of its URL."""
        fields = {key: value for key, value in self.sent.items() if key in ECHOED_KEYS}
        return fields | {"server_url": shown_url(self.server_url)} if self.server_url else fields


ECHOED_KEYS = frozenset(
    {"type", "server_label", "server_description", "server_url", "connector_id", "allowed_tools", "require_approval"}
    | {"allowed_callers", "defer_loading"}
)
"""The keys that a response repeats: no secrets, and no unknown keys, which might hold one."""


# All tools


class OtherToolParam(Echoed):
    """A tool of a type that is not OpenAI's: a kind of another package reads it, or it is refused or left out."""

    type: str


def _tool_tag(value: Any) -> str:
    tool_type = type_of(value)
    return "web_search" if isinstance(tool_type, str) and is_web_search(tool_type) else _known_tag(value)


def is_web_search(tool_type: str) -> bool:
    """Return True for all versions of the web search."""
    return tool_type.startswith("web_search")


_known_tag = one_of(
    *("function", "custom", "namespace", "mcp", "code_interpreter", "shell", "apply_patch", "local_shell"),
    *("tool_search", "computer", "computer_use_preview", "file_search", "programmatic_tool_calling"),
    tag="other",
)

ToolParam: TypeAlias = Annotated[
    Annotated[FunctionToolParam, Tag("function")]
    | Annotated[CustomToolParam, Tag("custom")]
    | Annotated[NamespaceToolParam, Tag("namespace")]
    | Annotated[McpToolParam, Tag("mcp")]
    | Annotated[CodeInterpreterToolParam, Tag("code_interpreter")]
    | Annotated[ShellToolParam, Tag("shell")]
    | Annotated[ApplyPatchToolParam, Tag("apply_patch")]
    | Annotated[LocalShellToolParam, Tag("local_shell")]
    | Annotated[WebSearchToolParam, Tag("web_search")]
    | Annotated[ToolSearchToolParam, Tag("tool_search")]
    | Annotated[ComputerToolParam, Tag("computer")]
    | Annotated[ComputerToolParam, Tag("computer_use_preview")]
    | Annotated[FileSearchToolParam, Tag("file_search")]
    | Annotated[ProgramToolParam, Tag("programmatic_tool_calling")]
    | Annotated[OtherToolParam, Tag("other")],
    Discriminator(_tool_tag),
]


class SentTool(dict[str, Any]):
    """A tool in an item, as the server may show it; ``param`` is what the client sent, which may have secrets."""

    def __init__(self, param: ToolParam) -> None:
        super().__init__(param.without_secrets)
        self.param = param


class AnyTool(RootModel[ToolParam], Sent):
    """A tool in an item."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    def whole(self) -> SentTool:
        """Return the tool."""
        return SentTool(self.root)


# The choice of tools


class ChosenTool(Echoed):
    """One tool by its name; without ``namespace``, a tool outside of namespaces, or else of any namespace."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ChosenServer(Echoed):
    """All the tools of an MCP server, or one of them."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class ChosenNamespace(Body):
    """All tools of a namespace."""

    type: Literal["namespace"]
    name: str


class OtherChoice(Echoed):
    """The choice of a tool of another type; its fields are not read."""

    type: str


AllowedTool: TypeAlias = Annotated[
    Annotated[ChosenTool, Tag("function")]
    | Annotated[ChosenTool, Tag("custom")]
    | Annotated[ChosenNamespace, Tag("namespace")]
    | Annotated[ChosenServer, Tag("mcp")]
    | Annotated[OtherChoice, Tag("other")],
    Discriminator(one_of("function", "custom", "namespace", "mcp", tag="other")),
]


class AllowedTools(Echoed):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, max_length=1000)]


_choice_tag = one_of("function", "custom", "mcp", "allowed_tools", tag="other")

ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("as_text")]
    | Annotated[ChosenTool, Tag("function")]
    | Annotated[ChosenTool, Tag("custom")]
    | Annotated[ChosenServer, Tag("mcp")]
    | Annotated[AllowedTools, Tag("allowed_tools")]
    | Annotated[OtherChoice, Tag("other")],
    Discriminator(lambda value: "as_text" if isinstance(value, str) else _choice_tag(value)),
]

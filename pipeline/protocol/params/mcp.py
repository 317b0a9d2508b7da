"""MCP servers in a request body: their declaration, and the choice of their tools.

Headers may hold secrets.  They are validated here so that no HTTP library rejects one later with an error that quotes
it.  Error messages and the repr of these models leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, Echoed, Name, at_most, text_or_object

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
    except ValueError:
        return False


def _of_a_server(url: str) -> str:
    """Return ``url`` unchanged if it is a web URL without a user or a password."""
    if not is_web_url(url):
        raise PydanticCustomError("server_url", "This should be a URL: http or https, with a host")
    if "@" in urlsplit(url).netloc:
        raise PydanticCustomError("server_url", "No user or password may be in this URL: use headers or authorization")
    return url


def _well_named(headers: dict[str, str]) -> dict[str, str]:
    names = [name.lower() for name in headers]
    if len(set(names)) < len(names):
        raise PydanticCustomError("headers", "One header is there twice")
    if not FRAMING.isdisjoint(names):
        raise PydanticCustomError("headers", "Headers of the connection are not for a request to say")
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


class ToolFilter(Body):
    """A selection of a server's tools."""

    tool_names: Annotated[list[str], FAIL_FAST] | None = None
    read_only: bool | None = None


class Approval(Body):
    """The tools whose calls the client must approve, and the tools whose calls need no approval."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpTool(Echoed):
    """An MCP server: one with a URL, or one in the operator's configuration, by its label."""

    type: Literal["mcp"]
    server_label: _Label
    server_description: str | None = None
    server_url: _Url | None = None
    connector_id: Name | None = None
    headers: _Headers | None = Field(default=None, repr=False)
    authorization: _Token | None = Field(default=None, repr=False)
    allowed_tools: (
        Annotated[
            Annotated[list[str], FAIL_FAST, Tag("as_list")] | Annotated[ToolFilter, Tag("as_object")],
            Discriminator(lambda value: "as_list" if isinstance(value, list) else "as_object"),
        ]
        | None
    ) = None
    require_approval: (
        Annotated[
            Annotated[Literal["always", "never"], Tag("as_text")] | Annotated[Approval, Tag("as_object")],
            Discriminator(text_or_object),
        ]
        | None
    ) = None

    @field_validator("connector_id")
    @classmethod
    def _names_one_server(cls, connector_id: str | None, info: ValidationInfo) -> str | None:
        if connector_id is not None and info.data.get("server_url") is not None:
            raise PydanticCustomError("connector_id", "This and server_url exclude each other")
        return connector_id

    @field_validator("authorization")
    @classmethod
    def _is_said_once(cls, authorization: str | None, info: ValidationInfo) -> str | None:
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
    def told(self) -> dict[str, Any]:
        """The declaration as a response repeats it: without secrets and unknown keys."""
        fields = {key: value for key, value in self.given.items() if key in TOLD}
        return fields | {"server_url": reduced(self.server_url)} if self.server_url else fields


TOLD = frozenset(
    {"type", "server_label", "server_description", "server_url", "connector_id", "allowed_tools", "require_approval"}
    | {"allowed_callers", "defer_loading"}
)
"""The keys that a response repeats: no secrets, and no unknown keys, which might hold one."""


def reduced(url: str) -> str:
    """Return ``url`` without its path and query, because both may hold a key."""
    parts = urlsplit(url)
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment
    return f"{parts.scheme}://{parts.netloc}/{'<redacted>' if has_more else ''}"


class ChosenServer(Body):
    """All the tools of an MCP server, or one of them."""

    type: Literal["mcp"]
    server_label: str
    name: str | None = None


class OnlyServer(ChosenServer, Echoed):
    """The MCP server that the model must call."""

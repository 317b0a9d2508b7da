"""The bodies of answers that are neither a response nor a stream."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.response import Usage
from penstock.services.engines.engine import ModelState

Listed = TypeVar("Listed")


class Problem(msgspec.Struct, frozen=True):
    """An error: its kind (``type``), its place in the request (``param``) and a word for programs (``code``)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: Problem


class DeletedResponse(msgspec.Struct, frozen=True):
    """The confirmation that a response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Page(msgspec.Struct, Generic[Listed], frozen=True):
    """One page of a list."""

    data: tuple[Listed, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Items(Page[Item], frozen=True):
    """One page of a list of items."""


class Conversation(msgspec.Struct, frozen=True):
    """A stored list of items that responses can continue, and add their own items to."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class DeletedConversation(msgspec.Struct, frozen=True):
    """The confirmation that a conversation and its items were deleted."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct, frozen=True):
    """The length of the prompt of a request, in tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class CompactedResponse(msgspec.Struct, frozen=True):
    """A compacted conversation: its ``output`` takes the place of what was compacted; ``usage`` is that of the pass."""

    id: str
    created_at: int
    output: tuple[Item, ...]
    usage: Usage
    object: Literal["response.compaction"] = "response.compaction"


class Model(msgspec.Struct, frozen=True):
    """A name that a request may give as its model; prompt and answer may have ``max_model_len`` tokens together.

    That is None if there is no limit.  It has the fields of OpenAI, vLLM and Anthropic, whose clients skip those of
    the others.
    """

    id: str
    created: int
    max_model_len: int | None
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    root: str | None = None
    """The folder or the id of the model, by which `vllm bench serve` loads its tokenizer."""
    state: ModelState = "ready"
    """The state of the model; one that is not ready is loaded when a request asks for it."""
    kind: str = "generate"
    """The kind of the model: the server passes on all requests to one that does not ``generate``."""
    input_modalities: tuple[Literal["text", "image"], ...] = ("text",)
    """The kinds of input that the model reads; files are read as text."""
    tools: tuple[str, ...] = ()
    """The types of the tools that this server runs for the client."""
    lifecycle: Literal["active"] = "active"
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    owned_by: str = "penstock"


class Models(msgspec.Struct, frozen=True):
    """The models of this server, or a page of them."""

    data: tuple[Model, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True):
    """The state of the engine and the store; ``degraded`` means that writes wait until the database works again."""

    status: Literal["ok", "degraded", "engine dead", "starting"]


class Ready(msgspec.Struct, frozen=True):
    """Tells if this server takes new responses; if not, ``reasons`` has the causes."""

    status: Literal["ready", "not ready"]
    reasons: tuple[str, ...] = ()


class Version(msgspec.Struct, frozen=True):
    """The version of this server."""

    version: str


class Load(msgspec.Struct, frozen=True):
    """The load of this server: the responses that run in the process that answers."""

    server_load: int


class OpenApi(msgspec.Struct, frozen=True):
    """The OpenAPI description of this server."""

    openapi: str
    info: dict[str, str]
    servers: tuple[dict[str, str], ...]
    paths: dict[str, Any]
    components: dict[str, Any]

"""Answers that are neither a response nor a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.pipeline.protocol.items import Item


class Problem(msgspec.Struct, frozen=True):
    """What is wrong: ``type`` is its kind, ``param`` the place in the request, ``code`` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: Problem


class DeletedResponse(msgspec.Struct, frozen=True):
    """A response is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Items(msgspec.Struct, frozen=True):
    """One page of a list of items."""

    data: tuple[Item, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Conversation(msgspec.Struct, frozen=True):
    """What items are kept in, for responses to go on from and to be added to."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class DeletedConversation(msgspec.Struct, frozen=True):
    """A conversation is gone, with its items."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct, frozen=True):
    """How long a prompt would be."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Model(msgspec.Struct, frozen=True):
    """A name that requests may give as their model."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "penstock"


class Models(msgspec.Struct, frozen=True):
    """All of them."""

    data: tuple[Model, ...]
    object: Literal["list"] = "list"


class Health(msgspec.Struct, frozen=True):
    """How the engine is, and the store: one that is ``degraded`` keeps for later what it cannot take now."""

    status: Literal["ok", "degraded", "engine dead"]


class OpenApi(msgspec.Struct, frozen=True):
    """A description of this server in the terms of OpenAPI."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]

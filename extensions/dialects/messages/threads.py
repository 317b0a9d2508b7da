"""Threads: conversations that the store holds, so that a client sends only what is new.

An answer of a thread is a stored response, which the next turn continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter

from penstock.extensions.dialects.messages.blocks import (
    SystemTurn,
    ToolAdditionBlock,
    ToolReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    Turn,
)
from penstock.extensions.dialects.messages.errors import THREAD_NOT_FOUND, THREAD_UNSUPPORTED, not_permitted
from penstock.pipeline.errors import STORES_NOTHING, InvalidRequest
from penstock.pipeline.protocol.items import AdditionalTools
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.tools import (
    CodeInterpreterToolParam,
    FunctionToolParam,
    OtherToolParam,
    ProgramToolParam,
    ToolParam,
    WebSearchToolParam,
)
from penstock.services.store.store import Store
from penstock.stages.normalize.recall import CONTINUABLE

_tools: TypeAdapter[list[ToolParam]] = TypeAdapter(list[ToolParam], config=ConfigDict(hide_input_in_errors=True))

_OF_MESSAGES = (FunctionToolParam, CodeInterpreterToolParam, ProgramToolParam, WebSearchToolParam, OtherToolParam)
"""The tools that a message can have; a response with others, whose secrets are not stored, is no turn of a thread."""


class BegunThread(Body):
    """The wish that the server holds the conversation under the id of the answer."""

    type: Literal["create"]


class ContinuedThread(Body):
    """The wish to go on after an answer, whose conversation the server holds."""

    type: Literal["continue"]
    previous_message_id: str

    @property
    def response_id(self) -> str:
        """The id of the response that became the answer."""
        return f"resp_{self.previous_message_id.removeprefix('msg_')}"


Thread: TypeAlias = Annotated[BegunThread | ContinuedThread, Field(discriminator="type")]


def unheld(messages: Sequence[Turn], defined: frozenset[str | None] | None) -> Iterator[str]:
    """Yield the names of what holds for later turns, and is no part of a stored conversation.

    Deferred tools are not stored until a result loads them: those of a turn that continues are ``defined`` in it.
    """
    for message in messages:
        if isinstance(message, SystemTurn):
            if message.clear_at == "next_user_message":
                yield "clear_at"
            if message.output_config is not None and message.output_config.effort is not None:
                yield "output_config"
            for block in () if isinstance(message.content, str) else message.content:
                match block:
                    case ToolRemovalBlock():
                        yield "tool_removal"
                    case ToolAdditionBlock(tool=ToolReference()):
                        yield "tool_reference"
                    case _:
                        pass
        elif defined is not None and not defined.issuperset(_referred(message)):
            yield "tool_reference"


def _referred(message: Turn) -> Iterator[str]:
    """Yield the names of the tools that results of a message load."""
    blocks = () if isinstance(message.content, str) else message.content
    results = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
    parts = [part for content in results if isinstance(content, tuple) for part in content]
    return (part.tool_name for part in parts if isinstance(part, ToolReferenceBlock))


async def continued(request: CreateResponse, store: Store) -> CreateResponse:
    """Return the request of a turn with all that its thread began with.

    Raises `InvalidRequest` if the store does not hold the whole thread, for other instructions or tools than its own,
    and for any thread if the server keeps nothing: a client that hears so at once does not ask in each turn.
    """
    if not store.keeps and (request.store or request.previous_response_id):
        raise InvalidRequest(f"A thread cannot be here.{STORES_NOTHING}", param="thread", code=THREAD_UNSUPPORTED)
    if (previous := request.previous_response_id) is None:
        return request
    chain = await store.chain(previous, request.envelope.owner)
    if chain and chain[-1].response.status in ("queued", "in_progress"):
        raise _refusal("The answer to continue has not ended", "thread_continue_in_flight")
    is_whole = chain and chain[0].response.previous_response_id is None  # else its beginning has expired
    tools = _tools.validate_python(list(chain[-1].response.tools)) if is_whole else []
    has_others = not all(isinstance(tool, _OF_MESSAGES) for tool in tools)
    if not is_whole or has_others or chain[-1].response.status not in CONTINUABLE:
        message = "This server does not hold the whole conversation of this answer."
        raise _refusal(message, THREAD_NOT_FOUND)
    held = chain[-1].response
    left_out = held.left_out_tools or ()
    given = [tool for tool in request.tools or () if tool.type not in left_out]
    differing = {
        "system": request.instructions not in (None, held.instructions),
        "tools": request.tools is not None and _plain(given) != _plain(tools),
    }
    if names := ", ".join(name for name, differs in differing.items() if differs):
        message = f"A turn has what its thread began with; differing field(s): {names}"
        raise _refusal(message, "thread_fingerprint_mismatch")
    history = await store.history(chain)
    known = [tool for item in history.items if isinstance(item, AdditionalTools) for tool in item.tools]
    if known and request.store is False:
        raise not_permitted("compaction")  # the summary does not tell the tools
    begun = {"instructions": held.instructions, "tools": tools or None, "max_tool_calls": held.max_tool_calls}
    begun["input"] = [_without(known, item) for item in request.input or ()]
    envelope = replace(request.envelope, continued=history)
    return request.model_copy(update=begun).inside(envelope)


def _without(known: Sequence[dict[str, Any]], item: Any) -> Any:
    """Return an item of a turn, which brings no tool that the thread has as it is."""
    if not isinstance(item, AdditionalTools):
        return item
    return msgspec.structs.replace(item, tools=tuple(tool for tool in item.tools if tool not in known))


def _refusal(message: str, code: str) -> InvalidRequest:
    return InvalidRequest(message, param="thread.previous_message_id", code=code)


def _plain(tools: Sequence[ToolParam]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]

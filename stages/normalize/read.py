"""Read: the items and the tools that a request brings, joined to those that it continues."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.lifecycle.item_lifecycles import LIFECYCLES
from penstock.pipeline.protocol.items import (
    Compaction,
    ConfigurationUpdate,
    Item,
    McpApprovalResponse,
    McpCall,
    Message,
    of_type,
)
from penstock.pipeline.protocol.params.items import InputItem
from penstock.pipeline.protocol.superseded import unsuperseded
from penstock.pipeline.tasks import apart
from penstock.services.tools import Toolbox
from penstock.stages.normalize.containers import earlier_containers
from penstock.stages.normalize.frames import ReadRequest, RecalledRequest
from penstock.stages.normalize.input_items import InputReader, files_of, new_items, said_now, unseen_in
from penstock.stages.normalize.pairing import check_answered, check_pairs
from penstock.stages.normalize.parameters import exclusive
from penstock.stages.normalize.previous_messages import MessageReader
from penstock.stages.normalize.toolset import ToolsetBuilder

_RUN_HERE = frozenset(kind for kind, lifecycle in LIFECYCLES.items() if lifecycle.hides_result)
"""The items of calls that this server may have run."""


@dataclass(frozen=True)
class Read:
    """Read what a request brings; ``toolbox`` has the tools that this server can run."""

    toolbox: Toolbox

    async def __call__(self, source: AsyncIterator[RecalledRequest]) -> AsyncGenerator[ReadRequest, None]:
        """Yield each request with its items and tools; raises `InvalidRequest` for a wrong one."""
        async for recalled in source:
            yield await apart(not recalled.is_light, self._read, recalled)

    def _read(self, recalled: RecalledRequest) -> ReadRequest:
        """Read all that a request may have thousands of: this runs in a thread."""
        request, sees_images = recalled.request, recalled.traits.sees_images
        history = recalled.thoughts.stored(recalled.past.items, recalled.past.tokens)
        offered = self._offered(recalled, history)
        sent = _sent(recalled, history, offered)
        messages = MessageReader(recalled.suffix, request.instructions, offered.tools)
        before = messages.read(request.previous_input_messages or (), sent)
        items = _joined(recalled, history, before, sent)
        whole, read = (*history, *items), unsuperseded(history, items)
        said = said_now(recalled.given, sent, "input")
        toolset = offered.toolset(request)
        files, surplus = files_of(read, said)
        return ReadRequest(
            recalled=recalled,
            history=history,
            items=items,
            toolset=toolset,
            offered=offered,
            said=tuple(said),
            tokens=messages.tokens,
            results=messages.results,
            approved=_approved(items),
            run_here=[item.id for item in items if type(item) in _RUN_HERE],
            latest=next((item for item in reversed(whole) if type(item) is Compaction), None),
            files=files,
            surplus=surplus,
            unseen=unseen_in(read, said) if sees_images else {},
            updates=_updates(recalled, whole),
            containers=earlier_containers(whole) if offered.wishes else (),
        )

    def _offered(self, recalled: RecalledRequest, history: Sequence[Item]) -> ToolsetBuilder:
        """Return the tools of the request and of its history."""
        toolbox, of_model = self.toolbox, recalled.traits.tools
        denied = toolbox.denied(recalled.owner, of_model)
        # the operator's server in place of a built-in tool is this tool under any other name, too
        builder = ToolsetBuilder(
            usable=toolbox.namespaces - denied,
            labels=toolbox.labels - denied,
            left_out=toolbox.left_out,
            denied=toolbox.namespaces & denied,
            of_denied=toolbox.access.of_denied(recalled.owner, by_model=of_model is not None),
            own=frozenset(toolbox.own),
            sees_images=recalled.traits.sees_images,
            of_unknown=toolbox.of_unknown,
            takes_agents=recalled.request.envelope.body is not None,
            strict_level=toolbox.strict_level(recalled.served),
        )
        builder.add_all(recalled.request.tools or ())
        builder.inherit(history)
        return builder


def _sent(recalled: RecalledRequest, history: Sequence[Item], offered: ToolsetBuilder) -> Sequence[Item]:
    """Return the items of the input, with the thoughts in them opened; their tools are added to those ``offered``."""
    reader = InputReader(
        "input",
        suffix=recalled.suffix,
        referenced=recalled.referenced,
        toolset=offered,
        sees_images=recalled.traits.sees_images,
    )
    return recalled.thoughts.sent(reader.read(recalled.given, history), "input", recalled.referenced)


def _joined(
    recalled: RecalledRequest, history: Sequence[Item], before: Sequence[Item], sent: Sequence[Item]
) -> tuple[Item, ...]:
    """Return the items that are not in the history: those of raw messages ``before`` those of the input.

    Raises `InvalidRequest` if there is nothing to answer, or if calls and outputs do not belong together.
    """
    is_conversation = recalled.request.envelope.generates and recalled.request.raw_prompt is None
    if is_conversation and not sent and not before and not history:
        message = "A request that continues nothing needs an input."
        raise InvalidRequest(message, param="input", code="missing_required_parameter")
    check_pairs((*history, *before), sent, "input")
    new = new_items(history, sent)
    check_answered((*history, *new))
    return (*before, *new)


def _approved(items: Sequence[Item]) -> Collection[str]:
    """Return the ids of the approvals among ``items`` whose calls are not among them.

    The history of a client that keeps it itself has the call, too.
    """
    made = {item.approval_request_id for item in of_type(items, McpCall)}
    return {item.approval_request_id for item in of_type(items, McpApprovalResponse) if item.approve} - made


def _updates(recalled: RecalledRequest, items: Sequence[Item]) -> Mapping[str, Any]:
    """Return what the items of a conversation set in place of the request.

    Raises `InvalidRequest` for a format beside what excludes one.
    """
    updates: dict[str, Any] = {}
    for update in of_type(items, ConfigurationUpdate):
        if update.reasoning is not UNSET and "effort" in update.reasoning:
            updates["effort"] = update.reasoning["effort"]
        if update.text is not UNSET:
            updates["format"] = update.text["format"]
    request = recalled.request
    of_request = request.text.format.type if request.text and request.text.format else "text"
    has_format = updates.get("format", {"type": of_request})["type"] != "text"
    if _continues_a_text(recalled.sent) and (has_format or request.structured_outputs):
        raise InvalidRequest(
            "A text that is continued cannot be held to a format, because its beginning is not.",
            param=("input" if "format" in updates else "text.format") if has_format else "structured_outputs",
            code="mutually_exclusive_parameters",
        )
    if request.structured_outputs and has_format:
        raise exclusive("text.format", "structured_outputs", param="structured_outputs")
    return updates


def _continues_a_text(sent: Sequence[InputItem]) -> bool:
    """Return True if the input ends with a message of the assistant that is not whole."""
    last = sent[-1] if sent else None
    return isinstance(last, Message) and last.role == "assistant" and last.status == "incomplete"

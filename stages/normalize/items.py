"""Input items: convert the items of a request body into those of a conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from msgspec import UNSET, UnsetType

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import (
    AdditionalTools,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputPart,
    InputText,
    Item,
    LocalShellCallOutput,
    Message,
    MessagePart,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
    images_of,
)
from penstock.pipeline.protocol.params import calls as given_calls
from penstock.pipeline.protocol.params import items as given
from penstock.pipeline.protocol.params.json_body import Pace, shortened
from penstock.stages.normalize.answers import Answers
from penstock.stages.normalize.calls import client_item, server_item
from penstock.stages.normalize.hosted import told
from penstock.stages.normalize.images import read_image
from penstock.stages.normalize.tools import Offer

Said = TypeVar("Said")
Find: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, Item]]]


@dataclass(frozen=True)
class ItemReader:
    """Read the list of items that a body has under ``name``, adding the tools that items bring to ``offer``.

    An item without an id, or with an id that is taken in the conversation, gets an id that ends in ``suffix`` and its
    position.  ``find`` looks item references up in the store, and leaves out unknown ids.  ``sees`` is True if the
    model reads images.
    """

    name: str
    suffix: str
    find: Find
    offer: Offer
    sees: bool = False

    async def read(
        self, input_items: Sequence[given.InputItem], history: Iterable[Item], pace: Pace
    ) -> tuple[Item, ...]:
        """Return the items; raises `InvalidRequest` for an unknown reference or an item this server cannot take."""
        references = await self._references(input_items, pace)
        stored = await self.find(references) if references else {}
        taken = {*references, *(item.id for item in history)}
        items: list[Item] = []
        for position, item in enumerate(input_items):
            await pace()
            path = f"{self.name}[{position}]"
            if isinstance(item, given.ItemReference):
                items.append(await self._referenced(item, stored, path, pace))
            else:
                fresh_item = item.model_copy(update={"id": None}) if item.id in taken else item
                converted = await self._item(fresh_item, f"{self.suffix}i{position:04x}", path, pace)
                if isinstance(converted, LocalShellCallOutput) and converted.id in taken:
                    raise _duplicate(converted.id, f"{path}.call_id")
                items.append(converted)
                taken.add(converted.id)
        return tuple(items)

    async def _references(self, input_items: Sequence[given.InputItem], pace: Pace) -> list[str]:
        """Return the ids of all item references.

        Raises `InvalidRequest` for a repeated one, because repeats would let a short body make a prompt of any length.
        """
        ids = dict[str, None]()
        for position, item in enumerate(input_items):
            await pace()
            if isinstance(item, given.ItemReference):
                if item.id in ids:
                    raise _duplicate(item.id, f"{self.name}[{position}].id")
                ids[item.id] = None
        return list(ids)

    async def _referenced(
        self, reference: given.ItemReference, stored: Mapping[str, Item], path: str, pace: Pace
    ) -> Item:
        if (item := stored.get(reference.id)) is None:
            raise InvalidRequest(f"Item with id {shortened(reference.id)!r} not found.", param=f"{path}.id")
        if images_of(item) and not self.sees:
            raise not_read("input_image", path, sees=False)
        if isinstance(item, AdditionalTools):
            await self.offer.add_stored(item, path, pace)
        return item

    async def _item(self, item: given.InputItem, suffix: str, path: str, pace: Pace) -> Item:
        if isinstance(item, given_calls.ClientCallItem):
            return await client_item(item, suffix, pace)
        if isinstance(item, given_calls.ServerCallItem):
            return await server_item(item, suffix, pace)
        match item:
            case given.MessageItem():
                content = await self._message_parts(item, path, pace)
                return Message(
                    item.id or f"msg_{suffix}", item.status or "completed", item.role, content, _unset(item.phase)
                )
            case given.ReasoningItem():
                return await _reasoning(item, suffix, pace)
            case given.AdditionalToolsItem():
                return await _additional_tools(item, suffix, path, self.offer, pace)
            case given.FunctionCallItem() | given.CustomToolCallItem():
                return _call(item, suffix)
            case given.FunctionCallOutputItem() | given.CustomToolCallOutputItem():
                return await self._output(item, suffix, path, pace)
            case given.ItemReference():
                raise AssertionError("a reference is resolved by now")

    async def _message_parts(self, item: given.MessageItem, path: str, pace: Pace) -> tuple[MessagePart, ...]:
        if isinstance(item.content, str):
            return (OutputText(item.content) if item.role == "assistant" else InputText(item.content),)
        parts: list[MessagePart] = []
        for position, part in enumerate(item.content):
            await pace()
            match part:
                case given.OutputTextPart(text=text):
                    parts.append(OutputText(text))
                case given.RefusalPart(refusal=refusal):
                    parts.append(Refusal(refusal))
                case given.ImagePart() if self.sees and item.role == "assistant":
                    param = f"{path}.content[{position}]"
                    raise InvalidRequest("A message of the assistant has no images.", param=param)
                case given.InputTextPart() | given.ImagePart() | given.FilePart():
                    parts.append(await self._input_part(part, f"{path}.content[{position}]", pace))
        return tuple(parts)

    async def _output(
        self, item: given.FunctionCallOutputItem | given.CustomToolCallOutputItem, suffix: str, path: str, pace: Pace
    ) -> FunctionCallOutput | CustomToolCallOutput:
        status, output = item.status or "completed", await self._output_content(item.output, f"{path}.output", pace)
        if isinstance(item, given.FunctionCallOutputItem):
            return FunctionCallOutput(item.id or f"fco_{suffix}", item.call_id, output, status)
        return CustomToolCallOutput(item.id or f"ctco_{suffix}", item.call_id, output, status)

    async def _output_content(
        self, output: str | Sequence[given.OutputPart], path: str, pace: Pace
    ) -> str | tuple[InputPart, ...]:
        if isinstance(output, str):
            return output
        parts = []
        for position, part in enumerate(output):
            await pace()
            parts.append(await self._input_part(part, f"{path}[{position}]", pace))
        return tuple(parts)

    async def _input_part(self, part: given.OutputPart, path: str, pace: Pace) -> InputPart:
        if isinstance(part, given.InputTextPart):
            return InputText(part.text)
        if isinstance(part, given.ImagePart) and self.sees:
            return await read_image(part, path, pace)
        raise not_read(part.type, path, sees=self.sees)

    async def check_calls(self, history: Sequence[Item], items: Sequence[Item], pace: Pace) -> None:
        """Raise `InvalidRequest` for an output or approval among ``items`` that answers no earlier call or request."""
        answers = Answers()
        for item in history:
            await pace()
            answers.add(item)
        for position, item in enumerate(items):
            await pace()
            answers.check(item, f"{self.name}[{position}]")
            answers.add(item)


def _duplicate(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Duplicate item found with id {shortened(item_id)!r}.", param=param)


async def unrepeated(history: Iterable[Item], items: Iterable[Item], pace: Pace) -> tuple[Item, ...]:
    """Return the items that are not in the history yet; only an item reference can be in it, and then adds nothing."""
    known = set[str]()
    for item in history:
        await pace()
        known.add(item.id)
    return tuple(item for item in items if item.id not in known)


def _call(item: given.FunctionCallItem | given.CustomToolCallItem, suffix: str) -> FunctionCall | CustomToolCall:
    status, namespace = item.status or "completed", _unset(item.namespace)
    if isinstance(item, given.FunctionCallItem):
        return FunctionCall(item.id or f"fc_{suffix}", item.call_id, item.name, item.arguments, status, namespace)
    return CustomToolCall(item.id or f"ctc_{suffix}", item.call_id, item.name, item.input, status, namespace)


async def _additional_tools(
    item: given.AdditionalToolsItem, suffix: str, path: str, offer: Offer, pace: Pace
) -> AdditionalTools:
    tools = []
    for position, tool in enumerate(item.tools):
        await pace()
        offer.add_later(tool, f"{path}.tools[{position}]")
        tools.append(told(tool))
    return AdditionalTools(item.id or f"at_{suffix}", item.role, tuple(tools))


def _unset(value: Said | None) -> Said | UnsetType:
    return UNSET if value is None else value


async def _reasoning(item: given.ReasoningItem, suffix: str, pace: Pace) -> Reasoning:
    summary, content = list[SummaryText](), list[ReasoningText]()
    for summary_part in item.summary or ():
        await pace()
        summary.append(SummaryText(summary_part.text))
    for part in item.content or ():
        await pace()
        content.append(ReasoningText(part.text))
    return Reasoning(
        item.id or f"rs_{suffix}",
        summary=tuple(summary),
        content=UNSET if item.content is None else tuple(content),
        encrypted_content=_unset(item.encrypted_content),
        status=_unset(item.status),
    )


def not_read(kind: str, path: str, *, sees: bool) -> InvalidRequest:
    """Return the error for a part of a ``kind`` that the model cannot read."""
    readable = "text and images" if sees else "text"
    return InvalidRequest(f"This model reads {readable} only, no {kind}.", param=path)

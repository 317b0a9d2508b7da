"""Input items: convert the items of a request body into those of a conversation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, get_args

from msgspec import UNSET, UnsetType

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.stages.models.images import NoImage, check_data_url, is_data_url
from penstock.stages.normalize.toolset import ToolsetBuilder

logger = logging.getLogger(__name__)

MOST_IMAGES = 500
"""The most images in one conversation."""

MOST_FILES = 50
"""The most files in one conversation."""

Value = TypeVar("Value")

PlacedFile: TypeAlias = tuple[str, wire.InputFile | wire.InputImage, str]
"""The id of an item, a file or a stored image in it, and the path of this part in the request."""

_KINDS: Mapping[str, type[wire.BaseItem]] = {str(kind.__struct_config__.tag): kind for kind in get_args(wire.Item)}

_UNREAD = frozenset(get_args(wire.UnreadItem))


def references(input_items: Iterable[params.InputItem], name: str) -> list[str]:
    """Return the ids of all item references in the list that a body has under ``name``.

    Raises `InvalidRequest` for a repeated one, because repeats would let a short body make a prompt of any length.
    """
    ids = dict[str, None]()
    for position, item in enumerate(input_items):
        if isinstance(item, params.ItemReference):
            if item.id in ids:
                raise _duplicate(item.id, f"{name}[{position}].id")
            ids[item.id] = None
    return list(ids)


@dataclass(frozen=True)
class InputReader:
    """Read the list of items that a body has under ``name``, adding the tools that items bring to ``toolset``.

    An item without an id, or with an id that is taken in the conversation, gets an id that ends in ``suffix`` and its
    position.
    """

    name: str
    suffix: str
    referenced: Mapping[str, wire.Item]
    """The stored items that the list refers to, by id; an unknown id is missing."""
    toolset: ToolsetBuilder
    sees_images: bool = False
    """True if the model reads images."""

    def read(self, input_items: Iterable[params.InputItem], history: Iterable[wire.Item]) -> list[wire.Item]:
        """Return the items; raises `InvalidRequest` for an unknown reference or an item this server cannot take."""
        taken = {*self.referenced, *(item.id for item in history)}
        read: list[wire.Item] = []
        for position, item in enumerate(input_items):
            path = f"{self.name}[{position}]"
            if isinstance(item, params.ItemReference):
                read.append(self._referenced(item, path))
                continue
            if isinstance(item, params.CompactionTriggerItem):
                message = "A compaction_trigger must be the last item of the input."
                raise InvalidRequest(message, param=path, code="invalid_value")
            converted = self._item(item, self._id(item, f"{self.suffix}i{position:04x}", taken), path)
            if isinstance(converted, wire.LocalShellCallOutput) and converted.id in taken:
                raise _duplicate(converted.id, f"{path}.call_id")
            read.append(converted)
            taken.add(converted.id)
        if unread := dict.fromkeys(item.type for item in read if type(item) in _UNREAD):
            logger.info("Passed over items of tools that this server does not have: %s", ", ".join(unread))
        return read

    def _id(self, item: params.InputItem, suffix: str, taken: set[str]) -> str:
        if isinstance(item, params.LocalShellCallOutputItem):
            return item.call_id
        is_free = item.id not in taken and not (isinstance(item, params.LocalShellCallItem) and item.id == item.call_id)
        return item.id if item.id and is_free else _KINDS[item.type].new_id(suffix)

    def _referenced(self, reference: params.ItemReference, path: str) -> wire.Item:
        if (item := self.referenced.get(reference.id)) is None:
            raise InvalidRequest(f"Item with id {shortened(reference.id)!r} not found.", param=f"{path}.id")
        if wire.images_of(item) and not self.sees_images:
            raise unreadable("input_image", path, sees_images=False)
        if isinstance(item, wire.AdditionalTools | wire.ToolSearchOutput):
            self.toolset.add_stored(item, path)
        return item

    def _item(self, item: params.InputItem, item_id: str, path: str) -> wire.Item:
        match item:
            case params.MessageItem(status=status):
                content = self._message_parts(item, f"{path}.content")
                return wire.Message(item_id, status or "completed", item.role, content, _unset(item.phase))
            case params.FunctionCallOutputItem():
                output = self._output(item.output, path)
                return wire.FunctionCallOutput(item_id, item.call_id, output, item.status or "completed")
            case params.CustomToolCallOutputItem():
                output = self._output(item.output, path)
                return wire.CustomToolCallOutput(item_id, item.call_id, output, item.status or "completed")
            case params.ComputerCallOutputItem():
                checks = tuple(check.fields for check in item.acknowledged_safety_checks or ())
                screen = self._screenshot(item.output, f"{path}.output")
                return wire.ComputerCallOutput(item_id, item.call_id, screen, item.call_status, checks)
            case params.ItemReference() | params.CompactionTriggerItem():
                raise AssertionError("these are read by now")
            case params.ConfigurationUpdateItem(reasoning=None, text=None):
                message = "An update of the configuration needs a reasoning or a text."
                raise InvalidRequest(message, param=path, code="missing_required_parameter")
            case params.AdditionalToolsItem() | params.ToolSearchOutputItem():
                brought = item.as_item(item_id)
                self.toolset.add_items([tool.root for tool in item.tools], brought, path)
                return brought
            case _:
                return item.as_item(item_id)

    def _message_parts(self, item: params.MessageItem, path: str) -> tuple[wire.MessagePart, ...]:
        if isinstance(item.content, str):
            return (wire.OutputText(item.content) if item.role == "assistant" else wire.InputText(item.content),)
        parts: list[wire.MessagePart] = []
        for position, part in enumerate(item.content):
            match part:
                case params.OutputTextPart(text=text):
                    parts.append(wire.OutputText(text))
                case wire.Refusal():
                    parts.append(part)
                case params.ImagePart() | params.FilePart() if self._is_misplaced(part, item):
                    kind = "images" if isinstance(part, params.ImagePart) else "files"
                    raise InvalidRequest(f"A message of the assistant cannot have {kind}.", param=f"{path}[{position}]")
                case wire.InputText() | params.ImagePart() | params.FilePart():
                    parts.append(self._input_part(part, path, position))
        return tuple(parts)

    def _is_misplaced(self, part: params.ImagePart | params.FilePart, item: params.MessageItem) -> bool:
        return item.role == "assistant" and (self.sees_images or isinstance(part, params.FilePart))

    def _output(self, output: str | Sequence[params.OutputPart], path: str) -> str | tuple[wire.InputPart, ...]:
        if isinstance(output, str):
            return output
        return tuple(self._input_part(part, f"{path}.output", position) for position, part in enumerate(output))

    def _input_part(self, part: params.OutputPart, path: str, position: int) -> wire.InputPart:
        if isinstance(part, wire.InputText):
            return part
        if isinstance(part, params.FilePart):
            return _file(part, f"{path}[{position}]")
        if self.sees_images:
            return _image(part, f"{path}[{position}]")
        raise unreadable("input_image", f"{path}[{position}]", sees_images=False)

    def _screenshot(self, part: params.ScreenshotPart, path: str) -> wire.Screenshot:
        if not self.sees_images:
            raise unreadable(part.type, path, sees_images=False)
        if part.file_id is not None:
            raise InvalidRequest(
                "Send the image_url of a screenshot: it cannot be a stored file.", param=f"{path}.file_id"
            )
        return wire.Screenshot(_image(params.ImagePart(image_url=part.image_url), path).url)


def id_prefix(item: params.InputItem) -> str:
    """Return how OpenAI's ids of such items begin; those of outputs may also begin as those of their calls."""
    kind = _KINDS[item.type]
    if kind is wire.LocalShellCallOutput or kind in _UNREAD:  # its id is that of its call, or of another server
        return ""
    return kind.id_prefix.removesuffix("o")


def new_items(history: Iterable[wire.Item], input_items: Iterable[wire.Item]) -> tuple[wire.Item, ...]:
    """Return the items that are not in the history yet; only an item reference can be in it, and then adds nothing."""
    known = {item.id for item in history}
    return tuple(item for item in input_items if item.id not in known)


def files_of(items: Iterable[wire.Item], paths: Mapping[str, str], others: str) -> list[PlacedFile]:
    """Return the files of items.

    ``paths`` has the paths of items by their ids.  Files of other items came with the parameter ``others``.

    Raises `InvalidRequest` for more than `MOST_FILES`.
    """
    found = list[PlacedFile]()
    for item in items:
        field = "content" if isinstance(item, wire.Message) else "output"
        for position, part in enumerate(wire.parts_of(item)):
            if wire.is_file(part):
                path = f"{paths[item.id]}.{field}[{position}]" if item.id in paths else others
                found.append((item.id, part, path))
    if len(found) > MOST_FILES:
        message = f"A conversation may have {MOST_FILES} files, and this one has {len(found)}."
        raise InvalidRequest(message, param="input")
    return found


def check_image_count(items: Iterable[wire.Item]) -> None:
    """Raise `InvalidRequest` if a conversation has more than `MOST_IMAGES` images."""
    count = sum(len(wire.images_of(item)) for item in items)
    if count > MOST_IMAGES:
        message = f"A conversation may have {MOST_IMAGES} images, and this one has {count}."
        raise InvalidRequest(message, param="input")


def unreadable(kind: str, path: str, *, sees_images: bool) -> InvalidRequest:
    """Return the error for a part of a ``kind`` that the model cannot read."""
    readable = "text and images" if sees_images else "text"
    return InvalidRequest(f"This model reads {readable} only, no {kind}.", param=path)


def _image(part: params.ImagePart, path: str) -> wire.InputImage:
    url, param, detail = part.image_url, f"{path}.image_url", part.detail or "auto"
    if (url is None) == (part.file_id is None):
        message = "An image has either an image_url or a file_id"
        raise InvalidRequest(f"{message} (at {param})", param=param if url is None else f"{path}.file_id")
    if url is None:
        return wire.InputImage(detail=detail, file_id=_unset(part.file_id))
    if is_data_url(url):
        try:
            check_data_url(url)
        except NoImage as error:
            raise InvalidRequest(f"This image cannot be read. {error}", param=param) from error
    elif not url.lower().startswith(("http://", "https://")):
        message = f"An image_url begins with https://, http:// or data:, and {shortened(url)!r} does not."
        raise InvalidRequest(message, param=param)
    return wire.InputImage(url, detail)


def _file(part: params.FilePart, path: str) -> wire.InputFile:
    if sum(source is not None for source in (part.file_data, part.file_url, part.file_id)) != 1:
        param = path if part.file_id is None else f"{path}.file_id"
        raise InvalidRequest("A file has one of file_data, file_url and file_id.", param=param)
    if part.file_url is not None and not part.file_url.lower().startswith(("http://", "https://")):
        message = f"A file_url begins with https:// or http://, and {shortened(part.file_url)!r} does not."
        raise InvalidRequest(message, param=f"{path}.file_url")
    return wire.InputFile(
        _unset(part.filename), _unset(part.file_data), _unset(part.file_url), _unset(part.detail), _unset(part.file_id)
    )


def _unset(value: Value | None) -> Value | UnsetType:
    return UNSET if value is None else value


def _duplicate(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Duplicate item found with id {shortened(item_id)!r}.", param=param)

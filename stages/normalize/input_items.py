"""Input items: convert the items of a request body into those of a conversation."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from msgspec import UNSET, UnsetType

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.readings import UNHEARD, audio_instead, is_file
from penstock.services.file_reading import PlacedFile
from penstock.stages.models.images import NoImage, check_url
from penstock.stages.normalize.toolset import ToolsetBuilder

logger = logging.getLogger(__name__)

MOST_IMAGES = 500
"""The most images in one conversation."""

MOST_FILES = 50
"""The most files in one conversation."""

SURPLUS = f"[This file cannot be read: a conversation may have {MOST_FILES} files.]"
"""The sentence that the model reads in the place of any more."""

Value = TypeVar("Value")

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


_SAID_BESIDE = (params.AdditionalToolsItem, params.ConfigurationUpdateItem, params.McpApprovalResponseItem)
"""The items that may stand among the messages that the client sends now."""


def said_from(given: Sequence[params.InputItem]) -> int:
    """Return the position from which on the client speaks now: after all that a model has written or read before.

    A client that keeps the conversation itself sends it whole in each request.  What stands beside the outputs of tools
    came from an agent, which cannot take it back, as little as the outputs: then the client says nothing now.  A model
    has not read what stands before the beginning of an answer that it is to continue.
    """
    at = len(given) - _ends_with_beginning(given)
    while at and _is_said(given[at - 1]):
        at -= 1
    is_beside_output = at > 0 and given[at - 1].type.endswith("_output")
    return len(given) if is_beside_output else at


def said_now(given: Sequence[params.InputItem], read: Sequence[wire.Item], name: str) -> dict[str, str]:
    """Return the places of the items that the client says now, by id, in a list of the body under ``name``."""
    since = said_from(given)
    return {item.id: f"{name}[{at}]" for at, item in enumerate(read[since:], since)}


def _is_said(item: params.InputItem) -> bool:
    return item.role != "assistant" if isinstance(item, params.MessageItem) else isinstance(item, _SAID_BESIDE)


def _ends_with_beginning(given: Sequence[params.InputItem]) -> bool:
    last = given[-1] if given else None
    return isinstance(last, params.MessageItem) and last.role == "assistant" and last.status == "incomplete"


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

    def read(self, input_items: Sequence[params.InputItem], history: Iterable[wire.Item]) -> list[wire.Item]:
        """Return the items; raises `InvalidRequest` for an unknown reference or an item this server cannot take.

        The images and recordings of what the client does not say now are not checked (see `said_from`).
        """
        said = said_from(input_items)
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
            converted = self._item(item, self._id(item, f"{self.suffix}i{position:04x}", taken), path, position >= said)
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
        if isinstance(item, wire.AdditionalTools | wire.ToolSearchOutput):
            self.toolset.add_stored(item, path)
        return item

    def _item(self, item: params.InputItem, item_id: str, path: str, is_said: bool) -> wire.Item:
        match item:
            case params.MessageItem(status=status):
                content = self._message_parts(item, f"{path}.content", is_said)
                return wire.Message(
                    item_id, status=status or "completed", role=item.role, content=content, phase=_unset(item.phase)
                )
            case params.FunctionCallOutputItem():
                output = self._output(item.output, path)
                return wire.FunctionCallOutput(item_id, item.call_id, output, item.status or "completed")
            case params.CustomToolCallOutputItem():
                output = self._output(item.output, path)
                return wire.CustomToolCallOutput(item_id, item.call_id, output, item.status or "completed")
            case params.ComputerCallOutputItem():
                checks = tuple(check.fields for check in item.acknowledged_safety_checks or ())
                screen = self._screenshot(item.output, f"{path}.output")
                return wire.ComputerCallOutput(
                    item_id,
                    call_id=item.call_id,
                    output=screen,
                    status=item.call_status,
                    acknowledged_safety_checks=checks,
                )
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

    def _message_parts(self, item: params.MessageItem, path: str, is_said: bool) -> tuple[wire.MessagePart, ...]:
        if isinstance(item.content, str):
            return (wire.OutputText(item.content) if item.role == "assistant" else wire.InputText(item.content),)
        parts: list[wire.MessagePart] = []
        for position, part in enumerate(item.content):
            match part:
                case params.OutputTextPart(text=text):
                    parts.append(wire.OutputText(text))
                case wire.Refusal():
                    parts.append(part)
                case params.ImagePart() | params.FilePart() if item.role == "assistant":
                    kind = "images" if isinstance(part, params.ImagePart) else "files"
                    raise InvalidRequest(f"A message of the assistant cannot have {kind}.", param=f"{path}[{position}]")
                case wire.InputText() | params.ImagePart() | params.FilePart() | params.AudioPart():
                    parts.append(self._input_part(part, f"{path}[{position}]", is_said))
        return tuple(parts)

    def _output(self, output: str | Sequence[params.OutputPart], path: str) -> str | tuple[wire.InputPart, ...]:
        if isinstance(output, str):
            return output
        parts = enumerate(output)
        return tuple(self._input_part(part, f"{path}.output[{at}]", is_said=False) for at, part in parts)

    def _input_part(self, part: params.OutputPart, path: str, is_said: bool) -> wire.InputPart:
        match part:
            case wire.InputText():
                return part
            case params.FilePart():
                return _file(part, path)
            case params.AudioPart() if is_said:
                raise UnsupportedParameter(UNHEARD, param=path)
            case params.AudioPart():
                return wire.InputText(audio_instead())
            case params.ImagePart() if is_said and not self.sees_images:
                raise InvalidRequest("This model reads text only, no input_image.", param=path)
            case params.ImagePart():
                return _image(part, path, is_said=is_said)

    def _screenshot(self, part: params.ScreenshotPart, path: str) -> wire.Screenshot:
        if part.file_id is not None:
            raise InvalidRequest(
                "Send the image_url of a screenshot: it cannot be a stored file.", param=f"{path}.file_id"
            )
        return wire.Screenshot(_image(params.ImagePart(image_url=part.image_url), path, is_said=False).url)


def id_prefix(item: params.InputItem) -> str:
    """Return how OpenAI's ids of such items begin; those of outputs may also begin as those of their calls."""
    kind = _KINDS.get(item.type)
    # a trigger becomes no item; the id of the others is that of its call, or of another server
    if kind is None or kind is wire.LocalShellCallOutput or kind in _UNREAD:
        return ""
    return kind.id_prefix.removesuffix("o")


def new_items(history: Iterable[wire.Item], input_items: Iterable[wire.Item]) -> tuple[wire.Item, ...]:
    """Return the items that are not in the history yet; only an item reference can be in it, and then adds nothing."""
    known = {item.id for item in history}
    return tuple(item for item in input_items if item.id not in known)


def files_of(items: Iterable[wire.Item], paths: Mapping[str, str]) -> tuple[list[PlacedFile], list[PlacedFile]]:
    """Return the first `MOST_FILES` files of items, and all others, which are not read.

    ``paths`` has the paths of the messages that the client sends now, by their ids.  Raises `InvalidRequest` if one of
    the others is in them.
    """
    found = list[PlacedFile]()
    for item in items:
        for position, part in enumerate(wire.parts_of(item)):
            if is_file(part):
                path = f"{paths[item.id]}.content[{position}]" if item.id in paths else None
                found.append(PlacedFile(item.id, part, path))
    if any(file.path for file in found[MOST_FILES:]):
        raise InvalidRequest(_too_many(MOST_FILES, "files", len(found)), param="input")
    return found[:MOST_FILES], found[MOST_FILES:]


def unseen_in(items: Iterable[wire.Item], said: Container[str]) -> dict[str, str]:
    """Return the URLs of the images that the model cannot be shown, each with the reason.

    Raises `InvalidRequest` if one in the messages that are ``said`` now comes after `MOST_IMAGES`.
    """
    placed = [(image, item.id in said) for item in items for image in wire.images_of(item)]
    too_many = _too_many(MOST_IMAGES, "images", len(placed))
    if any(is_said for _, is_said in placed[MOST_IMAGES:]):
        raise InvalidRequest(too_many, param="input")
    unseen = {image.url: too_many for image, _ in placed[MOST_IMAGES:]}
    for image, is_said in placed[:MOST_IMAGES]:
        if not is_said and image.file_id is UNSET and (reason := _problem_of(image.url)):
            unseen[image.url] = reason
    return unseen


def _problem_of(url: str) -> str:
    try:
        check_url(url)
    except NoImage as error:
        return str(error)
    return ""


def _too_many(most: int, kind: str, count: int) -> str:
    return f"A conversation may have {most} {kind}, and this one has {count}."


def _image(part: params.ImagePart, path: str, *, is_said: bool) -> wire.InputImage:
    url, param, detail = part.image_url, f"{path}.image_url", part.detail or "auto"
    if (url is None) == (part.file_id is None):
        message = "An image has either an image_url or a file_id"
        raise InvalidRequest(f"{message} (at {param})", param=param if url is None else f"{path}.file_id")
    if url is None:
        return wire.InputImage(detail=detail, file_id=_unset(part.file_id))
    if is_said and (problem := _problem_of(url)):
        raise InvalidRequest(f"This image cannot be read. {problem}", param=param)
    return wire.InputImage(url, detail)


def _file(part: params.FilePart, path: str) -> wire.InputFile:
    if sum(source is not None for source in (part.file_data, part.file_url, part.file_id)) != 1:
        param = path if part.file_id is None else f"{path}.file_id"
        raise InvalidRequest("A file has one of file_data, file_url and file_id.", param=param)
    if part.file_url is not None and not part.file_url.lower().startswith(("http://", "https://")):
        message = f"A file_url begins with https:// or http://, and {shortened(part.file_url)!r} does not."
        raise InvalidRequest(message, param=f"{path}.file_url")
    return wire.InputFile(
        _unset(part.filename),
        file_data=_unset(part.file_data),
        file_url=_unset(part.file_url),
        detail=_unset(part.detail),
        file_id=_unset(part.file_id),
    )


def _unset(value: Value | None) -> Value | UnsetType:
    return UNSET if value is None else value


def _duplicate(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Duplicate item found with id {shortened(item_id)!r}.", param=param)

"""Input items: convert the items of a request body into those of a conversation."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.params import items as params
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.tools import SentTool
from penstock.pipeline.protocol.readings import UNHEARD, is_file
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

AnyItem = TypeVar("AnyItem", bound=wire.Item)

_TEXTS = frozenset({wire.InputText, wire.OutputText, wire.Refusal})

_CALL_OUTPUTS = (wire.FunctionCallOutput, wire.CustomToolCallOutput, wire.ComputerCallOutput)
_CHECKED = frozenset(
    {wire.Message, *_CALL_OUTPUTS, wire.ConfigurationUpdate, wire.AdditionalTools, wire.ToolSearchOutput}
)

_UNREAD = frozenset({wire.UnreadItem})


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


_SAID_BESIDE = (wire.AdditionalTools, wire.ConfigurationUpdate, wire.McpApprovalResponse)
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
    """Return the paths of the items that the client says now, by id, in a list of the body under ``name``."""
    since = said_from(given)
    return {item.id: f"{name}[{at}]" for at, item in enumerate(read[since:], since)}


def _is_said(item: params.InputItem) -> bool:
    return item.role != "assistant" if isinstance(item, wire.Message) else isinstance(item, _SAID_BESIDE)


def _ends_with_beginning(given: Sequence[params.InputItem]) -> bool:
    last = given[-1] if given else None
    return isinstance(last, wire.Message) and last.role == "assistant" and last.status == "incomplete"


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
            named = self._named(item, position, taken)
            taken.add(named.id)
            read.append(self._checked(named, path, position >= said) if type(named) in _CHECKED else named)
        if unread := dict.fromkeys(item.type for item in read if type(item) in _UNREAD):
            logger.info("Passed over items of tools that this server does not have: %s", ", ".join(unread))
        return read

    def _named(self, item: wire.Item, position: int, taken: Container[str]) -> wire.Item:
        if item.id and item.id not in taken:
            if not (isinstance(item, wire.LocalShellCall) and item.id == item.call_id):
                return item
        elif isinstance(item, wire.LocalShellCallOutput):
            raise _duplicate(item.id, f"{self.name}[{position}].call_id")
        return replace(item, id=item.new_id(f"{self.suffix}i{position:04x}"))

    def _referenced(self, reference: params.ItemReference, path: str) -> wire.Item:
        if (item := self.referenced.get(reference.id)) is None:
            raise InvalidRequest(f"Item with id {shortened(reference.id)!r} not found.", param=f"{path}.id")
        if isinstance(item, wire.AdditionalTools | wire.ToolSearchOutput):
            self.toolset.add_stored(item, path)
        return item

    def _checked(self, item: wire.Item, path: str, is_said: bool) -> wire.Item:
        match item:
            case wire.Message(content=parts):
                return self._with_parts(item, "content", parts, path, is_said)
            case wire.FunctionCallOutput(output=tuple(parts)) | wire.CustomToolCallOutput(output=tuple(parts)):
                return self._with_parts(item, "output", parts, path, is_said=False)
            case wire.ComputerCallOutput(output=params.NoScreenshot(field=field)):
                raise _no_screenshot(field, f"{path}.output")
            case wire.ConfigurationUpdate(reasoning=msgspec.UNSET, text=msgspec.UNSET):
                message = "An update of the configuration needs a reasoning or a text."
                raise InvalidRequest(message, param=path, code="missing_required_parameter")
            case wire.AdditionalTools(tools=tools) | wire.ToolSearchOutput(tools=tools):
                plain = replace(item, tools=tuple(map(dict, tools)))
                self.toolset.add_items([tool.param for tool in tools if isinstance(tool, SentTool)], plain, path)
                return plain
            case _:
                return item

    def _with_parts(
        self, item: AnyItem, field: str, parts: Sequence[wire.MessagePart], path: str, is_said: bool
    ) -> AnyItem:
        """Return an item whose parts have been checked; most have only texts."""
        if _TEXTS.issuperset(map(type, parts)):
            return item
        placed = [(part, f"{path}.{field}[{position}]") for position, part in enumerate(parts)]
        is_written = isinstance(item, wire.Message) and item.role == "assistant"
        return replace(item, **{field: tuple(self._part(part, at, is_said, is_written) for part, at in placed)})

    def _part(self, part: wire.MessagePart, path: str, is_said: bool, is_written: bool) -> wire.MessagePart:
        match part:
            case wire.InputImage() | wire.InputFile() if is_written:
                kind = "images" if isinstance(part, wire.InputImage) else "files"
                raise InvalidRequest(f"A message of the assistant cannot have {kind}.", param=path)
            case params.Unheard() if is_said:
                raise UnsupportedParameter(UNHEARD, param=path)
            case params.Unheard(text=text):
                return wire.InputText(text)
            case wire.InputImage() if is_said and not self.sees_images:
                raise InvalidRequest("This model reads text only, no input_image.", param=path)
            case wire.InputImage():
                _check_image(part, path, is_said)
            case wire.InputFile():
                _check_file(part, path)
            case _:
                pass
        return part


def id_prefix(item: params.InputItem) -> str:
    """Return how OpenAI's ids of such items begin; those of outputs may also begin as those of their calls."""
    # a trigger becomes no item; the id of the others is that of its call, or of another server
    if isinstance(item, params.ItemReference | params.CompactionTriggerItem | wire.LocalShellCallOutput):
        return ""
    return "" if type(item) in _UNREAD else item.id_prefix.removesuffix("o")


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


def _check_image(image: wire.InputImage, path: str, is_said: bool) -> None:
    param, has_url = f"{path}.image_url", image.image_url is not UNSET
    if has_url == (image.file_id is not UNSET):
        raise _not_one_source(f"{path}.file_id" if has_url else param, param)
    if is_said and has_url and (problem := _problem_of(image.url)):
        raise InvalidRequest(f"This image cannot be read. {problem}", param=param)


def _not_one_source(param: str, path: str) -> InvalidRequest:
    return InvalidRequest(f"An image has either an image_url or a file_id (at {path})", param=param)


def _no_screenshot(field: str, path: str) -> InvalidRequest:
    param = f"{path}.{field}"
    if field == "image_url":
        return _not_one_source(param, param)
    return InvalidRequest("Send the image_url of a screenshot: it cannot be a stored file.", param=param)


def _check_file(file: wire.InputFile, path: str) -> None:
    if sum(source is not UNSET for source in (file.file_data, file.file_url, file.file_id)) != 1:
        param = path if file.file_id is UNSET else f"{path}.file_id"
        raise InvalidRequest("A file has one of file_data, file_url and file_id.", param=param)
    if isinstance(url := file.file_url, str) and not url.lower().startswith(("http://", "https://")):
        message = f"A file_url begins with https:// or http://, and {shortened(url)!r} does not."
        raise InvalidRequest(message, param=f"{path}.file_url")


def _duplicate(item_id: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"Duplicate item found with id {shortened(item_id)!r}.", param=param)

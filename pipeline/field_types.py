"""The types of a frame's fields, checked against its class: msgspec checks them only when it decodes a frame."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.protocol.events import DELTAS, ItemEvent, OutputTextDelta, ReasoningTextDelta
from penstock.pipeline.secret import unwritten

_IN_A_CALL = frozenset(kind for kind in DELTAS if kind.__struct_fields__ == (*ItemEvent.__struct_fields__, "delta"))

_SHORT = frozenset({ItemDelta, TokenChunk, *DELTAS})

_PLAIN = frozenset({bool, float, int, type(None), UnsetType})

_encode = msgspec.json.Encoder(enc_hook=unwritten).encode

MOST_PARTS = 512
"""Values of a frame that may be checked in the event loop."""

CHARACTERS = 1024
"""Characters of a text that count as one value."""


class WrongType(TypeError):
    """A frame, or a field of it, has a value of a wrong type."""


def is_large(frame: Any) -> bool:
    """Return True if checking ``frame`` takes long; this counts its values, and stops at `MOST_PARTS`."""
    if type(frame) in _SHORT and not _has_scores(frame):
        return False
    count, waiting = 1, [frame]
    while waiting and count <= MOST_PARTS:
        value = waiting.pop()
        kind = type(value)
        if kind in _PLAIN:
            continue
        parts: Any = ()
        if kind is str:
            count += len(value) // CHARACTERS
        elif isinstance(value, list | tuple):
            parts = value
        elif isinstance(value, Struct):
            parts = [getattr(value, name) for name in value.__struct_fields__]
        elif isinstance(value, dict):
            parts = value.values()
        elif isinstance(value, BaseModel):
            parts = [*vars(value).values(), value.model_extra]
        count += len(parts)
        if count <= MOST_PARTS:
            waiting.extend(parts)
    return count > MOST_PARTS


def _has_scores(frame: Any) -> bool:
    return type(frame) is TokenChunk and bool(frame.prompt_logprobs)


def check_fields(frame: Any) -> None:
    """Raise `WrongType` if a field of ``frame``, or of a struct inside it, has a wrong type, or cannot be JSON."""
    kind = type(frame)
    if kind is ItemDelta:  # hot path: see `penstock.pipeline.core`
        if type(frame.text) is str and frame.text.isascii() and frame.logprobs == ():
            return
    elif kind is TokenChunk:
        if (
            frame.logprobs == ()
            and frame.prompt_logprobs == ()
            and frame.cached_tokens == 0
            and frame.prompt_tokens is None
            and _are_ints(frame.token_ids)
        ):
            return
    elif kind in DELTAS and _is_plain(frame):
        return
    try:
        if isinstance(frame, Struct):
            _check_struct(frame, kind.__name__)
            _encode(frame)
        elif isinstance(frame, BaseModel):
            frame.model_dump(warnings="error")
    except (TypeError, ValueError, NotImplementedError, PydanticSerializationError) as error:
        raise error if isinstance(error, WrongType) else WrongType(f"{kind.__name__}: {error}") from None


def _are_ints(tokens: Any) -> bool:
    if type(tokens) is not tuple:
        return False
    for token in tokens:  # noqa: SIM110 - `all` with a generator takes three times as long for one token
        if type(token) is not int:
            return False
    return True


def _is_plain(delta: Any) -> bool:
    """Return True for the usual delta; the others are checked field by field."""
    if type(delta.delta) is not str or not delta.delta.isascii() or type(delta.item_id) is not str:
        return False
    if type(delta.sequence_number) is not int or type(delta.output_index) is not int:
        return False
    kind = type(delta)
    if kind is OutputTextDelta:
        return type(delta.content_index) is int and delta.logprobs == ()
    return kind in _IN_A_CALL or (kind is ReasoningTextDelta and type(delta.content_index) is int)


def _check_struct(struct: Struct, path: str) -> None:
    names = zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True)
    fields = {encoded: value for encoded, name in names if (value := getattr(struct, name)) is not UNSET}
    config = struct.__struct_config__
    tagged = {config.tag_field: config.tag} if config.tag_field else {}
    try:
        msgspec.convert({**fields, **tagged}, type(struct))
    except msgspec.ValidationError as error:
        problem, _, location = str(error).partition(" - at `$")
        raise WrongType(f"{path}{location.removesuffix('`')}: {problem[0].lower()}{problem[1:]}") from None
    for name, value in fields.items():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, Struct):
                _check_struct(part, f"{path}.{name}")

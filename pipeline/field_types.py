"""The types of a frame's fields, checked against its class: msgspec checks them only when it decodes a frame."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.events import DELTAS


def check_fields(frame: Any) -> None:
    """Raise `InvariantBroken` if a field of ``frame``, or of a struct inside it, has a value of a wrong type."""
    kind = type(frame)
    if kind is ItemDelta:  # hot path: see `penstock.pipeline.core`
        if type(frame.text) is str and frame.text.isascii() and frame.logprobs == ():
            return
    elif kind is TokenChunk:
        if frame.logprobs == () and all(type(token) is int for token in frame.token_ids):
            return
    elif kind in DELTAS and type(frame.delta) is str and frame.delta.isascii() and not getattr(frame, "logprobs", ()):
        return
    if isinstance(frame, Struct):
        _check_struct(frame, kind.__name__)
    elif isinstance(frame, BaseModel):
        try:
            frame.model_dump(warnings="error")
        except PydanticSerializationError as error:
            raise InvariantBroken(f"a field of {kind.__name__} has a wrong type: {error}") from None


def _check_struct(struct: Struct, path: str) -> None:
    names = zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True)
    fields = {encoded: value for encoded, name in names if (value := getattr(struct, name)) is not UNSET}
    config = struct.__struct_config__
    tagged = {config.tag_field: config.tag} if config.tag_field else {}
    try:
        msgspec.convert({**fields, **tagged}, type(struct))
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        raise InvariantBroken(f"{path}{place.removesuffix('`')} has a wrong type: {problem.lower()}") from None
    for name, value in fields.items():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, Struct):
                _check_struct(part, f"{path}.{name}")
            elif isinstance(part, str) and not part.isascii():
                _check_text(part, f"{path}.{name}")


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvariantBroken(f"{path} has half of a surrogate pair, which is no text") from None

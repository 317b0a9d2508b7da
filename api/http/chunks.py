"""Chunks: the events of OpenAI's older APIs, most of which differ from the one before in a text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.http.bodies import ErrorBody, Problem
from penstock.api.http.conventions import RequestError
from penstock.api.http.padding import padded
from penstock.api.http.wire import server_sent
from penstock.pipeline.errors import StageError
from penstock.pipeline.protocol.events import DONE


class Around(NamedTuple):
    """The bytes around the text of a chunk, and those after its token ids, if it has any."""

    text: tuple[bytes, ...]
    ids: bytes = b""


class TextChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk that has a text, maybe the ids of its tokens, and nothing else of its own: nearly every one."""

    around: Around
    text: str
    token_ids: Sequence[int] | UnsetType


class Broken(msgspec.Struct, frozen=True):
    """The last chunk of an answer that failed."""

    error: Problem

    @classmethod
    def by(cls, error: StageError) -> Broken:
        """Return the last chunk of an answer that failed with an error."""
        return cls(Problem(error.message, error.type, error.param, error.code))


TEXT = "\0text\0"
"""The text of a chunk that `around` takes apart."""

IDS = (-1,)
"""The token ids of a chunk that `around` takes apart."""

_HEAD = b"data: "
_END = b"\n\n"
_encoder = msgspec.json.Encoder()
_json, _encode_into = _encoder.encode, _encoder.encode_into
_encoded = bytearray(_HEAD)
"""A buffer that all chunks share after its head, because a new one for each takes noticeable time."""


def encode(chunk: Any) -> bytes:
    """Encode a chunk as a whole server-sent event.  Not thread-safe."""
    if isinstance(chunk, TextChunk):
        text = _json(chunk.text).join(chunk.around.text)
        return text if chunk.token_ids is UNSET else text + _json(chunk.token_ids) + chunk.around.ids
    _encode_into(chunk, _encoded, len(_HEAD))
    _encoded.extend(_END)
    return bytes(_encoded)


def obfuscated(chunk: Any) -> bytes:
    """Encode a chunk as `encode` does, with random padding beside a text to hide its length in network packets."""
    frame = encode(chunk)
    if isinstance(chunk, Broken) or getattr(chunk, "choices", None) == ():
        return frame
    return padded(frame[: -len(_END)], len(frame)) + _END


def around(chunk: Any) -> Around:
    """Return what stands around the text of a chunk, which is `TEXT`, and its token ids, if they are `IDS`."""
    *pieces, last = encode(chunk).split(_json(TEXT))
    before, _, after = last.partition(_json(IDS))
    return Around((*pieces, before), after)


def fault(error: RequestError) -> bytes:
    """Return the last frames of a stream that breaks off."""
    return server_sent(ErrorBody(error.problem)) + DONE

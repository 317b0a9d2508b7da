"""Rows: conversion of stored values to database columns and back.

JSON is stored as text, without secrets.  Text from a client may contain a lone surrogate, which no database accepts.
Such JSON is written in ASCII, with escapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.frames import Origin, TokenIds
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.secret import unread, unwritten
from penstock.pipeline.tasks import LARGE_BYTES, MANY_VALUES, apart
from penstock.services.store.database import Row, Value, size_of
from penstock.services.store.stored import StoredResponse

T = TypeVar("T")

RESPONSE_COLUMNS = "response, input, owner, position, tokens, results, writer, line"
"""The columns of a row for `stored_response`."""

_LONGEST_ID = 512
"""Maximum length in bytes of an id that can be looked up; no server creates longer ids."""

_encoder = msgspec.json.Encoder(enc_hook=unwritten)
_decode_response = msgspec.json.Decoder(Response)
_decode_input = msgspec.json.Decoder(tuple[Item, ...])
_decode_item: msgspec.json.Decoder[Item] = msgspec.json.Decoder(Item)
_decode_tokens: msgspec.msgpack.Decoder[Mapping[str, TokenIds]] = msgspec.msgpack.Decoder(dict[str, TokenIds])
_decode_token_ids = msgspec.msgpack.Decoder(TokenIds)
_decode_results: msgspec.json.Decoder[Mapping[str, str]] = msgspec.json.Decoder(dict[str, str])
_decode_result = msgspec.json.Decoder(str)
_pack = msgspec.msgpack.Encoder().encode


def to_json(value: object) -> str:
    """Encode a value as JSON."""
    try:
        return _encoder.encode(value).decode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(msgspec.to_builtins(value, enc_hook=unwritten))


def from_json(text: str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a value from JSON; raises `StoreFailed` if it does not fit the decoder's type."""
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError:  # perhaps only an escaped lone surrogate, which `json` accepts
        try:
            return msgspec.convert(json.loads(text), decoder.type, dec_hook=unread)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise StoreFailed("The stored data cannot be decoded.") from exc


async def decoded(read: Sequence[Row], decode: Callable[[Row], T]) -> list[T]:
    """Decode rows, apart from the event loop if they are many or large."""
    is_long = len(read) > MANY_VALUES or sum(map(size_of, read)) > LARGE_BYTES
    return await apart(is_long, lambda: [decode(row) for row in read])


def stored_response(row: Row) -> StoredResponse:
    """Decode the response of a row of `RESPONSE_COLUMNS`."""
    response, input_text, owner, position, tokens, results, writer, line = row
    return StoredResponse(
        from_json(response, _decode_response),
        input=from_json(input_text, _decode_input),
        origin=Origin(owner, position, line=line or ""),
        tokens=_unpacked(tokens, _decode_tokens),
        results=results_in(results),
        writer=writer or "",
    )


def item(text: str) -> Item:
    """Decode an item."""
    return from_json(text, _decode_item)


def tokens_column(tokens: Mapping[str, TokenIds]) -> bytes:
    """Encode the token ids of a response's items."""
    return _pack(tokens)


def token_ids_column(token_ids: TokenIds | None) -> bytes | None:
    """Encode the token ids of one item; None if there are none."""
    return _pack(token_ids) if token_ids else None


def token_ids(column: bytes | None) -> TokenIds:
    """Decode the token ids of one item; empty if there are none."""
    return _unpacked(column, _decode_token_ids) if column else ()


def results_column(results: Mapping[str, str]) -> str | None:
    """Encode the results of a response's tool calls; None if there are none."""
    return to_json(results) if results else None


def results_in(column: str | None) -> Mapping[str, str]:
    """Decode the results of a response's tool calls; empty if there are none."""
    return from_json(column, _decode_results) if column else {}


def result_column(result: str | None) -> str | None:
    """Encode the result of one tool call; None if there is none."""
    return None if result is None else to_json(result)


def result(column: str) -> str:
    """Decode the result of one tool call."""
    return from_json(column, _decode_result)


def octets(*columns: Value) -> int:
    """Return how many bytes some columns take."""
    texts = (column.encode() if isinstance(column, str) else column for column in columns)
    return sum(len(text) for text in texts if isinstance(text, bytes))


def can_exist(name: str) -> bool:
    """True if an object with this id may be stored; clients may send ids that no database accepts."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 0 < length <= _LONGEST_ID and "\0" not in name


def model_column(name: str) -> str:
    """Encode the name of a model, which is any text if an alias is a pattern."""
    return name.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def writer_column(stored: StoredResponse) -> str | None:
    """Encode the model that generated the tokens of a response; None if it is unknown."""
    return model_column(stored.writer) if stored.writer else None


def known_ids(items: Iterable[Any]) -> list[str]:
    """Return the ids of items that `can_exist`, without duplicates."""
    return possible(each.id for each in items)


def possible(ids: Iterable[str]) -> list[str]:
    """Return the ids that `can_exist`, without duplicates."""
    return [name for name in dict.fromkeys(ids) if can_exist(name)]


def _unpacked(column: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(column)
    except msgspec.MsgspecError as exc:
        raise StoreFailed("The stored data cannot be decoded.") from exc

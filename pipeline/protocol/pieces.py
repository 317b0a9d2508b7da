"""Values whose long lists and objects are written as JSON beforehand, in pieces, between which other threads compute.

Ten thousand tokens with twenty alternatives each are eleven megabytes of JSON, and the encoder holds the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.pipeline.protocol.response import Response

MANY_ELEMENTS = 100
"""Elements of a long list or object."""

NUMBERS_AT_ONCE = 4_096
"""Numbers of a list that are written at once, in a fraction of a millisecond."""

_encode = msgspec.json.Encoder().encode

Value = TypeVar("Value")


def in_pieces(value: Value) -> Value:
    """Return a value whose long lists and objects are JSON; a value without one is returned as it is."""
    written: Value = _written(value)
    return written


def numbers_in_json(numbers: Sequence[float]) -> msgspec.Raw:
    """Return a list of numbers as JSON."""
    runs = (numbers[start : start + NUMBERS_AT_ONCE] for start in range(0, len(numbers), NUMBERS_AT_ONCE))
    return _joined(runs)


def is_long(response: Response) -> bool:
    """Return True for a response with a long list in its output."""
    return len(response.output) > MANY_ELEMENTS or any(map(_has_long, response.output))


def _has_long(item: Any) -> bool:
    parts = getattr(item, "content", None) or ()
    return len(parts) > MANY_ELEMENTS or any(len(getattr(part, "logprobs", ())) > MANY_ELEMENTS for part in parts)


def _written(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return _written_list(value)
    if isinstance(value, dict):
        return _written_object(value)
    if not isinstance(value, msgspec.Struct):
        return value
    changed = {}
    for name in value.__struct_fields__:
        before = getattr(value, name)
        after = _written(before)
        if after is not before:
            changed[name] = after
    return replace(value, **changed) if changed else value


def _written_list(values: Sequence[Any]) -> Any:
    if len(values) > MANY_ELEMENTS:
        runs = (values[start : start + MANY_ELEMENTS] for start in range(0, len(values), MANY_ELEMENTS))
        if isinstance(values[0], dict):  # a tool may be long, too, and a token is not
            runs = (_written_list(run) for run in runs)
        return _joined(runs)
    written = [_written(value) for value in values]
    is_changed = any(after is not before for before, after in zip(values, written, strict=True))
    return tuple(written) if is_changed else values


def _joined(runs: Iterable[Any]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(_encode(run)[1:-1] for run in runs))


def _written_object(values: Mapping[Any, Any]) -> Any:
    if len(values) > MANY_ELEMENTS:
        entries = iter(values.items())
        pieces = (
            _encode(_written_object(dict(few)))[1:-1] for few in iter(lambda: [*islice(entries, MANY_ELEMENTS)], [])
        )
        return msgspec.Raw(b"{%b}" % b",".join(pieces))
    written = {name: _written(value) for name, value in values.items()}
    is_changed = any(written[name] is not value for name, value in values.items())
    return written if is_changed else values

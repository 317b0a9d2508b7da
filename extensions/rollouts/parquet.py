"""Rows as a file of Parquet, written in groups of bounded size.

Importing this module needs pyarrow, which the extra ``rollouts`` brings.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import UnionType
from typing import IO, Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

GROUP: Final = 250_000
"""Numbers of lists after which a group of rows ends: about 2 MB, as a reader has them in memory."""

_NUMBERS: Final = {int: pa.int32(), float: pa.float64()}
"""The types of numbers in lists: token ids, masks and log probabilities."""

_PLAIN: Final = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


@contextmanager
def parquet_rows(file: IO[bytes], row: type[msgspec.Struct]) -> Iterator[_Groups]:
    """Write rows of one class into a file for the length of a block."""
    schema = pa.schema([_field(name, each) for name, each in get_type_hints(row).items()])
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False) as writer:
        groups = _Groups(writer, schema)
        yield groups
        groups.end()


class _Groups:
    """Rows that become groups of a file."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self._writer = writer
        self._schema = schema
        self._rows = list[msgspec.Struct]()
        self._numbers = 0

    def write(self, row: msgspec.Struct) -> None:
        """Add a row."""
        self._rows.append(row)
        self._numbers += sum(len(each) for each in msgspec.structs.astuple(row) if isinstance(each, array))
        if self._numbers >= GROUP:
            self.end()

    def end(self) -> None:
        """Write the rows since the last group as one."""
        if self._rows:
            columns = [_column([getattr(row, field.name) for row in self._rows], field.type) for field in self._schema]
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
            self._rows, self._numbers = [], 0


def _column(values: Sequence[Any], of: Any) -> Any:
    if not (pa.types.is_list(of) and of.value_type in _NUMBERS.values()):
        return pa.array([_plain(value) for value in values], of)
    lists = [value or () for value in values]
    ends = pa.array([0, *accumulate(map(len, lists))], pa.int32())
    numbers = pa.concat_arrays([pa.array((), of.value_type), *map(_numbers, lists, [of.value_type] * len(lists))])
    is_none = pa.array([value is None for value in values]) if None in values else None
    return pa.ListArray.from_arrays(ends, numbers, mask=is_none)


def _numbers(values: Sequence[float], of: Any) -> Any:
    """Return the numbers of an array, whose bytes are read as they are."""
    if not isinstance(values, array):
        return pa.array(values, of)
    kind = "float" if values.typecode in "fd" else "int" if values.typecode.islower() else "uint"
    read_as = pa.type_for_alias(f"{kind}{8 * values.itemsize}")
    return pa.Array.from_buffers(read_as, len(values), [None, pa.py_buffer(values)]).cast(of)


def _field(name: str, annotation: Any) -> Any:
    options = [each for each in get_args(annotation) if each is not type(None)]
    is_optional = get_origin(annotation) in (UnionType, Union) and len(options) < len(get_args(annotation))
    return pa.field(name, _type(options[0] if is_optional else annotation), nullable=is_optional)


def _type(annotation: Any) -> Any:
    """Return the type of a column by the annotation of its field; what has names of its own is text, as JSON."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return pa.struct([_field(name, each) for name, each in get_type_hints(annotation).items()])
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Sequence, tuple):
        of = _NUMBERS.get(inner[0]) or _type(inner[0])
        return pa.list_(pa.field("element", of, nullable=False))
    return pa.string()


def _plain(value: Any) -> Any:
    """Return a value for pyarrow, with all fields of its structs."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value

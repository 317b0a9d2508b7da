"""Writing: rows as lines of JSON or as Parquet, in a file that is whole or not there."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Final, TypeAlias

import msgspec

from penstock.extensions.rollouts.forms import FORMS
from penstock.pipeline.errors import CannotRun

STANDARD: Final = "-"
"""The name of standard output."""

Write: TypeAlias = Callable[[msgspec.Struct], None]
"""A function that writes a row."""


def check_out(out: str) -> None:
    """Raise `CannotRun` if no rows can be written to ``out``."""
    if out != STANDARD and Path(out).suffix not in (".jsonl", ".parquet"):
        raise CannotRun(f"-o {out}: its end says what is written: name a file .jsonl or .parquet, or - for stdout")
    if Path(out).suffix == ".parquet":
        _parquet_rows()
    if not Path(out).absolute().parent.is_dir():
        raise CannotRun(f"-o {out}: there is no such folder")


@contextmanager
def written(out: str, form: str) -> Iterator[Write]:
    """Yield what writes rows of a form for the length of a block; only the owner of a file can read it.

    The file replaces another one when the block has ended, and not if it raises.
    """
    if out == STANDARD:
        sys.stdout.flush()
        yield _lines(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    path = Path(out).absolute()
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            with _rows(file, path, form) as write:
                yield write
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink()
            raise


@contextmanager
def _rows(file: IO[bytes], path: Path, form: str) -> Iterator[Write]:
    if path.suffix == ".parquet":
        with _parquet_rows()(file, FORMS[form].row) as groups:
            yield groups.write
    else:
        yield _lines(file)


def _lines(file: IO[bytes]) -> Write:
    return lambda row: file.writelines((line(row), b"\n"))


def line(row: msgspec.Struct) -> bytes:
    """Return a row as JSON on one line; what is no number is null."""
    return _encode(row)


def _parquet_rows() -> Any:
    """Return `parquet_rows`; raise `CannotRun` without pyarrow."""
    if find_spec("pyarrow") is None:
        raise CannotRun("Parquet needs pyarrow: pip install 'penstock-llm[rollouts]'; .jsonl needs nothing")
    from penstock.extensions.rollouts.parquet import parquet_rows  # noqa: PLC0415 - pyarrow comes with an extra

    return parquet_rows


def _numbers(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(f"no row has a {type(value).__name__}")


_encode: Final = msgspec.json.Encoder(enc_hook=_numbers).encode

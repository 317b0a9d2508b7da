"""Filters of a search, as conditions on the attributes of a file, and the columns of an attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.services.store import rows
from penstock.services.store.database import Value

_SIGNS = {"eq": "=", "in": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}

_OPPOSITES = {"ne": "eq", "nin": "in"}

_COLUMNS = ("words", "number", "flag")


def condition(given: Mapping[str, Any], arguments: list[Value]) -> str:
    """Return the condition of a filter on a row of ``vector_store_files``; its values are added to ``arguments``.

    A value is compared with values of its own type alone, and texts by their bytes.
    """
    kind = given["type"]
    if kind in ("and", "or"):
        return f"({f' {kind} '.join(condition(inner, arguments) for inner in given['filters'])})"
    if kind in _OPPOSITES:
        return f"not {condition({**given, 'type': _OPPOSITES[kind]}, arguments)}"
    name = _place(rows.to_json(given["key"]), arguments)
    values = given["value"] if kind == "in" else [given["value"]]
    compared = " or ".join(_compared(value, _SIGNS[kind], arguments) for value in values)
    return f"""exists (
        select 1 from vector_store_attributes as held
        where held.file = vector_store_files.number and held.name = {name} and ({compared})
    )"""


def _compared(value: str | float | bool, sign: str, arguments: list[Value]) -> str:
    column, given = next(
        (column, given) for column, given in zip(_COLUMNS, columns_of(value), strict=True) if given is not None
    )
    return f"held.{column} {sign} {_place(given, arguments)}"


def columns_of(value: str | float | bool) -> tuple[bytes | None, float | None, int | None]:
    """Return an attribute as its columns; a text is bytes, which all databases compare in the same order."""
    if isinstance(value, bool):
        return None, None, int(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass"), None, None
    return None, float(value), None


def _place(value: Value, arguments: list[Value]) -> str:
    arguments.append(value)
    return f"${len(arguments)}"

"""`check_database`: penstock's own databases keep all rules, and each broken rule is found and named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.services.store.database import (
    NOW,
    DatabaseRefused,
    DatabaseUnavailable,
    Row,
    Unit,
    Value,
    is_search,
)
from penstock.services.store.sqlite import SqliteDatabase
from penstock.testing import BrokenRule, check_database
from tests.support.stores import database_at


async def test_databases_keep_all_rules(store_at: str) -> None:
    await check_database(database_at(store_at))
    await check_database(database_at(store_at))


class Deaf(SqliteDatabase):
    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        raise DatabaseUnavailable("It is away.")


class Trimming(SqliteDatabase):
    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        rows = await super().read(sql, *arguments)
        return [[value[:1000] if isinstance(value, bytes) else value for value in row] for row in rows]


class Rounding(SqliteDatabase):
    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        rows = await super().read(sql, *arguments)
        return [[round(value) if isinstance(value, float) else value for value in row] for row in rows]


class Late(SqliteDatabase):
    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        return await super().read(sql.replace(NOW, f"({NOW} - 7200.0)"), *arguments)


class Foreign(SqliteDatabase):
    """Raises errors of its own."""

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        try:
            return await super().read(sql, *arguments)
        except (DatabaseRefused, DatabaseUnavailable) as error:
            raise LookupError("no such table") from error


class Miscounting(SqliteDatabase):
    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        await super().write(units)
        return [(1,) for _ in units]


class Forgetful(SqliteDatabase):
    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts: list[tuple[int, ...]] = []
        for unit in units:
            counts += await super().write([unit])
        return counts


class Lenient(SqliteDatabase):
    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        try:
            return await super().write(units)
        except DatabaseRefused:
            return [(0,) for _ in units]


class OneAtATime(SqliteDatabase):
    is_busy = False

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        if self.is_busy:
            raise DatabaseUnavailable("It is busy.")
        self.is_busy = True
        try:
            return await super().read(sql, *arguments)
        finally:
            self.is_busy = False


class Unmeasured(SqliteDatabase):
    async def size(self) -> int:
        return -1


class Searchless(SqliteDatabase):
    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        rows = await super().read(sql, *arguments)
        return [(None if "string_agg" in sql else 0,)] if is_search(sql) else rows


class Remembering(SqliteDatabase):
    """Answers a search again as the first time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.found: dict[tuple[Value, ...], Sequence[Row]] = {}

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        if not is_search(sql):
            return await super().read(sql, *arguments)
        if (sql, *arguments) not in self.found:
            self.found[sql, *arguments] = await super().read(sql, *arguments)
        return self.found[sql, *arguments]


class ClosedOnce(SqliteDatabase):
    is_closed = False

    async def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed twice")
        self.is_closed = True
        await super().close()


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Deaf, "open: it raised DatabaseUnavailable: It is away."),
        (Trimming, "values: what was written is read unchanged"),
        (Rounding, "values: arguments and expressions have the values of their types"),
        (Late, "values: the clock is that of this time"),
        (Foreign, "errors: it raised LookupError: no such table"),
        (Miscounting, "counts: write returns the numbers of rows"),
        (Forgetful, "transactions: units are executed together or not at all"),
        (Lenient, "transactions: a row that breaks a rule of its table raises DatabaseRefused"),
        (OneAtATime, "concurrency: it raised DatabaseUnavailable: It is busy."),
        (Unmeasured, "concurrency: size is the size on disk in bytes"),
        (Searchless, "search: a search finds the chunks with a whole term"),
        (Remembering, "search: a search finds no deleted chunk"),
        (ClosedOnce, "close: it raised RuntimeError: closed twice"),
    ],
)
async def test_broken_rule_is_named(tmp_path: Path, kind: type[SqliteDatabase], broken: str) -> None:
    with pytest.raises(BrokenRule) as wrong:
        await check_database(kind(tmp_path / "file"))
    assert str(wrong.value).startswith(broken)
    assert wrong.value.rule == broken.partition(":")[0]


async def test_missing_members_are_named() -> None:
    nothing: Any = object()
    with pytest.raises(BrokenRule, match="members: the method open of object is missing: write it as `async def open"):
        await check_database(nothing)

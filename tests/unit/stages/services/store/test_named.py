"""The database that ``--store`` names, and the rules of databases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.plugins import WrongPlugin
from penstock.stages.services.store.database import DatabaseUnavailable, Row, Unit, Value
from penstock.stages.services.store.named import named_database
from penstock.stages.services.store.postgres import PostgresDatabase
from penstock.stages.services.store.sqlite import SqliteDatabase
from penstock.testing import BrokenRule, check_database
from tests.support.stores import database_at

OWN = """
from penstock.stages.services.store.sqlite import SqliteDatabase

def store():
    return SqliteDatabase("rows")

class Store(SqliteDatabase):
    def __init__(self, url):
        super().__init__(url.partition("://")[2])

def needs(more):
    return store()

def fails():
    return 1 / 0

def nothing():
    return None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_store.py").write_text(OWN)
    info = tmp_path / "own_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.stores]\nrows = own_store:Store\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_file_url_or_function_names_a_database(here: Path) -> None:
    assert type(named_database("responses.sqlite3")) is SqliteDatabase
    assert type(named_database("postgresql://host/db")) is PostgresDatabase
    assert type(named_database("own_store.py:store")) is SqliteDatabase
    assert type(named_database("own_store:store")) is SqliteDatabase
    assert type(named_database("rows://file")).__name__ == "Store"
    assert {path.name for path in here.iterdir()} <= {"own_store.py", "own_store-1.0.dist-info", "__pycache__"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_store.py", "name its function, too: own_store.py:store or own_store.py:needs"),
        ("own_store.py:storage", "own_store.py has no function storage"),
        ("absent.py:store", "there is no file absent.py"),
        ("absent:store", "there is no module absent"),
        ("own_store.py:needs", "it takes no arguments"),
        ("own_store.py:fails", "it raised ZeroDivisionError: division by zero"),
        ("own_store.py:nothing", "the method open of NoneType is missing"),
        ("mysql://host/db", "it is neither module:function nor an entry point of penstock.stores"),
    ],
)
def test_wrong_name_is_explained(here: Path, name: str, problem: str) -> None:
    with pytest.raises(WrongPlugin) as wrong:
        named_database(name)
    assert str(wrong.value).startswith("--store ")
    assert problem in str(wrong.value)
    assert not list(here.glob("*.sqlite3*"))


async def test_databases_keep_all_rules(store_at: str) -> None:
    await check_database(database_at(store_at))
    await check_database(database_at(store_at))


class Forgetful(SqliteDatabase):
    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts: list[tuple[int, ...]] = []
        for unit in units:
            counts += await super().write([unit])
        return counts


class Miscounting(SqliteDatabase):
    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        await super().write(units)
        return [(1,) for _ in units]


class Deaf(SqliteDatabase):
    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        raise DatabaseUnavailable("It is away.")


@pytest.mark.parametrize(("kind", "broken"), [(Forgetful, "transactions"), (Miscounting, "counts"), (Deaf, "open")])
async def test_broken_rule_is_named(tmp_path: Path, kind: type[SqliteDatabase], broken: str) -> None:
    with pytest.raises(BrokenRule) as wrong:
        await check_database(kind(tmp_path / "file"))
    assert wrong.value.rule == broken


async def test_missing_members_are_named() -> None:
    nothing: Any = object()
    with pytest.raises(BrokenRule, match="members: the method open of object is missing: write it as `async def open"):
        await check_database(nothing)

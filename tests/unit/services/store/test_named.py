"""The database that ``--store`` names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipeline.plugins import WrongPlugin
from penstock.services.store.named import named_database
from penstock.services.store.postgres import PostgresDatabase
from penstock.services.store.sqlite import SqliteDatabase
from tests.support.plugins import forget_modules

OWN = """
from penstock.services.store.sqlite import SqliteDatabase

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
    yield tmp_path
    forget_modules(tmp_path)


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

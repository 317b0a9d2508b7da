"""``penstock usage``, over the ledger in a store."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.accounts.command import main
from penstock.extensions.accounts.ledger import HOUR, Ledger
from penstock.pipeline.errors import CannotRun
from penstock.services.use import Use
from tests.support.stores import open_store

DAY = 24 * HOUR
NEW_YEAR = 1_767_225_600


class Halves:
    """A price of a half for each request of red."""

    currency = "EUR"

    def cost(self, use: Use) -> float | None:
        return 0.5 if use.team == "red" else None


@pytest.fixture
async def place(store_at: str) -> str:
    """Make a store with the uses of two keys, of which the older are sums by now."""
    async with open_store(store_at) as store:
        store.part(Ledger).prices = Halves()
        for number in range(6):
            mine: dict[str, Any] = {"key_name": "alice", "team": "red"} if number % 2 else {"key_name": "bob\n"}
            at = NEW_YEAR - DAY * (number // 2) if number < 4 else time.time()
            each = Use(id=f"{number}", model="m", api="chat", at=at, input_tokens=1000 * (number + 1), **mine)
            noted = store.used(each)
            assert noted is not None
            await noted
        store.part(Ledger).keep = time.time()
        await store.part(Ledger).sweep()
    return store_at


@pytest.fixture
def usage(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``penstock usage``, and return what it prints."""

    def run(*arguments: str) -> str:
        main(arguments)
        return capsys.readouterr().out

    return run


async def run_apart(usage: Callable[..., str], *arguments: str) -> str:
    return await asyncio.to_thread(usage, *arguments)


SINCE = ("--since", "2025-12-01", "--until", "2026-01-31")


async def test_table_has_a_line_for_each_group_and_one_for_all(place: str, usage: Callable[..., str]) -> None:
    printed = await run_apart(usage, "--store", place, *SINCE, "--by", "day,key")
    assert printed.splitlines() == [
        "day         key    requests   input  cached  output    cost",
        "2025-12-31  alice         1   4,000       0       0  0.5000",
        "2025-12-31  bob?          1   3,000       0       0       -",
        "2026-01-01  alice         1   2,000       0       0  0.5000",
        "2026-01-01  bob?          1   1,000       0       0       -",
        "all                       4  10,000       0       0  1.0000",
    ]


async def test_csv_and_json_have_all_columns(place: str, usage: Callable[..., str]) -> None:
    options = ("--store", place, *SINCE, "--by", "month,team,batch", "--key", "alice", "--key", "bob\n")
    rows = json.loads(await run_apart(usage, *options, "--json"))
    assert [(row["month"], row["team"], row["batch"], row["cost"]) for row in rows] == [
        ("2025-12", "", False, None),
        ("2025-12", "red", False, 0.5),
        ("2026-01", "", False, None),
        ("2026-01", "red", False, 0.5),
    ]
    assert [row["input_tokens"] for row in rows] == [3000, 4000, 1000, 2000]
    lines = list(csv.DictReader(io.StringIO(await run_apart(usage, *options, "--csv"))))
    assert [{name: str(value if value is not None else "") for name, value in row.items()} for row in rows] == lines


async def test_this_month_is_the_default(place: str, usage: Callable[..., str]) -> None:
    (row,) = json.loads(await run_apart(usage, "--store", place, "--by", "", "--json"))
    assert (row["requests"], row["input_tokens"]) == (2, 11_000)
    (row,) = json.loads(
        await run_apart(usage, "--store", place, "--by", "", "--json", "--since", "1h", "--team", "red")
    )
    assert (row["requests"], row["input_tokens"]) == (1, 6_000)


async def test_filters_leave_out_the_rest(place: str, usage: Callable[..., str]) -> None:
    for option, value in (("--team", "blue"), ("--key", "carol"), ("--model", "x"), ("--api", "messages")):
        printed = await run_apart(usage, "--store", place, *SINCE, option, value)
        assert printed == "Nothing was used in this time.\n"
        assert json.loads(await run_apart(usage, "--store", place, *SINCE, option, value, "--json")) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--by", "keys"), r"--by keys: there is no such group \(did you mean key\?\)"),
        (("--by", "day,month"), "--by day,month: give one of hour, day, month"),
        (("--since", "soon"), "expected a date"),
        (("--store", "none"), "--store none keeps no accounts"),
        (("--store", "missing.sqlite3"), "there is no such store"),
        (("--stroe", "x"), "--stroe: there is no such option"),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotRun, match=reason):
        main(arguments)


async def test_store_of_the_settings_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text('store = "here.sqlite3"\n')
    async with open_store("here.sqlite3"):
        assert await run_apart(usage) == "Nothing was used in this time.\n"

"""A store of one's own, from the command line to a response that another server reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.named import named_database
from penstock.testing import check_database
from tests.examples import a_store_of_your_own
from tests.support.server import HELLO, running_server, script

STORE = f"{Path(__file__).with_name('a_store_of_your_own.py')}:store"


async def test_responses_are_kept_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with running_server(ScriptedEngine(script=script(HELLO)), named_database(STORE)) as served:
        _, answer = await served.post({"input": "Hi"})
    async with running_server(ScriptedEngine(), named_database(STORE)) as served:
        assert (await served.get_response(answer["id"]))["output"] == answer["output"]
    assert tmp_path.joinpath("responses.sqlite3").exists()


async def test_it_keeps_all_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    await check_database(named_database(STORE))


async def test_slow_reads_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(a_store_of_your_own, "SLOW_SECONDS", -1.0)
    database = a_store_of_your_own.store()
    with caplog.at_level(logging.WARNING):
        await database.open()
        await database.read("select 1")
        await database.close()
    assert "for select 1" in caplog.text

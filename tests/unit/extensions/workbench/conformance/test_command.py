from __future__ import annotations

import asyncio
import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.extensions.workbench.conformance.checks import ALL
from penstock.extensions.workbench.conformance.command import SPEECHES, base_of, main
from penstock.extensions.workbench.conformance.run import chosen
from penstock.pipeline.errors import CannotRun
from tests.support.conforming_engine import ConformingEngine
from tests.support.faulty_server import Exchange, Fault, in_body, put, spoiled, with_status
from tests.support.server import running_server

KEY = "sk-0123456789abcdef"


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with running_server(ConformingEngine(), tmp_path, max_body_bytes=10_000_000) as server:
        yield server.url


def without_messages(answer: Exchange) -> None:
    if "/messages" in answer.path:
        answer.status, answer.body = 404, b"Not Found"


def without_decisions(answer: Exchange) -> None:
    """Refuse right requests alone, as a server does whose model makes no decisions."""
    if "/decisions" in answer.path and answer.status == 200:
        answer.status, answer.body = 501, b'{"error": {"message": "The model does not decide", "type": "server_error"}}'


async def run(*arguments: str, columns: int = 80) -> tuple[int | None, str, str]:
    """Run the command; return its status and what it wrote."""
    environment = os.environ | {"COLUMNS": str(columns), "PENSTOCK_KEY": KEY}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.api.cli", "conformance", *arguments),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.io
@pytest.mark.slow
async def test_reports_of_a_server_that_passes(url: str, tmp_path: Path) -> None:
    files = [tmp_path / "report.xml", tmp_path / "badge.svg"]
    status, out, err = await run(
        f"{url}/v1", "--dialect", "chat", "--only", "objects", "--junit", str(files[0]), "--badge", str(files[1])
    )
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "7 pass, 0 warn, 0 skip, 0 fail"
    assert len(ET.fromstring(files[0].read_text()).findall(".//testcase")) == 7
    assert "Chat Completions: 7 of 7" in files[1].read_text()


@pytest.mark.io
@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 140])
async def test_a_failure_is_shown_in_the_width_of_the_terminal(url: str, columns: int) -> None:
    async with spoiled(url, in_body(put(object="thing", key=KEY))) as broken:
        status, out, err = await run(broken, "--only", "chat.object", columns=columns)
    assert (status, err) == (1, "")
    assert "thing" in out.replace("\n", "").replace(" ", "")
    assert max(map(len, out.splitlines())) <= columns
    assert KEY not in out


@pytest.mark.io
@pytest.mark.slow
@pytest.mark.parametrize("fault", [without_messages, without_decisions])
async def test_json_has_all_checks_and_skips_a_dialect_that_is_missing(url: str, fault: Fault) -> None:
    async with spoiled(url, fault) as lacking:
        status, out, _ = await run(f"{lacking}/v1", "--json", "--only", "object")
    report = json.loads(out)
    assert status == 0
    assert report["counts"] == {"pass": 3, "warn": 0, "skip": 1, "fail": 0}
    assert [check["name"] for check in report["checks"]] == [f"{speech}.object" for speech in SPEECHES]


@pytest.mark.io
@pytest.mark.slow
async def test_a_server_that_cannot_be_reached_is_status_2() -> None:
    status, out, err = await run("http://127.0.0.1:9/v1")
    assert (status, out) == (2, "")
    assert err.startswith("penstock: no server answers at http://127.0.0.1:9/v1: ")
    assert err.count("\n") == 1


@pytest.mark.io
@pytest.mark.slow
async def test_limits_of_a_key_are_no_failure(url: str) -> None:
    def limited(exchange: Exchange) -> None:
        if exchange.method == "POST":
            exchange.status = 429

    async with spoiled(url, limited) as server:
        status, out, err = await run(f"{server}/v1", "--dialect", "chat", "--only", "objects", columns=200)
    assert (status, err) == (2, "")
    *_, advice, counted = out.splitlines()
    assert advice.startswith("7 checks could not tell: the server limits this key (429): raise its limits, ")
    assert counted == "0 pass, 0 warn, 7 skip, 0 fail"
    assert out.count("429") == 1


@pytest.mark.io
@pytest.mark.slow
async def test_limits_before_the_first_check_are_named(url: str) -> None:
    async with spoiled(url, with_status(429, when=200)) as server:
        status, out, err = await run(f"{server}/v1")
    assert (status, out) == (2, "")
    assert err.startswith(
        f"penstock: {server}/v1: the server limits this key (429): raise its limits, or wait a minute"
    )


def test_list_names_all_checks_and_marks_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [(name, mark == "*") for name, mark, _ in lines] == [(check.name, check.is_core) for check in ALL]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://a:1/v1/", "http://a:1/v1"),
        ("http://a", "http://a/v1"),
        ("a:8000", "http://a:8000/v1"),
        ("https://a/openai/v1?x=1", "https://a/openai/v1"),
    ],
)
def test_base_of_a_url(url: str, base: str) -> None:
    assert base_of(url) == base


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "http://a:99999"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(CannotRun, match="is no URL of a server"):
        base_of(url)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("chat.object", 1),
        ("object", 4),
        ("chat.*call*", 9),
        ("structured output", 4),
        ("messages", sum(check.speech == "messages" for check in ALL)),
    ],
)
def test_only_takes_names_patterns_and_areas(name: str, count: int) -> None:
    assert len(chosen(ALL, SPEECHES, [name])) == count


def test_a_name_of_no_check_is_named() -> None:
    with pytest.raises(CannotRun, match=r"no check is named chat\.nothing"):
        chosen(ALL, SPEECHES, ["chat.nothing"])

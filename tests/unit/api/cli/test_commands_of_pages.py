"""The commands of the pages: each runs as it stands, or is read by the program that it names, or has a reason."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.extensions.workbench.compare import read_arguments
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.paths import HARMONY, ROOT
from tests.support.processes import PATIENCE, RunCommand
from tests.support.server import running_server, script
from tests.support.stores import open_store

pytestmark = pytest.mark.io

TOP = ("api", "deploy", "docs", "extensions", "fixtures", "pipeline", "services", "stages", "testing", "tests")
PAGES = [*ROOT.glob("*.md"), *(path for folder in TOP for path in (ROOT / folder).rglob("*.md"))]

REASONS = {
    r"^(docker|kubectl|helm|systemctl|nginx|useradd|install|test -e|ln -sfn|cp deploy/|cd deploy|for name in)": (
        "of a machine's administrator; tests/live/deploy, tests/live/image and tests/flow/test_deploy.py try the files"
    ),
    r"vllm (serve|bench)|^llama-server": "another server's own program",
    r"^(pg_dump|pg_restore|test -s|\(umask)": "tests/flow/lifecycle/test_backup.py runs it",
    r"^(python3 -m|\S*/(pip|python -m uv) |pip |uvx|uv tool|/opt/)": "test_wheel.py and tests/live/image install",
    r"^(export|source|ls|openssl|done|for gpu|pgrep|kill|jq|PENSTOCK_\w+=\.\.\.$|mkdir)": "of the shell",
    r"penstock launch|^(codex|aider|lm_eval)": "tests/live/codex, tests/live/claude and tests/live/opencode run agents",
    r"penstock serve \[|penstock serve \.\.\.": "a form",
    r"penstock diff .*--against": "tests/flow/api/test_against.py runs it",
    r"penstock batch": "tests/flow/batches/test_command.py runs it",
    r"penstock record": "tests/unit/extensions/workbench/test_record.py runs it",
    r"penstock rollouts": "tests/flow/rollouts/test_command.py runs it",
    r"^curl .*(/rollouts/|/collective_rpc|/update_weight_version|/pause|/resume)": "of an operator: tests/flow",
    r"^O=": "of the shell",
    r"penstock conformance": "tests/unit/extensions/workbench/conformance runs it",
    r"--with redact$": "tests/examples/test_plugins_page.py runs it, with the package of the page",
    r"penstock demo": "tests/unit/extensions/workbench/test_demo.py runs it",
    r"llm\.example\.com|localhost:8000/toy": "tests/live/deploy and tests/examples run it, at another address",
    r"^curl .*/live/": "tests/flow/api/test_live.py sends it, with the key of an operator",
    r"^curl .*(-F|report\.pdf)": "tests/live/clients/test_files.py sends files",
    r"^(URL|FILE|BATCH)=|^echo '\{\"custom_id\"|^curl -s \$URL": "tests/live/clients/test_batches.py sends the same",
    r"^python ask\.py": "tests/flow/test_start_page.py runs it",
    r"^python spent": "tests/examples/test_programs_page.py runs it",
    r"^(python fixtures/|SDIST|\.venv/bin/python|python -m|git archive|cd release|pytest )": "for those who work on it",
}
"""The commands that no test here runs, by a pattern, each with the reason."""


class Command(NamedTuple):
    """A command, and the page that has it."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"[:100]


def commands() -> Iterator[Command]:
    for page in sorted(PAGES):
        if "node_modules" in page.parts:
            continue
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in whole_lines(block):
                yield Command(str(page.relative_to(ROOT)), line)


def whole_lines(block: str) -> Iterator[str]:
    """The lines of a block, without comments; those that a backslash or a quote continues are one."""
    held = ""
    for line in block.splitlines():
        held += line + "\n"
        try:
            words = shlex.split(held, comments=True)
        except ValueError:
            continue
        if not line.endswith("\\"):
            if words:
                yield re.sub(r"\\\n\s*", "", held).strip()
            held = ""
    assert not held.strip(), held


COMMANDS = list(commands())


def of(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    found = [each for each in COMMANDS if matches(pattern, each) and not reason_of(each)]
    assert found
    HANDLED.update(found)
    return pytest.mark.parametrize("command", found, ids=str)


def matches(pattern: str, command: Command) -> bool:
    return re.search(pattern, command.text, re.DOTALL) is not None


def reason_of(command: Command) -> str:
    return next((reason for pattern, reason in REASONS.items() if matches(pattern, command)), "")


HANDLED: set[Command] = set()


def words_after(command: Command, program: str) -> list[str]:
    """The arguments of a program in a command, up to what the shell does with its output."""
    text = re.sub(r"\$\([^()]*\)", "x", command.text)
    words = shlex.split(text, comments=True)
    start = next(at for at, word in enumerate(words) if word.rpartition("/")[2] == program) + 1
    end = next((at for at, word in enumerate(words) if at >= start and word in (">", "&&", "||", "|", "&")), len(words))
    return words[start:end]


@of(r"^make\b")
def test_target_exists(command: Command) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [word for word in words_after(command, "make") if "=" not in word and not word.startswith("-")]
    assert set(named) <= targets


@of(r"penstock (serve|check)\b")
def test_settings_are_read(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in re.findall(r"\b(PENSTOCK_\w+)=(\S+) ", command.text):
        monkeypatch.setenv(name, value.replace("$KEY", "a-key-of-sixteen-or-more"))
    monkeypatch.setenv("PENSTOCK_WEBHOOK_SECRET", "secret")
    read_settings(words_after(command, "penstock")[1:])


@of(r"penstock compare\b")
def test_comparison_is_read(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    read_arguments(words_after(command, "penstock")[1:])


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who has a clone, recordings, and stages of their own."""
    for folder in ("fixtures", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name in ("recordings/resp_...", "greeting"):
        shutil.copytree(HARMONY / "greeting", tmp_path / name)
    stage = (ROOT / "tests/examples/redact_emails.py").read_text()
    for name in ("redact_emails", "shout", "my_stage"):
        (tmp_path / f"{name}.py").write_text(stage)
    (tmp_path / "keys").write_text("a-key-of-sixteen-or-more name=alice\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PENSTOCK_WEBHOOK_SECRET", "secret")
    monkeypatch.setenv("PENSTOCK_STORE", str(tmp_path / "store.sqlite3"))
    monkeypatch.setattr("penstock.api.cli.replayer.SLOW", PATIENCE)  # a busy machine holds the loop, too
    return tmp_path


async def make_store(place: str) -> None:
    async with open_store(place):
        pass


@of(r"^(PENSTOCK_\w+=\S+ )?\S*penstock (keys|replay|diff|inspect|show|config|usage)\b")
def test_command_runs(command: Command, reader: Path, penstock: RunCommand) -> None:
    words = words_after(command, "penstock")
    arguments = [re.sub(r"^postgresql://.*", str(reader / "store.sqlite3"), word) for word in words]
    if words[:2] == ["keys", "make"]:
        (reader / "keys").unlink()  # the example makes its first key
    asyncio.run(make_store(str(reader / "store.sqlite3")))
    arguments = [re.sub(r"^recordings/\*$", "recordings/resp_...", word) for word in arguments]
    ended = penstock(*arguments)
    assert (ended.status, ended.err) == (0, "") or (words[0] == "keys" and ended.status == 0)


@pytest.mark.usefixtures("reader")
@of(r"^penstock shrink\b")
def test_recording_that_does_not_fail_is_not_shrunk(command: Command, penstock: RunCommand) -> None:
    assert "on the recording as it is" in penstock(*words_after(command, "penstock")).err


@of(r"^curl .*(-d|--json) ")
async def test_request_is_answered(command: Command, tmp_path: Path) -> None:
    words = words_after(command, "curl")
    (url,) = [word for word in words if word.startswith("http://127.0.0.1:8000/")]
    body = json.loads(words[words.index("-d") + 1])
    async with running_server(ScriptedEngine(script()), tmp_path / "store") as server:
        sent = body | {"model": server.scheduler.engine.models[0]}
        address = f"{server.url}/{url.partition('8000/')[2]}"
        async with server.client.post(address, json=sent) as answer:
            assert answer.status == 200, await answer.text()


def test_each_command_is_tried_or_has_a_reason() -> None:
    assert [str(each) for each in COMMANDS if each not in HANDLED and not reason_of(each)] == []


def test_each_reason_is_needed() -> None:
    assert [pattern for pattern in REASONS if not any(matches(pattern, each) for each in COMMANDS)] == []

"""The ``penstock`` command as its users run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from penstock.api.cli.__main__ import DOORS, all_commands, own_commands
from penstock.pipeline.errors import CannotRun, CannotStart
from tests.support.paths import ROOT
from tests.support.processes import RunCommand

COMMANDS = all_commands()


def test_first_page_shows_drawn_pipeline(penstock: RunCommand) -> None:
    assert penstock("show").out.decode() in (ROOT / "docs/START.md").read_text()


def test_show_draws_the_stages_of_the_operator(penstock: RunCommand, tmp_path: Path) -> None:
    """Of two that stand after the same stage, the one named later gets its frames first."""
    guide = (ROOT / "docs" / "STAGES.md").read_text()
    code = guide.partition("# shout.py\n")[2].partition("```")[0]
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(code.replace('"shout"', f'"{name}"'))
    shown = penstock("show", "--with", f"{tmp_path}/first.py:install", "--with", f"{tmp_path}/second.py:install")
    stages = [line.split()[0] for line in shown.out.decode().splitlines()]
    assert stages[stages.index("parse") :] == ["parse", "second", "first", "emit", "persist"]


def test_unknown_command_is_one_line(penstock: RunCommand) -> None:
    ended = penstock("reply")
    message = "penstock: there is no command reply (did you mean replay?); penstock --help lists them\n"
    assert (ended.status, ended.out, ended.err) == (2, b"", message)


def test_command_alone_says_what_one_can_do(penstock: RunCommand) -> None:
    alone, asked = penstock(), penstock("--help")
    assert (alone.status, alone.out, asked.status, asked.err) == (2, b"", 0, "")
    assert alone.err == asked.out.decode()
    assert re.findall(r"^\w.*", alone.err, re.MULTILINE)[1:-1] == [*DOORS]


def test_each_command_stands_at_one_door(penstock: RunCommand) -> None:
    at_doors = [name for names in DOORS.values() for name in names]
    assert sorted(at_doors) == sorted(own_commands())
    for door in DOORS:
        for words in re.findall(r"penstock (\w+)", door):
            assert words in DOORS[door]


ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("check", "serve"), ("--engine", "http://a")),
    **dict.fromkeys(("diff", "inspect", "replay", "shrink"), ("folder",)),
    "batch": ("lines.jsonl", "-o", "results.jsonl"),
    "compare": ("folder", "--engine", "http://a"),
    "conformance": ("http://a",),
    "keys": ("make", "alice", "--store", "none"),
    "launch": ("claude",),
    "record": ("--upstream", "http://a"),
    "rollouts": ("folder", "-o", "rollouts.jsonl"),
}
"""What a command needs besides its options."""


@pytest.mark.parametrize("command", COMMANDS)
def test_misspelt_option_of_each_command_is_one_line(
    command: str, penstock: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ends the command before anything is opened."""
    monkeypatch.chdir(tmp_path)
    words = (command, *ARGUMENTS.get(command, ()))
    shown = penstock(*words[: 2 if command == "keys" else 1], "--help", "all").out.decode()
    options = re.findall(r"^  (?:-\w(?: \S+)?, )?(--[a-z][\w-]*)", shown, re.MULTILINE)
    assert "--help" in options
    for option in options:
        wrong = f"{option[:-1]}q{option[-1]}"
        ended = penstock(*words, wrong)
        assert (ended.status, ended.out) == (2, b"")
        assert re.fullmatch(rf"penstock: {wrong}: there is no such option \(did you mean --[\w-]+\?\)\n", ended.err)
    assert list(tmp_path.iterdir()) == []


def test_each_command_has_its_summary(penstock: RunCommand) -> None:
    """It is read from the source, so it must stand where it is looked for."""
    listed = penstock("--help").out.decode()
    for name, command in COMMANDS.items():
        (first, *_) = (command.load().__doc__ or "").splitlines()
        assert f"\n  {name:12s}{first}\n" in listed


def test_package_adds_a_command(penstock: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of one of penstock's own stays penstock's."""
    package = tmp_path / "penstock_greet-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-greet\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[penstock.commands]\ngreet = greeting:main\nshow = greeting:main\n")
    (tmp_path / "greeting.py").write_text('def main(arguments):\n    """Greet."""\n    print("Hello", *arguments)\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert penstock("greet", "you").out == b"Hello you\n"
    assert "\n  greet       Greet.\n" in penstock("--help").out.decode()
    assert penstock("show").out.startswith(b"normalize")


def test_versions_are_named(penstock: RunCommand) -> None:
    assert penstock("--version").out.decode().startswith(f"penstock-llm {version('penstock-llm')}, ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_names_it(command: str, penstock: RunCommand) -> None:
    for flag in ("-h", "--help"):
        shown = penstock(command, flag)
        assert (shown.status, shown.err) == (0, "")
        assert shown.out.decode().startswith(f"usage: penstock {command} ")


@pytest.mark.parametrize("error", [CannotRun("no, because"), CannotStart("no, because")])
@pytest.mark.parametrize("command", COMMANDS)
def test_error_of_a_command_is_one_line(
    command: str, error: Exception, penstock: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(EntryPoint, "load", lambda _: fail)
    ended = penstock(command)
    assert (ended.status, ended.out, ended.err) == (2, b"", "penstock: no, because\n")


@pytest.mark.io
@pytest.mark.parametrize("arguments", [["show"], ["replay", "fixtures/harmony/greeting", "--sse"]])
def test_command_ends_quietly_without_a_reader(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "penstock.api.cli", *arguments]
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.io
def test_command_runs_without_stderr() -> None:
    """A supervisor may close it."""
    options = ["--engine", "replay:fixtures/harmony/greeting", "--print-pipeline"]
    command = [sys.executable, "-m", "penstock.api.cli", "serve", *options]
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=False,
        preexec_fn=lambda: os.close(2),
    )
    assert (ended.returncode, b"normalize" in ended.stdout) == (0, True)

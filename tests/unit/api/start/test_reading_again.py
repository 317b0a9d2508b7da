"""SIGHUP on a server of several models: what it takes from changed files, and what it leaves as it was."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.http.api_key import digest_of
from penstock.api.limits.admission import Admission
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of
from penstock.api.start.parts import Running
from penstock.api.start.serving import FileReader
from penstock.pipeline import audit
from penstock.pipeline.errors import CannotStart
from penstock.services.prompts import Prompts

A, B, C = (f'[models.{name}]\nengine = "http://{name}:8001"\n' for name in "abc")
KEY = "sk-alice-0123456789"


class Server:
    """A server of the files of a folder, which notes the models that it takes."""

    def __init__(self, text: str, *arguments: str) -> None:
        write(text)
        settings = read_settings(arguments)
        self.taken = list[Settings]()
        self.refusal = ""
        admission = Admission(settings.limits)
        self.keys = keys_of(settings, admission)
        scheduler = SimpleNamespace(admission=admission)
        parts: dict[str, Any] = {"scheduler": scheduler, "api": None}
        running = Running(self.keys, Prompts(), **parts, take_models=self.take)
        self.reader = FileReader(settings, running)

    def take(self, settings: Settings) -> None:
        if self.refusal:
            raise CannotStart(self.refusal)
        self.taken.append(settings)

    def models_after(self, text: str) -> list[str]:
        """The models that the server has once the file has changed."""
        write(text)
        self.reader.read_again()
        return list(self.reader.settings.models)


def write(text: str) -> None:
    file = Path("penstock.toml")
    if file.exists() and file.read_text().startswith("api-key-file"):
        text = f"{file.read_text().splitlines()[0]}\n{text}"
    file.write_text(text)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """The working directory, where ``penstock.toml`` is read."""
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the log; those of the audit log are not among them."""
    return [record.getMessage() for record in caplog.records if record.name != audit.LOGGER]


def test_models_are_added_changed_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(A + B)
    assert server.models_after(f"{A}engine-places = 3\n{C}") == ["a", "c"]
    assert said(caplog) == ["SIGHUP: the models were read again; new: c; changed: a; gone: b"]
    (taken,) = server.taken
    assert (list(taken.models), taken.of_model("a").engine_places) == (["a", "c"], 3)
    server.models_after(f"{A}engine-places = 3\n{C}")
    assert said(caplog)[-1] == "SIGHUP: the models were read again, and have not changed"


def test_number_of_a_group_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    text = '[models.d]\ncommand = "sh"\ngroups = ["gpu"]\n'
    server = Server(text)
    server.models_after(f"{text}[model-groups]\ngpu = 2\n")
    assert said(caplog) == ["SIGHUP: the models were read again"]
    assert server.taken[0].model_groups == {"gpu": 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{A}instead = "b"\n', "[models.a] instead (penstock.toml, line 3): there is no model 'b'"),
        (f'{A}tools = ["hammer"]\n', "[models.a] tools (penstock.toml, line 3): 'hammer' is not one of "),
        (f"{A}[model-groups]\ngpu = 2\n", "[model-groups] gpu (penstock.toml, line 4): no model is in a group of that"),
        (f"{A}model-groups\n", "penstock.toml: Expected '='"),
        (f"model-groups = 3\n{A}", "model-groups: expected a table with a number for each group"),
        ("", "penstock.toml has no table of a model"),
    ],
)
def test_wrong_file_leaves_all_as_it_was(caplog: pytest.LogCaptureFixture, text: str, reason: str) -> None:
    server = Server(A + B)
    assert server.models_after(text) == ["a", "b"]
    (message,) = said(caplog)
    assert message.startswith(f"SIGHUP: the models stay as they were: {reason}")
    assert all(list(taken.models) == ["a", "b"] for taken in server.taken)


def test_models_that_the_server_cannot_take_leave_all_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(A)
    server.refusal = "b is a backend of texts"
    assert server.models_after(A + B) == ["a"]
    line = "SIGHUP: the API keys, the limits and the models stay as they were: b is a backend of texts"
    assert said(caplog) == [line]


def test_models_stay_as_long_as_a_key_names_one_that_would_be_gone(folder: Path) -> None:
    keys = folder / "keys"
    keys.write_text(f"{KEY} models=b\n")
    server = Server(f'api-key-file = "keys"\n{A}{B}')
    assert server.models_after(A) == ["a", "b"]
    keys.write_text(f"{KEY} models=a\n")
    assert server.models_after(A) == ["a"]
    assert server.keys.models(digest_of(KEY)) == frozenset({"a"})
    keys.write_text(f"{KEY} models=c,b*\n")
    assert server.models_after(A + C) == ["a", "c"]
    assert server.keys.models(digest_of(KEY)) == frozenset({"c", "b*"})


def test_file_of_models_is_read_again(folder: Path) -> None:
    (folder / "m.toml").write_text(A.replace("models.", ""))
    server = Server("", "--model-config", "m.toml")
    (folder / "m.toml").write_text((A + B).replace("models.", ""))
    assert server.models_after("") == ["a", "b"]

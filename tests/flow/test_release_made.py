"""``make release``: what it makes and tries, but for what needs a network or an engine."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.installing import script
from tests.support.paths import ROOT

pytestmark = pytest.mark.io

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
PENSTOCK = Path(sys.executable).with_name("penstock")


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return script("release")


def test_context_has_all_that_the_images_copy(release: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / "images.tar.gz"
    release.archived(archive, {name: ROOT / name for name in release.context_of(ROOT)})
    with tarfile.open(archive) as files:
        names = set(files.getnames())
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert {name for line in copied for name in line.split()} <= names
    assert "deploy/Dockerfile" in names
    assert not [name for name in names if "__pycache__" in name]


def test_sums_are_those_of_sha256sum(release: ModuleType, tmp_path: Path) -> None:
    for name in ("a.whl", "b.tar.gz"):
        (tmp_path / name).write_text(name)
    (tmp_path / release.SUMS).write_text("of a release before")
    (tmp_path / release.SUMS).write_text(release.sums(tmp_path))
    check = ["sha256sum", "--check", "--strict", release.SUMS]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a.whl: OK\nb.tar.gz: OK\n")


def test_program_is_tried_without_an_engine(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Settings of the caller have no effect."""
    monkeypatch.setenv("PENSTOCK_HOST", "192.0.2.1")
    release.tried_without_engine(PENSTOCK, tmp_path)
    version, *found = capfd.readouterr().out.splitlines()
    assert version.startswith(f"{release.stem_of(ROOT).replace('_', '-').replace('llm-', 'llm ')}, ")
    assert found[0] == "demo: reasoning, message 'Hello! How can I help you today?'"
    assert found[-1] == "replay: reasoning, message, function_call 'I will look up the weather in Madrid.'"
    assert found[1].startswith("ok     distribution: penstock-llm ")


def test_program_that_does_not_start_ends_the_release(release: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match=r"(?s)penstock serve is not ready:\n.*/nowhere"),
        release.served(PENSTOCK, tmp_path, "serve", "--engine", "replay:/nowhere", "--store", "none"),
    ):
        pass


def test_response_that_failed_ends_the_release(release: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(SystemExit, match=r"The response is not completed: .*model_not_found"),
        release.served(PENSTOCK, tmp_path, "demo", "--no-open") as port,
    ):
        release.answer(port, {"model": "other", "input": "Hi"})

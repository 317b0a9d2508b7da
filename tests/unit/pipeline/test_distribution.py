"""Another distribution that has the name of the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.pipeline.distribution import namesake, own_version, vllm_requirement
from penstock.pipeline.errors import CannotStart

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution named penstock with some files, and perhaps a command."""

    def install(*files: str, version: str = "0.1.0", command: str = "") -> None:
        info = tmp_path / f"penstock-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: penstock\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in (tmp_path / file for file in files if not file.startswith("..")):  # Python 3.12 looks for them
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        (info / "entry_points.txt").write_text(f"[console_scripts]\n{command} = flow:main\n" if command else "")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_vllm_is_named_with_its_releases() -> None:
    assert re.fullmatch(r"vllm(<[\d.]+)?,?>=[\d.]+(,<[\d.]+)?", vllm_requirement())


def test_alone_there_is_nothing_to_say() -> None:
    assert namesake() == ""


def test_another_project_with_files_of_its_own_is_named(install: Install) -> None:
    install("flow/__init__.py", "lib_penstock.py", command="flow")
    assert namesake() == "penstock 0.1.0, another project's, is installed beside penstock-llm, which does not need it"


@pytest.mark.parametrize(
    ("files", "command", "shared"),
    [
        (("flow/__init__.py", "penstock/__init__.py"), "", "penstock/__init__.py"),
        (("penstock.py",), "", "penstock.py"),
        (("penstock/api/app.py",), "penstock", "penstock/api/app.py"),
        (("../../../bin/penstock",), "penstock", "the command penstock"),
    ],
    ids=["package", "module", "earlier release", "command"],
)
def test_one_that_owns_what_is_ours_ends_the_start(
    install: Install, files: tuple[str, ...], command: str, shared: str
) -> None:
    install(*files, version="0.2.0", command=command)
    cure = "uninstall both, then install penstock-llm"
    told = f"penstock 0.2.0 is installed beside penstock-llm, and both own {shared}: {cure}"
    with pytest.raises(CannotStart, match=f"^{re.escape(told)}$"):
        namesake()


def test_version_is_that_of_the_installed_distribution(install: Install) -> None:
    before = own_version()
    install("flow.py", version="9.9")
    assert own_version() == before

"""The wheel, used in a folder that has packages of the same names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias
from zipfile import ZipFile

import pytest

from tests.support.paths import HARMONY, ROOT

pytestmark = pytest.mark.io

SOURCES = ("LICENSE", "README.md", "py.typed", "pyproject.toml", "server.py", "testing.py")
PACKAGES = ("api", "pipeline", "stages")
PLUGIN = """
from collections.abc import AsyncGenerator, AsyncIterator
import penstock.pipeline.frames
from penstock.pipeline.frames import ParsedFrame

async def counted(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    number = 0
    async for frame in source:
        number += 1
        yield frame
    print(f"{number} frames of {penstock.pipeline.frames.__file__}")

def install(pipeline):
    return pipeline.insert_after("parse", "counted", counted)
"""

WHOLE = ("README.md", "api/EMBEDDING.md")
"""The pages whose blocks of Python are all programs; elsewhere those are that begin with the name of their file."""
PAGES = (*WHOLE, "stages/README.md", "stages/RECIPES.md", "stages/ENGINES.md", "stages/PARSERS.md")
UNTYPED = ("--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls")
"""Options of mypy: short programs may leave out types of their own."""

PAGE = (ROOT / "api" / "INSTALL.md").read_text()

Run: TypeAlias = Callable[..., str]


def listed(folder: Path) -> set[str]:
    """The files of the product below a folder, by their paths in the wheel."""
    files = {path for package in PACKAGES for path in (folder / package).rglob("*.*") if path.suffix != ".md"}
    paths = {f"penstock/{path.relative_to(folder)}" for path in files if "__pycache__" not in path.parts}
    return paths | {"penstock/py.typed", "penstock/server.py", "penstock/testing.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    _, *building = shlex.split(commands_of_page()[0], comments=True)
    output_of([sys.executable, *building, "-q", "--no-build-isolation"], copy)
    (path,) = (copy / "dist").glob("penstock-*.whl")
    return path


def commands_of_page() -> list[str]:
    """The commands that install penstock without ``make``."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [command for block in blocks for command in block.replace("\\\n", "").splitlines()]


def output_of(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Return the output of a command; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def penstock(wheel: Path, tmp_path: Path) -> Run:
    """Run the wheel's command in a folder whose modules have the names of penstock's."""
    site, folder = tmp_path / "site", tmp_path / "folder"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('the {name} of the user was imported')")
    (folder / "server.py").write_text("raise ImportError('the server of the user was imported')")
    (folder / "stages" / "__init__.py").write_text("")
    (folder / "stages" / "counted.py").write_text(PLUGIN)

    def penstock(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "penstock.api.cli", *arguments]
        return output_of(command, folder, PYTHONPATH=os.pathsep.join((".", str(site))), PYTHONDONTWRITEBYTECODE="1")

    return penstock


def test_wheel_has_every_file_of_the_product_and_no_other(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == listed(ROOT)


def test_page_on_installing_names_the_wheel_and_what_is_in_it(wheel: Path) -> None:
    words = [word for command in commands_of_page() for word in shlex.split(command, comments=True)]
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (\w+)$", archive.read(metadata).decode(), re.MULTILINE)
    wheels = {f"dist/{wheel.name}", *(f"dist/{wheel.name}[{extra}]" for extra in extras)}
    assert {word for word in words if word.startswith("dist/")} == wheels
    named = [word.removeprefix("replay:") for word in words]
    of_clone = [ROOT / name for name in named if name.startswith((".locks/", "fixtures/"))]
    assert len(of_clone) == 5
    assert all(path.exists() for path in of_clone)


@pytest.mark.parametrize("command", ["serve", "keys", "replay", "show", "diff", "shrink", "inspect"])
def test_commands_import_no_modules_of_the_user(penstock: Run, command: str) -> None:
    assert penstock(command, "--help").lower().startswith("usage: ")


def test_package_of_the_user_may_be_called_stages(penstock: Run, tmp_path: Path) -> None:
    output = penstock("replay", HARMONY / "weather", "--with", "stages.counted:install")
    assert f"frames of {tmp_path}/site/penstock/pipeline/frames.py" in output


@pytest.fixture
def project(wheel: Path, tmp_path: Path) -> Path:
    """A folder with the programs of the pages, and an environment in which the wheel is installed."""
    folder, site = (
        tmp_path / "project",
        tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages",
    )
    output_of([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], tmp_path)
    output_of([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], tmp_path)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    folder.mkdir()
    for page in PAGES:
        blocks: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        for number, block in enumerate(blocks):
            named = re.match(r"# (\w+\.py)\n", block)
            if named or page in WHOLE:
                name = named[1] if named else f"{Path(page).stem.lower()}_{number}.py"
                (folder / name).write_text(block)
    return folder


def test_programs_of_the_pages_have_types_in_a_project_of_their_own(project: Path) -> None:
    (project / "wrong.py").write_text('from penstock.api.settings import Settings\n\nSettings(max_turns="many")\n')
    python = project.parent / "venv" / "bin" / "python"
    command: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", *UNTYPED, "--python-executable", python, "."]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert re.findall(r"^([\w.]+):\d+: error", done.stdout, re.MULTILINE) == ["wrong.py"], done.stdout

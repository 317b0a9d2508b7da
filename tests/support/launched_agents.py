"""Coding agents as users run them: ``penstock launch`` starts each in a home and a project of its own.

The server that they use has the engine of `agent_engine`.  These tests run in an environment without penstock, so this
module imports nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

Json = dict[str, Any]

KEY = "sk-agents-0123456789"
MODEL = "agent"

ENGINES = ROOT / "tests/support/agent_engine.py"

TINY = ROOT / ".cache/tiny_gpt_oss"
"""The checkpoint that ``make`` builds."""

OF_TINY_ENGINE = (
    *("--served-model-name=agent", "--host=127.0.0.1", "--dtype=bfloat16", "--enforce-eager", "--enable-scale-out"),
    *("--structured-outputs-config.backend=guidance", "--max-model-len=32768", "--max-num-batched-tokens=256"),
    *("--max-num-seqs=4", "--kv-cache-memory-bytes=67108864"),
)
"""The options of an engine for agents; a part of a prompt that is read at once bounds its memory."""

ALONE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
"""The variables of an engine on any machine, which keeps the memory for the probabilities of a vocabulary."""

DONE = "All of it is done."
"""The answer to a message that asks for nothing, as in `agent_engine`."""


@dataclass(frozen=True)
class AgentServer:
    """A server for agents, and what it has recorded."""

    url: str
    log: Path
    recorded: Path

    def turns(self, count: int, model: str = "") -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each prompt and of its answer, in the order of the requests, at least ``count``.

        With a ``model``, those of this one of several alone.
        """
        deadline = time.monotonic() + PATIENCE
        while True:  # the server writes its recordings a little later
            found = self.folders(model)
            folders = [[_lines(folder / f"{name}.jsonl") for name in ("prompt", "tokens")] for folder in found]
            if len(folders) >= count and all(
                lines and lines[-1]["type"] == "End" for folder in folders for lines in folder
            ):
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        folders.sort(key=lambda folder: str(folder[0][0]["recorded_at"]))
        return [(_tokens(prompt), _tokens(answer)) for prompt, answer in folders]

    def folders(self, model: str) -> list[Path]:
        """Return the recordings of a model, or of all without one."""
        found = [prompt.parent for prompt in self.recorded.glob("*/prompt.jsonl")]
        return [each for each in found if not model or _model_of(each / "request.json") == model]


def _model_of(request: Path) -> str:
    return str(json.loads(request.read_text())["model"])


def _lines(file: Path) -> list[Json]:
    whole = file.read_bytes().rpartition(b"\n")[0] if file.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def _tokens(lines: Sequence[Json]) -> list[int]:
    return [token for line in lines for token in line.get("token_ids", ())]


@contextmanager
def agent_server(
    penstock: str,
    folder: Path,
    *options: str,
    window: int = 131_072,
    models: Sequence[str] = (),
    engine: str = f"{ENGINES}:engine",
) -> Iterator[AgentServer]:
    """Run a server with a key, whose model does what the user says, or all of its ``models``, for a block.

    The ``engine`` may be that of `obeying_engine`.
    """
    url, log, recorded = f"http://127.0.0.1:{free_port()}", folder / "serve.log", folder / "recorded"
    command = [penstock, "serve", "--store=none", "--no-sandbox", f"--record={recorded}"]
    if models:
        tables = (f'[models.{name}]\nengine = ["{ENGINES}:{name}"]\n' for name in models)
        (folder / "penstock.toml").write_text("\n".join(tables))
    else:
        command += [f"--engine={engine}", "--model-alias=claude-*=agent"]
    command += [f"--port={url.rpartition(':')[2]}", *options]
    variables = {"AGENT_CONTEXT": str(window), "PENSTOCK_API_KEYS": KEY}
    with running_process(command, f"{url}/health", log, variables, folder):
        yield AgentServer(url, log, recorded)


@contextmanager
def tiny_engine(penstock: str, folder: Path, checkpoint: Path = TINY, *options: str) -> Iterator[str]:
    """Run a ``vllm serve`` of the tiny gpt-oss, or of a copy of it, for a block; yield its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [
        Path(penstock).with_name("vllm"),
        "serve",
        checkpoint,
        f"--port={url.rpartition(':')[2]}",
    ]
    log, variables = folder / "vllm.log", {**ALONE, "PYTHONPATH": str(ROOT)}
    with running_process([*command, *OF_TINY_ENGINE, *options], f"{url}/health", log, variables, folder):
        yield url


@contextmanager
def obeying_engine(penstock: str, folder: Path) -> Iterator[str]:
    """Run a real engine that writes what the user says, as `obeying` does; yield its URL."""
    with tiny_engine(penstock, folder, TINY, "--logits-processors=tests.support.obeying:Obeying") as url:
        yield url


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[Json]:
        """The JSON lines that the agent has written; it must have succeeded."""
        assert self.status == 0, self.out + self.err
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True)
class Launched:
    """An agent: its name, the folders of its program, as in ``PATH``, and its own folder, with a home and a project."""

    penstock: str
    name: str
    programs: str
    folder: Path
    url: str
    model: str = MODEL
    key: str = KEY
    small: str = ""

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def run(self, *arguments: str, prompt: str = "", model: str = "", url: str = "") -> Ended:
        """Start the agent with ``arguments``, and write ``prompt`` to its input."""
        options = ["--url", url or self.url, "--model", model or self.model]
        options += ["--small-model", self.small] if self.small else []
        return self.execute([self.penstock, "launch", self.name, *options, "--", *arguments], prompt)

    def printed(self, *arguments: str) -> str:
        """Return the lines for a shell that start the agent."""
        options = ["--url", self.url, "--model", self.model, "--print"]
        return self.execute([self.penstock, "launch", self.name, *options, "--", *arguments]).out

    def execute(self, command: Sequence[str], prompt: str = "", key: str = "") -> Ended:
        """Run a command in the project, with the home of the agent and its program."""
        home = self.folder / "home"
        for folder in (home, self.project):
            folder.mkdir(exist_ok=True)
        environment = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "PENSTOCK_KEY": key or self.key,
        }
        return run(command, self.project, environment, prompt)


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str], prompt: str = "") -> Ended:
    """Run a command in a folder, with a prompt as its input."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(prompt, timeout=PATIENCE)
        finally:  # whatever the agent has left ends too
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, out, err)


def is_need(title: str, name: str, tokens: int) -> bool:
    """Return True if the page of clients says as much of the prompt of an agent as was counted, up to a fifth more."""
    package = json.loads((ROOT / "tests/live" / name / "node/package.json").read_text())
    [version] = package["dependencies"].values()
    [said] = re.findall(rf" ([\d,]+)(?: tokens)? in {title} {version}\b", (ROOT / "docs/CLIENTS.md").read_text())
    most = int(said.replace(",", ""))
    return 0.8 * most <= tokens <= most


def call(name: str, **arguments: Any) -> str:
    """Return the line for a call of a tool of the agent."""
    return f"call {name} {json.dumps(arguments)}"


def common(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the number of tokens that two prompts begin with alike."""
    pairs = zip(before, after, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after)))


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field of a request, without the positions in lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, path)
    else:
        yield path

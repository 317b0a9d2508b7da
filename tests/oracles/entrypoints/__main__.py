"""Run vLLM's own tests of Chat Completions, Completions and Messages against penstock.

The tests that start a server speak to penstock with a tiny model instead, under the plug-in `remote_server`.  A test
that fails needs an explanation in ``differences.toml``, and an explanation needs a test that fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.oracles.sources import ENTRYPOINTS
from tests.oracles.suite import Result, Suite
from tests.support.paths import ROOT
from tests.support.processes import free_port, running_process
from tests.support.tiny_engine import ARGUMENTS

GREEDY = ROOT / "tests" / "support" / "greedy.py"
SUITE = Suite(Path(__file__).parent, "tests/entrypoints")

FOLDERS = {"tiny_qwen": ROOT / "fixtures" / "tiny_qwen", "tiny_gpt_oss": ROOT / ".cache" / "tiny_gpt_oss"}
"""The folders of the tiny models by their names, which are paths where the tests run."""

STAND_INS = {
    "openai/gpt-oss-20b": "tiny_gpt_oss",
    **dict.fromkeys(
        (
            "HuggingFaceH4/zephyr-7b-beta",
            "Qwen/Qwen2-1.5B-Instruct",
            "Qwen/Qwen2.5-1.5B-Instruct",
            "Qwen/Qwen3-0.6B",
            "facebook/opt-125m",
            "openai-community/gpt2",
        ),
        "tiny_qwen",
    ),
}
"""The tiny models by those that they stand in for."""

SERVERS: Mapping[str, tuple[str, ...]] = {
    "tiny_qwen": (
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
        "--model-alias",
        "claude-*=tiny_qwen",
    ),
    "tiny_qwen --reasoning-parser": (),
    "tiny_gpt_oss": (),
}
"""The options of the servers, each by what it is for: a model, or one that thinks."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def main() -> int:
    """Print the table, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make entrypoints ARGS=", description=__doc__)
    parser.add_argument("-k", dest="selected", default="", help="only the tests that pytest selects by this")
    selected: str = parser.parse_args().selected
    with TemporaryDirectory() as folder, ExitStack() as stack:
        results = list(_results(Path(folder), _started(stack, Path(folder)), selected))
    lines, is_explained = SUITE.judge(results, all_ran=not selected)
    print(*lines, sep="\n")
    return int(not is_explained)


def substituted(source: str) -> str:
    """Return the source of a test with the names of the tiny models."""
    return re.sub(r'"([\w.-]+/[\w.-]+)"', lambda found: f'"{STAND_INS.get(found[1], found[1])}"', source)


def _started(stack: ExitStack, folder: Path) -> dict[str, str]:
    """Start the servers, at once, for the length of a stack; return their URLs."""

    def start(name: str) -> str:
        model, port = name.partition(" ")[0], free_port()
        command = [str(Path(sys.executable).with_name("penstock")), "serve", str(FOLDERS[model])]
        command += ["--served-model-name", model, *ARGUMENTS[1:], *SERVERS[name]]
        command += ["--port", str(port), "--store", "none", "--with", f"{GREEDY}:install"]
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(running_process(command, f"{url}/health", folder / f"{port}.log", ENVIRONMENT))
        return url

    with ThreadPoolExecutor() as threads:
        return dict(zip(SERVERS, threads.map(start, SERVERS), strict=True))


def _results(place: Path, servers: Mapping[str, str], selected: str) -> Iterator[Result]:
    sdist = ENTRYPOINTS.folder()
    for path in sdist.rglob("*.py"):
        copy = place / path.relative_to(sdist)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(substituted(path.read_text()))
    for name, model in FOLDERS.items():
        (place / name).symlink_to(model)
    options = ["-p", "remote_server", "-o", "asyncio_mode=auto", *(["-k", selected] if selected else [])]
    return SUITE.results(place, [""], ENVIRONMENT | {"REMOTE_SERVERS": json.dumps(servers)}, *options)


if __name__ == "__main__":
    sys.exit(main())

"""Run vLLM's own tests of Responses, Chat Completions, Completions and Messages against penstock.

The tests that start a server speak to penstock with a tiny model instead, under the plug-in `remote_server`.  Those of
Responses ask what a tiny model does not know, and speak to the engines of `answering_model`.  A test that fails needs
an explanation in ``differences.toml``, and an explanation needs a test that fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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
            *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"),
            "facebook/opt-125m",
            "openai-community/gpt2",
        ),
        "tiny_qwen",
    ),
}
"""The tiny models by those that they stand in for."""

_ANSWERING = Path(__file__).with_name("answering_model.py")

RESPONSES = "openai/responses"
"""The folder of the tests whose servers have another engine."""

ANSWERING: Mapping[str, tuple[str, ...]] = {
    "tiny_qwen": (str(FOLDERS["tiny_qwen"]), "--engine", f"{_ANSWERING}:qwen_engine"),
    "tiny_gpt_oss": ("--engine", f"{_ANSWERING}:harmony_engine", "--harmony-system-instructions"),
}
"""The servers of the tests of Responses, by the model."""

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
    parser.add_argument("--responses", action="store_true", help="only the tests of Responses")
    given = parser.parse_args()
    selected: str = given.selected
    with TemporaryDirectory() as folder:
        place = Path(folder)
        _copy_tests(place)
        suites = [_of_responses(place)] if given.responses else [_of_responses(place), _of_others(place)]
        results = [result for commands, tests in suites for result in _results(place, commands, tests, selected)]
    lines, is_explained = SUITE.judge(results, all_ran=not (selected or given.responses))
    print(*lines, sep="\n")
    return int(not is_explained)


def substituted(source: str) -> str:
    """Return the source of a test with the names of the tiny models."""
    return re.sub(r'"([\w.-]+/[\w.-]+)"', lambda found: f'"{STAND_INS.get(found[1], found[1])}"', source)


def _of_responses(place: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Return the commands of the servers of the tests of Responses, and these tests."""
    commands = {model: [*options, "--store", str(place / f"{model}.sqlite3")] for model, options in ANSWERING.items()}
    return commands, [RESPONSES]


def _of_others(place: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Return the commands of the servers of all other tests, and these tests."""
    commands = {}
    for name, options in SERVERS.items():
        model = name.partition(" ")[0]
        commands[name] = [str(FOLDERS[model]), "--served-model-name", model, *ARGUMENTS[1:], *options]
        commands[name] += ["--store", "none", "--with", f"{GREEDY}:install"]
    return commands, ["", f"--ignore={SUITE.root}/{RESPONSES}"]


def _started(stack: ExitStack, folder: Path, commands: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Start servers, at once, for the length of a stack; return their URLs."""

    def start(name: str) -> str:
        port = free_port()
        command = [str(Path(sys.executable).with_name("penstock")), "serve", *commands[name], "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(running_process(command, f"{url}/health", folder / f"{port}.log", ENVIRONMENT))
        return url

    with ThreadPoolExecutor() as threads:
        return dict(zip(commands, threads.map(start, commands), strict=True))


def _copy_tests(place: Path) -> None:
    """Copy vLLM's tests, with the names of the tiny models."""
    sdist = ENTRYPOINTS.folder()
    for path in sdist.rglob("*.py"):
        copy = place / path.relative_to(sdist)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(substituted(path.read_text()))
    for name, model in FOLDERS.items():
        (place / name).symlink_to(model)
    (place / "gpt_oss.py").touch()  # the tests ask if this package of a tool server is there


def _results(
    place: Path, commands: Mapping[str, Sequence[str]], tests: Sequence[str], selected: str
) -> Iterator[Result]:
    options = ["-p", "remote_server", "-o", "asyncio_mode=auto", *(["-k", selected] if selected else []), *tests[1:]]
    with ExitStack() as stack:
        servers = _started(stack, place, commands)
        environment = ENVIRONMENT | {"REMOTE_SERVERS": json.dumps(servers)}
        yield from SUITE.results(place, tests[:1], environment, *options)


if __name__ == "__main__":
    sys.exit(main())

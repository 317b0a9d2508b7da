"""Run vLLM's own tests of Chat Completions, Completions and Messages against penstock.

The tests that start a server speak to penstock with a tiny model instead, under the plug-in `remote_server`.  A test
that fails needs an explanation in ``differences.toml``, and an explanation needs a test that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.oracles.sources import CACHE, ENTRYPOINTS
from tests.support.paths import ROOT
from tests.support.processes import free_port, running_process
from tests.support.tiny_engine import ARGUMENTS

GREEDY = ROOT / "tests" / "support" / "greedy.py"
EXPLANATIONS = Path(__file__).with_name("differences.toml")
VERDICTS = ("model", "absent", "theirs", "arguable", "ours")
COLUMNS = ("tests", "passed", "skipped", *VERDICTS, "unexplained")
REPORT = CACHE / "entrypoints.json"

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

Result = dict[str, str]
"""The name of a test, its outcome, and why it failed."""


def main() -> int:
    """Print the table, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make entrypoints ARGS=", description=__doc__)
    parser.add_argument("-k", dest="selected", default="", help="only the tests that pytest selects by this")
    selected: str = parser.parse_args().selected
    known = explanations()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        results = list(_results(Path(folder), _started(stack, Path(folder)), selected))
    counts: dict[str, Counter[str]] = {}
    unexplained, gone = list[Result](), list[str]()
    for result in results:
        file = result["test"].partition("::")[0]
        verdict = known.pop(result["test"], "")
        failed = result["outcome"] == "failed"
        if failed and not verdict:
            unexplained.append(result)
        if verdict and not failed:
            gone.append(result["test"])
        counts.setdefault(file, Counter()).update(["tests", verdict or "unexplained" if failed else result["outcome"]])
    print(*_table(counts), sep="\n")
    REPORT.write_text(json.dumps(unexplained, indent=1))
    for result in unexplained:
        print(f"{result['test']}: {_last(result['why'])}")
    print(f"{len(unexplained)} unexplained: {REPORT}")
    gone += () if selected else known
    print(*(f"{EXPLANATIONS.name} explains a test that does not fail: {name}" for name in gone), sep="\n")
    return bool(unexplained or gone or not results)


def explanations() -> dict[str, str]:
    """Return the verdict of each test that has one; a test without a name is a file that cannot be read."""
    found: dict[str, str] = {}
    for each in tomllib.loads(EXPLANATIONS.read_text()).get("difference", ()):
        assert each["verdict"] in VERDICTS, each
        assert each["reason"]
        for name in each["tests"]:
            test = f"{each['file']}::{name}" if name else each["file"]
            assert test not in found, test
            found[test] = each["verdict"]
    return found


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


def _results(folder: Path, servers: Mapping[str, str], selected: str) -> Iterator[Result]:
    """Run the tests in a folder, and yield the result of each."""
    sdist, results = ENTRYPOINTS.folder(), folder / "results.jsonl"
    for path in sdist.rglob("*.py"):
        copy = folder / path.relative_to(sdist)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(substituted(path.read_text()))
    for name, model in FOLDERS.items():
        (folder / name).symlink_to(model)
    environment = ENVIRONMENT | {
        "REMOTE_SERVERS": json.dumps(servers),
        "REMOTE_RESULTS": str(results),
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "remote_server", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", ".", "-o", "asyncio_mode=auto", "--tb=short", "--continue-on-collection-errors"]
    run = [*command, *(["-k", selected] if selected else []), "tests/entrypoints"]
    done = subprocess.run(run, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)
    if not results.exists():
        raise RuntimeError(f"vLLM's tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(done.stdout.splitlines()[-1])
    for line in results.read_text().splitlines():
        result: Result = json.loads(line)
        yield result | {"test": result["test"].removeprefix("tests/entrypoints/")}


def _last(why: str) -> str:
    errors = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
    return (errors or why.splitlines() or [""])[0]


def _table(counts: Mapping[str, Counter[str]]) -> Iterator[str]:
    yield f"{'file':70s}" + "".join(f"{column:>12s}" for column in COLUMNS)
    total = Counter[str]()
    for file, count in sorted(counts.items()):
        total.update(count)
        yield f"{file:70s}" + "".join(f"{count[column] or '':>12}" for column in COLUMNS)
    yield f"{'all':70s}" + "".join(f"{total[column]:12d}" for column in COLUMNS)


if __name__ == "__main__":
    sys.exit(main())

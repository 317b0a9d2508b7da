"""Each way in which penstock starts vLLM, and what the process of the engine would report to vLLM's makers.

A plug-in asks vLLM in that process, and then ends it, before it loads the model.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from penstock.services.engines.workers import NO_REPORTS
from tests.support.paths import HARMONY, ROOT, TINY_QWEN
from tests.support.processes import PATIENCE, free_port
from tests.support.tiny_engine import ARGUMENTS

ANSWER = "USAGE_REPORTS_OF_ENGINE"
"""Variable with the file for the answer of the engine's process."""

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
SERVE = (PENSTOCK, "serve", str(TINY_QWEN), "--store=none", "--no-sandbox")

EMBEDDED = """
import asyncio
from penstock.api.settings import Settings
from penstock.server import {name}

async def main():
    settings = Settings(model={model!r}, store="none", sandbox=False, vllm={options!r})
    {use}

asyncio.run(main())
"""
OPTIONS = {
    name.removeprefix("--").replace("-", "_"): value or True
    for name, _, value in (argument.partition("=") for argument in ARGUMENTS)
}


def embedding(name: str, use: str) -> tuple[str, ...]:
    return (sys.executable, "-c", EMBEDDED.format(name=name, use=use, model=str(TINY_QWEN), options=OPTIONS))


WAYS = {
    "serve": (*SERVE, *ARGUMENTS),
    "frontends": (*SERVE, "--frontends=2", *ARGUMENTS),
    "compare": (PENSTOCK, "compare", str(HARMONY), "--engine", str(TINY_QWEN), *ARGUMENTS),
    "application": embedding("application", "await application(settings)"),
    "pipeline": embedding("pipeline", "await pipeline(settings).__aenter__()"),
}
"""The commands and the doors for programs that start vLLM; the files of `deploy` and the Makefile call the first."""


def report_and_end() -> None:
    """Write what vLLM says in the process of the engine, and end it."""
    if "EngineCore" not in multiprocessing.current_process().name:
        return
    usage = import_module("vllm.usage.usage_lib")
    Path(os.environ[ANSWER]).write_text(json.dumps([usage.is_usage_stats_enabled(), os.environ.get(NO_REPORTS)]))
    os._exit(1)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder that, once on the path, makes `report_and_end` a plug-in of vLLM."""
    metadata = tmp_path / "usage_reports-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: usage-reports\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nusage_reports = {__name__}:{report_and_end.__name__}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("way", "given", "expected"),
    [
        ("serve", None, [False, "1"]),
        ("frontends", "true", [False, "1"]),
        ("compare", "", [False, "1"]),
        ("application", None, [False, "1"]),
        ("pipeline", "0", [True, "0"]),
    ],
)
def test_engine_reports_nothing_unless_the_operator_asks(
    way: str, given: str | None, expected: list[object], plugin: Path
) -> None:
    answer = plugin / "answer.json"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {NO_REPORTS, "VLLM_DO_NOT_TRACK", "DO_NOT_TRACK", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    }
    environment |= {
        ANSWER: str(answer),
        "PYTHONPATH": f"{plugin}:{ROOT}",
        "PENSTOCK_PORT": str(free_port()),
        "VLLM_CONFIG_ROOT": str(plugin),
    }
    if given is not None:
        environment[NO_REPORTS] = given
    with (plugin / "log").open("wb") as log:
        done = subprocess.run(
            WAYS[way], env=environment, cwd=plugin, stdout=log, stderr=log, timeout=PATIENCE, check=False
        )
    assert done.returncode, "the engine was ended, and the program goes on"
    assert answer.exists(), (plugin / "log").read_text()
    assert json.loads(answer.read_text()) == expected

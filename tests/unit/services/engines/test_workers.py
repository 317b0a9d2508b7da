"""Worker processes end with the server that started them, and not with Ctrl-C, which only the server handles."""

from __future__ import annotations

import ast
import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.engines.workers import MARK, NO_REPORTS, end_with_parent, mark_workers, permit_amx
from tests.support.paths import PRODUCT, ROOT

CPU = Path("/proc/cpuinfo")
SPAWN = multiprocessing.get_context("spawn")


def serve(writer: Connection, *, marks: bool, method: str) -> None:
    if marks:
        mark_workers()
    context: Any = multiprocessing.get_context(method)
    worker = context.Process(target=work, args=(writer,))
    worker.start()
    worker.join()


def work(writer: Connection) -> None:
    """A worker of vLLM's, which loads its plugins first."""
    end_with_parent()
    writer.send(psutil.Process().pid)
    time.sleep(60)


@pytest.mark.io
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("marks", [True, False], ids=["ours", "another's"])
def test_worker_ends_with_its_server(marks: bool, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    reader, writer = SPAWN.Pipe(duplex=False)
    server = SPAWN.Process(target=serve, args=(writer,), kwargs={"marks": marks, "method": method})
    server.start()
    assert reader.poll(300)
    worker = psutil.Process(reader.recv())
    assert worker.is_running()
    gets_signals_of_the_terminal = os.getpgid(worker.pid) == os.getpgid(0)
    assert gets_signals_of_the_terminal is not marks
    server.kill()
    server.join()
    _, left = psutil.wait_procs([worker], timeout=120 if marks else 1)
    assert bool(left) is not marks
    for process in left:
        process.kill()


def test_server_itself_is_no_worker() -> None:
    end_with_parent()
    assert multiprocessing.parent_process() is None


GET_PERMISSION, ARCH_PRCTL = 0x1022, 158


def permitted(writer: Connection) -> None:
    permit_amx()
    states = ctypes.c_uint64()
    ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSION, ctypes.byref(states))
    writer.send(bool(states.value >> 18 & 1))


@pytest.mark.io
@pytest.mark.skipif(not CPU.exists() or "amx_tile" not in CPU.read_text(), reason="the processor has no AMX")
def test_amx_is_permitted() -> None:
    reader, writer = SPAWN.Pipe(duplex=False)
    worker = SPAWN.Process(target=permitted, args=(writer,))
    worker.start()
    assert reader.poll(300)
    assert reader.recv() is True
    worker.join()


def test_without_amx_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", None)
    permit_amx()


@pytest.mark.parametrize(
    ("given", "used"), [(None, "1"), ("", "1"), ("1", "1"), ("true", "1"), ("False", "1"), ("0", "0")]
)
def test_vllm_reports_no_usage_unless_the_operator_wants_it(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if given is None else {NO_REPORTS: given}
    monkeypatch.setattr(os, "environ", environment)
    mark_workers()
    assert environment[NO_REPORTS] == used


STARTS = {"LLM", "AsyncLLM", "LLMEngine", "from_vllm_config", "from_engine_args", "launch_core_engines"}
"""What starts engines of vLLM."""


def calls_of(function: ast.AST) -> dict[str, int]:
    """Return the first line of each name that a function calls."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call.lineno) for call in calls]
    return dict(sorted(named, key=lambda each: -each[1]))


def test_what_starts_vllm_marks_its_workers_before() -> None:
    starting = []
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        if not any(name in (source := path.read_text()) for name in STARTS):
            continue
        for function in ast.walk(ast.parse(source)):
            if (
                isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                and (found := calls_of(function)).keys() & STARTS
            ):
                starting.append(function.name)
                assert found["mark_workers"] < min(found[name] for name in found.keys() & STARTS), (path, function.name)
    assert sorted(starting) == ["launched", "start"]

"""A unit test is marked `io` if it starts a process, opens a socket or sleeps, and `vllm` if it imports vLLM.

`make quick` leaves both out.
"""

from __future__ import annotations

import asyncio
import multiprocessing.process
import sys
import threading
from collections.abc import Generator
from typing import Any

import pytest

from tests.support.clock import Clock

EVENTS = ("os.fork", "os.posix_spawn", "socket.bind", "socket.connect", "subprocess.Popen", "time.sleep")

IMPORTS = ("transformers", "vllm")

LONG = 1.0
"""Seconds of a sleep that ends in a short test only if the machine stands still, as those of watchers do."""

_seen: list[str] = []
_sleep = asyncio.sleep
_start = multiprocessing.process.BaseProcess.start


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if not _seen and event in EVENTS and threading.current_thread() is threading.main_thread():
        _seen.append(f"{event}{arguments}"[:200])


async def _audited_sleep(delay: float, result: Any = None) -> Any:
    value = await _sleep(delay, result)
    if not _seen and 0 < delay < LONG and not isinstance(asyncio.get_running_loop().time, Clock):
        _seen.append(f"asyncio.sleep({delay})")
    return value


def _audited_start(process: multiprocessing.process.BaseProcess) -> None:
    _seen.append(f"start of {process}")
    _start(process)


sys.addaudithook(_audit)
asyncio.sleep = _audited_sleep
multiprocessing.process.BaseProcess.start = _audited_start  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    _seen.clear()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that does I/O or imports vLLM without a marker.  `vllm` covers both: the import starts programs."""
    before = _imported()
    result = yield
    if item.get_closest_marker("vllm"):
        return result
    if _seen and not item.get_closest_marker("io"):
        pytest.fail(f"Mark this test `io`, or do without this: {_seen[0]}")
    if new := _imported() - before:
        pytest.fail(f"Mark this test `vllm`, or do without this: import {', '.join(new)}")
    return result


def _imported() -> set[str]:
    return sys.modules.keys() & set(IMPORTS)

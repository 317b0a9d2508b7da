from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.services.tools import USUAL_LIMITS
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, load_encoding
from tests.support.examples import fix_examples

pytest_plugins = ["tests.support.clock", "tests.support.on_demand", "tests.support.stores"]

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**30 and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
    # Temporary files in memory, those of other processes too: no test waits for a disk.
    tempfile.tempdir = os.environ.setdefault("TMPDIR", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the derived files of every fixture")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; it would be inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until collection is over: its objects live to the end, and are frozen below
    if (profile := config.getoption("--hypothesis-profile") or "ci") != "thorough":
        fix_examples(profile)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that import vLLM first, so that only one of several workers imports it."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # its imports warn
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _patient_readers_of_files() -> None:
    """Give files of tests more time than those of users: on a busy machine the process that reads one starts late."""
    object.__setattr__(USUAL_LIMITS, "seconds", 300.0)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Take back what a command that runs in this process changes of the log's handlers, which all tests share."""
    before = [(handler, handler.formatter, [*handler.filters]) for handler in logging.getLogger().handlers]
    yield
    for handler, formatter, filters in before:
        handler.formatter, handler.filters = formatter, filters


@pytest.fixture(scope="session")
def encoding() -> HarmonyEncoding:
    return load_encoding()

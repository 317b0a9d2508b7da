"""Verdicts on mutants: a warm process forks a child for each, which runs tests over the mutated module.

The child loads the mutated source of one module when that module is imported; nothing is written to the tree.
Processes that tests start run the product as it is: only what the test process itself executes is mutated.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.bench.mutants.choose import Mutant, mutated
from tests.support.processes import descendants

WARM = (
    "aiohttp.web",
    "asyncpg",
    "hypothesis",
    "mcp",
    "msgspec",
    "openai",
    "openai_harmony",
    "pydantic_settings",
    "uvloop",
)
"""Slow imports of tests and product, which a fork need not repeat."""

COLLECTING = 300.0
"""Seconds that a child may take before its first test."""
LEAST = 60.0
"""Seconds that any test may take, and that a child may take to end."""
SLOWER = 10
"""Times its usual duration that a test may take."""
MEMORY = 8 * 2**30
"""Bytes of address space that a child may fill."""


@dataclass(frozen=True)
class Trial:
    """Groups of tests to run over a mutant or the unchanged product; a group runs only if the one before passed."""

    name: str
    mutant: Mutant | None
    groups: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Verdict:
    outcome: str
    tests: tuple[str, ...] = ()
    """The tests that failed."""


@dataclass
class Child:
    trial: Trial
    process: int
    pipe: int
    folder: str
    """Its own, for the files of its tests."""
    deadline: float
    test: str = "collection"
    failed: list[str] = field(default_factory=list)
    rest: bytes = b""

    def read(self, seconds: dict[str, float]) -> bool:
        """Record the reports of the process; return false once it has ended."""
        if not (block := os.read(self.pipe, 65536)):
            return False
        *lines, self.rest = (self.rest + block).split(b"\n")
        for line in lines:
            event, _, test = line.decode().partition(" ")
            if event == "failed":
                self.failed.append(test)
            else:
                self.test = test
                self.deadline = time.monotonic() + max(LEAST, SLOWER * seconds.get(test, 0.0))
        return True


class MutatingLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        return compile(mutated(path.read_text("utf-8"), self._mutant), path, "exec", dont_inherit=True)


class MutatingFinder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._path = Path(mutant.path).resolve()
        self._name = self._path.parent.name if self._path.stem == "__init__" else self._path.stem

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[2] != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != self._path:
            return None
        spec.loader = MutatingLoader(fullname, spec.origin, self._mutant)
        return spec


class Reporter:
    """A pytest plugin that runs the tests of a trial in their order, and reports on a pipe."""

    def __init__(self, tests: Sequence[str], pipe: int) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._pipe = pipe

    def _report(self, event: str, test: str) -> None:
        os.write(self._pipe, f"{event} {test}\n".encode(errors="backslashreplace"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report("failed", "collection")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._report("failed", report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._report("start", "end")


def warm() -> None:
    """Import slow third-party modules, so that forks need not."""
    for name in WARM:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.split(".")[0] == "penstock"]
    assert not ours, ours
    gc.collect()
    gc.freeze()


def verdicts(trials: deque[Trial], seconds: dict[str, float], jobs: int) -> Iterator[tuple[str, Verdict]]:
    """Yield the verdict of each trial, by name, as the trials end; `jobs` processes run at once."""
    children: dict[int, Child] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while trials or children:
                while trials and len(children) < jobs:
                    child = _forked(trials.popleft())
                    children[child.pipe] = child
                    selector.register(child.pipe, selectors.EVENT_READ)
                ended = {key.fd for key, _ in selector.select(1.0) if not children[key.fd].read(seconds)}
                late = {child.pipe for child in children.values() if time.monotonic() > child.deadline}
                for pipe in ended | late:
                    selector.unregister(pipe)
                    child = children.pop(pipe)
                    verdict = _verdict(child, is_late=pipe not in ended)
                    if verdict.outcome == "survived" and len(child.trial.groups) > 1:
                        trials.appendleft(replace(child.trial, groups=child.trial.groups[1:]))
                    else:
                        yield child.trial.name, verdict
        finally:
            for child in children.values():
                _verdict(child, is_late=True)


def _forked(trial: Trial) -> Child:
    reading, writing = os.pipe()
    folder = tempfile.mkdtemp(prefix="mutant")
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            os._exit(_run(trial, writing, folder))
        finally:
            os._exit(70)
    os.close(writing)
    return Child(trial, process, reading, folder, time.monotonic() + COLLECTING)


def _run(trial: Trial, pipe: int, folder: str) -> int:
    os.setsid()
    output = os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    options = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=no", f"--basetemp={folder}/tests"]
    if trial.mutant:
        sys.meta_path.insert(0, MutatingFinder(trial.mutant))
        options.append("--exitfirst")
    files = dict.fromkeys(test.partition("::")[0] for test in trial.groups[0])
    return int(pytest.main([*options, *files], plugins=[Reporter(trial.groups[0], pipe)]))


def _verdict(child: Child, *, is_late: bool) -> Verdict:
    """End a child and its processes, and derive the verdict from its failed tests or its exit."""
    for process in {child.process, *descendants(child.process)} if is_late else ():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os.close(child.pipe)
    _, status = os.waitpid(child.process, 0)
    with suppress(ProcessLookupError):
        os.killpg(child.process, signal.SIGKILL)
    shutil.rmtree(child.folder, ignore_errors=True)
    if child.failed:
        return Verdict("killed", tuple(dict.fromkeys(child.failed)))
    if is_late:
        return Verdict("timed out", (child.test,))
    ended = os.waitstatus_to_exitcode(status)
    if ended in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Verdict("survived")
    return Verdict("killed", (child.test,))

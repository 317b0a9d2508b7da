"""One simulation: a plan is carried out, and its outcome is a trace, or a fault with its history."""

from __future__ import annotations

import gc
import logging
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.determinism import deterministic
from tests.simulation.loop import SimulatedLoop
from tests.simulation.plan import Plan
from tests.simulation.postgres import SimulatedPostgres
from tests.simulation.stores import SimulatedSqlite, SimulatedStore
from tests.simulation.world import World

SHARED_MEMORY = Path("/dev/shm")
"""The folder of a file system in memory."""

_PARTICULARS = re.compile(r"[0-9]|(resp|conv|msg|rs)_[0-9a-f]+|[{[].*")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one simulation."""

    plan: Plan
    seconds: float
    """The virtual seconds that it took."""
    steps: int
    trace: str
    fault: str = ""
    """What a server did wrong, or an empty text."""
    history: tuple[str, ...] = ()
    """The lines of the world and of the servers' logs."""

    @property
    def complaint(self) -> str:
        """The fault in one line."""
        return next((line for line in reversed(self.fault.splitlines()) if not line.startswith(" ")), "")

    @property
    def kind(self) -> str:
        """What a fault has in common with the same one of other responses."""
        return _PARTICULARS.sub("", self.complaint)[:60]


class _Lines(logging.Handler):
    """Adds the servers' logs to the history of a world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.world.loop.process.name}: {record.levelname} {record.getMessage()}"
        if record.exc_info and record.exc_info[1]:
            line += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self.world.note(line)


def simulate(plan: Plan) -> Outcome:
    """Carry out a plan."""
    loop = SimulatedLoop(str(plan.seed))  # type: ignore[abstract] # it has what servers and clients use
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    fault = ""
    with tempfile.TemporaryDirectory(dir=parent, prefix="penstock-simulation-") as folder:
        with _without_collector(), deterministic(loop.time, str(plan.seed)), _store(plan, loop, Path(folder)) as store:
            world = World(plan, loop, Path(folder) / "world", store)
            with _logging(world):
                try:
                    loop.run_until_complete(world.run())
                except Exception as error:  # noqa: BLE001 - it is the fault
                    fault = "".join(traceback.format_exception(error))
            outcome = Outcome(plan, loop.now, loop.steps, loop.trace, fault, tuple(world.history))
            del world
        _freed(loop)
    return outcome


@contextmanager
def _store(plan: Plan, loop: SimulatedLoop, folder: Path) -> Iterator[SimulatedStore]:
    if plan.postgres:
        postgres = SimulatedPostgres(plan.postgres, loop, str(plan.seed))
        with postgres.replacing():
            yield postgres
    else:
        yield SimulatedSqlite(folder)


@contextmanager
def _logging(world: World) -> Iterator[None]:
    root, handler = logging.getLogger(), _Lines(world)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Collect no garbage within a block: when the collector runs depends on all that ran before."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _freed(loop: SimulatedLoop) -> None:
    """Free what dead processes have left; their blocks end now, without a loop, and that is no fault."""
    hook, disabled = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda _: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop.bury()
            gc.collect()
    finally:
        logging.disable(disabled)
        sys.unraisablehook = hook

"""The log of a command that runs stages: lines of the operator's stages on stderr, and the errors of all stages."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.pipeline.errors import StageFault
from penstock.pipeline.faults import name_stage
from penstock.pipeline.recordings.format import End

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

STAGES = ("penstock.services", "penstock.stages")

QUIET = ("penstock", "vllm")
"""The packages whose lines are shown only from WARNING on."""


class StageErrors(logging.Handler):
    """Collects errors that a stage logs and turns into an event, as `emit` does if a stage before it loses a frame."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.met: list[Exception] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error of a log line."""
        if record.exc_info and isinstance(record.exc_info[1], Exception):
            self.met.append(record.exc_info[1])

    def report(self, path: Path, fault: tuple[str, Exception] | None, end: End | None) -> bool:
        """Print the error of a replayed stage, and forget it.  Return False if there is none.

        An error in the log is no ``fault`` if the recording that ``end`` ends has failed, too.
        """
        met, self.met = self.met, []
        if fault is None and (not met or (end and end.failure)):
            return False
        stage, error = fault or (name_stage(met[0]), met[0])
        print(f"penstock: {path}: {described(stage, error)}", file=sys.stderr)
        return True


@contextmanager
def stage_log(level: str = "WARNING") -> Iterator[StageErrors]:
    """Show log lines of at least ``level`` on stderr, and collect the errors of stages, for the length of a block.

    Lines of penstock's own stages are not shown, as they repeat the output.
    """
    errors, shown, root = StageErrors(), logging.StreamHandler(), logging.getLogger()
    shown.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    shown.addFilter(_is_shown)
    before = root.level
    root.addHandler(shown)
    root.setLevel(level)
    for name in STAGES:
        logging.getLogger(name).addHandler(errors)
    try:
        yield errors
    finally:
        for name in STAGES:
            logging.getLogger(name).removeHandler(errors)
        root.removeHandler(shown)
        root.setLevel(before)


def _is_shown(record: logging.LogRecord) -> bool:
    is_quiet = record.name.partition(".")[0] in QUIET and record.levelno < logging.WARNING
    return not is_quiet and not f"{record.name}.".startswith(tuple(f"{name}." for name in STAGES))


def described(stage: str, error: Exception) -> str:
    """Describe the error of a stage, with its place in the code."""
    if isinstance(error, StageFault):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"the stage {stage!r} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"

"""A line every few seconds while a model is loaded in this process, instead of the lines that vLLM writes meanwhile.

vLLM logs its warnings and errors only, unless the operator asks for more.  Most of its lines come from child processes,
and some from libraries in C, so stdout and stderr are replaced by a pipe as file descriptors.  A thread reads the pipe.
The child processes keep it as long as they live.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import IO, Self

from penstock.pipeline.errors import CannotRun, CannotStart, Stopped
from penstock.pipeline.logs import duration, json_line, name_response
from penstock.services.engines.load_errors import cause_of, is_explained

logger = logging.getLogger(__name__)

OURS = __name__.partition(".")[0]
"""The logger of all lines that are not vLLM's."""

_DRAINED = b"\0"
"""Written into the pipe by this process: all lines before it have been read when it arrives."""

PATIENCE = 10.0
"""The most seconds to wait for the thread."""

PERIOD = 10.0
"""Seconds between two lines about a model that is being loaded."""

_LINE_END = re.compile(rb"\r*\n")


class Loading:
    """A block in which a model is loaded: its output is kept, and shown only if the block fails.

    `finish` ends this early, at success.  With ``is_verbose`` all lines are shown as they come; ``as_json``, each
    becomes a line of JSON, at the least level that vLLM then logs at.
    """

    def __init__(self, model: str, *, is_verbose: bool, as_json: bool = False) -> None:
        self._model = model
        self._is_verbose = is_verbose
        self._as_json = as_json
        self._is_kept = True
        """True while lines are kept."""
        self._kept: list[str] = []
        self._drained = Event()
        self._ended = Event()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if not self._is_verbose:  # in this process, where vLLM may have its level already, and in those to come
            level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
            logging.getLogger("vllm").setLevel(level.upper())
        _flush()
        self._saved = os.dup(1), os.dup(2)
        self._terminal = open(os.dup(2), "w", buffering=1, errors="backslashreplace")  # noqa: PTH123
        source, self._pipe = os.pipe()
        os.dup2(self._pipe, 1)
        os.dup2(self._pipe, 2)
        self._log = _Diverted(self._terminal)
        logger.info("Loading %s", self._model)
        Thread(target=self._read, args=(source,), name="vLLM's output", daemon=True).start()
        Thread(target=self._report, name="loading", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self._drain()  # the last lines of the workers
            return
        self._restore()
        is_ours = isinstance(error, CannotStart | CannotRun)  # its message says all that the operator needs
        is_failure = isinstance(error, Exception) or (isinstance(error, SystemExit) and not isinstance(error, Stopped))
        if is_failure and not is_ours:
            if isinstance(error, Exception) and not is_explained(error):
                traceback.print_exception(error)  # before the lines of a worker, which may have the root cause
            if not self._is_verbose:
                self._print(self._kept)
        if isinstance(error, Exception) and not is_ours:
            raise CannotStart(f"{self._model} cannot be served: {cause_of(error)}") from error

    def finish(self) -> None:
        """Give stdout and stderr back to this process: the model is loaded."""
        self._restore()
        logger.info("Loaded %s in %s", self._model, duration(time.monotonic() - self._started))
        if self._as_json:  # vLLM's own lines would be text
            logging.getLogger("vllm").handlers.clear()
            logging.getLogger("vllm").propagate = True
        self._kept.clear()

    def _restore(self) -> None:
        self._ended.set()
        _flush()
        self._drain()
        self._is_kept = False
        for descriptor, saved in enumerate(self._saved, start=1):
            os.dup2(saved, descriptor)
        self._log.end()

    def _drain(self) -> None:
        self._drained.clear()
        os.write(self._pipe, _DRAINED)
        self._drained.wait(PATIENCE)

    # The threads

    def _report(self) -> None:
        hint = "" if self._is_verbose else " (--verbose shows vLLM's lines)"
        while not self._ended.wait(PERIOD):
            logger.info("Loading %s, for %s%s", self._model, duration(time.monotonic() - self._started), hint)

    def _read(self, source: int) -> None:
        rest = b""
        while chunk := os.read(source, 65536):
            if is_drained := _DRAINED in chunk:
                chunk = chunk.replace(_DRAINED, b"")
            *lines, rest = _LINE_END.split(rest + chunk)
            for line in lines:
                self._take(line)
            if is_drained:
                if rest:  # the last words of a process that crashed may lack a line end
                    self._take(rest)
                    rest = b""
                self._drained.set()

    def _take(self, line: bytes) -> None:
        text = (
            line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")
        )  # the last state of a bar of tqdm
        if self._is_kept and not self._is_verbose:
            self._kept.append(text)
        else:
            self._print([text])

    def _print(self, lines: list[str]) -> None:
        if self._as_json:
            lines = [json_line("INFO" if self._is_verbose else "WARNING", "vllm", line) for line in lines]
        with suppress(OSError, ValueError):  # without a reader of stderr, the pipe must still be emptied
            self._terminal.write("".join(f"{line}\n" for line in lines))


class _Diverted:
    """The log while stderr is a pipe: lines of penstock go to ``shown``, and all others into the pipe."""

    def __init__(self, shown: IO[str]) -> None:
        root = logging.getLogger()
        self._own = logging.StreamHandler(shown)
        self._own.addFilter(_is_ours)
        self._own.addFilter(name_response)
        self._others = [each for each in root.handlers if getattr(each, "stream", None) is sys.stderr]
        for handler in self._others:
            handler.addFilter(_is_foreign)
            self._own.setFormatter(handler.formatter)
            root.addHandler(self._own)

    def end(self) -> None:
        logging.getLogger().removeHandler(self._own)
        for handler in self._others:
            handler.removeFilter(_is_foreign)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == OURS


def _is_foreign(record: logging.LogRecord) -> bool:
    return not _is_ours(record)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

"""The program of a Python sandbox: it runs one cell after another in one namespace, as a notebook does.

It is sent to the sandbox as text, behind `confined`.  Descriptor 1 takes all that the code writes.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import linecache
import signal
import sys
import traceback
import types
from typing import Any, TextIO

from penstock.stages.services.sandbox.confined import answer

CELL = "<cell "
COROUTINE = 0x80
"""The flag of code that awaits at its top level."""


class Cells:
    """A namespace, and the cells that ran in it."""

    def __init__(self) -> None:
        self._main = types.ModuleType("__main__")
        self._names: dict[str, Any] = vars(self._main)
        self._names["__builtins__"] = builtins
        self._count = 0
        self._running = False
        self._written = written()
        sys.modules["__main__"] = self._main

    def run(self, code: str) -> None:
        """Run one cell; whatever it raises is written to its output."""
        self._count += 1
        cell = f"{CELL}{self._count}>"
        linecache.cache[cell] = (len(code), None, code.splitlines(keepends=True), cell)
        if self._written.closed:
            self._written = written()
        sys.stdout = sys.stderr = self._written
        signal.signal(signal.SIGINT, self._interrupted)
        try:
            self._running = True
            self._execute(code, cell)
        except BaseException as exc:  # noqa: BLE001 - also the cell's own exit and interrupt
            self._running = False
            show(exc, self._written)
        finally:
            self._running = False

    def flush(self) -> None:
        """Write out what the code has printed."""
        if not self._written.closed:
            self._written.flush()

    def _interrupted(self, signum: int, frame: types.FrameType | None) -> None:
        """An interrupt belongs to a cell; one that comes too late is nobody's."""
        if self._running:
            raise KeyboardInterrupt

    def _execute(self, code: str, cell: str) -> None:
        tree = ast.parse(code, cell)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        self._evaluate(tree, cell, "exec")
        if isinstance(last, ast.Expr):
            value = self._evaluate(ast.Expression(last.value), cell, "eval")
            if value is not None:
                self._names["_"] = value
                self._written.write(repr(value) + "\n")

    def _evaluate(self, tree: ast.Module | ast.Expression, cell: str, mode: str) -> Any:
        code = compile(tree, cell, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, self._names)  # noqa: S307 - what this program is for
        if not code.co_flags & COROUTINE:
            return value
        import asyncio  # noqa: PLC0415 - half of the start, and rarely needed

        return asyncio.run(value)


def written() -> TextIO:
    """The output; a character that has no bytes is shown by its number."""
    return io.open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: UP020


def show(exc: BaseException, target: TextIO) -> None:
    """Write the traceback from the cell on."""
    trace = exc.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(CELL):
        trace = trace.tb_next
    try:
        traceback.print_exception(type(exc), exc, trace, file=target)
    except BaseException:  # noqa: BLE001 - an exception may say what it likes when it is asked what it is
        target.write(f"{type(exc).__name__}, which cannot be shown\n")


def serve(requests: io.BufferedReader, control: int, order: dict[str, Any]) -> None:
    """Run what comes until no more comes."""
    if order["packages"]:
        sys.path.append(order["packages"])
    cells = Cells()
    while line := requests.readline():
        try:
            cells.run(json.loads(line)["code"])
            cells.flush()
        except (KeyboardInterrupt, ValueError):
            pass  # between two cells, or its output was closed
        answer(control, done=True)

"""The program of a Python sandbox: it runs cells one after another in one namespace, like a notebook.

It is sent to the sandbox as text, after `confined`.  All output of the code goes to descriptor 1.
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
import warnings
from typing import Any, TextIO

from penstock.extensions.tools.sandbox.confined import answer

CELL = "<cell "
COROUTINE = 0x80
"""``CO_COROUTINE``: the flag of code with a top-level ``await``."""


class Cells:
    """A namespace, and the cells that ran in it."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._main = types.ModuleType("__main__")
        self._names: dict[str, Any] = vars(self._main)
        self._names["__builtins__"] = builtins
        self._count = 0
        self._running = False
        self._written = written()
        sys.modules["__main__"] = self._main

    def run(self, code: str) -> None:
        """Run one cell, and write its exception, if any, to its output."""
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
            self._keep_figures()
        except BaseException as exc:  # noqa: BLE001 - including SystemExit and KeyboardInterrupt
            self._running = False
            show(exc, self._written)
        finally:
            self._running = False

    def flush(self) -> None:
        if not self._written.closed:
            self._written.flush()

    def _interrupted(self, signum: int, frame: types.FrameType | None) -> None:
        """Interrupt the running cell; ignore a signal that arrives after its end."""
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

    def _keep_figures(self) -> None:
        """Save the open figures of matplotlib, as no screen can show them, and close them."""
        plots: Any = sys.modules.get("matplotlib.pyplot")
        for number in plots.get_fignums() if plots else ():
            path = f"{self._home}/figure_{self._count}_{number}.png"
            plots.figure(number).savefig(path)
            plots.close(number)
            self._written.write(f"(The figure is in {path}.)\n")

    def _evaluate(self, tree: ast.Module | ast.Expression, cell: str, mode: str) -> Any:
        code = compile(tree, cell, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, self._names)  # noqa: S307 - the purpose of this program
        if not code.co_flags & COROUTINE:
            return value
        import asyncio  # noqa: PLC0415 - half of the start-up time, and rarely needed

        return asyncio.run(value)


def written() -> TextIO:
    """Open the output.  Characters without an encoding (lone surrogates) are written as escapes."""
    return io.open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: UP020


def show(exc: BaseException, target: TextIO) -> None:
    """Write the traceback, from the cell's frame on."""
    trace = exc.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(CELL):
        trace = trace.tb_next
    try:
        traceback.print_exception(type(exc), exc, trace, file=target)
    except BaseException:  # noqa: BLE001 - an exception's own ``__str__`` may raise anything
        target.write(f"{type(exc).__name__}, which cannot be shown\n")


def serve(requests: io.BufferedReader, control: int, order: dict[str, Any]) -> None:
    """Run cells until the control channel is closed."""
    if order["packages"]:
        sys.path.append(order["packages"])
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")  # `show` is not needed
    cells = Cells(order["home"])
    while line := requests.readline():
        request = json.loads(line)
        try:
            cells.run(request["code"])
            cells.flush()
        except (KeyboardInterrupt, ValueError):
            pass  # interrupted between two cells, or the cell has closed its output
        answer(control, number=request["number"])

"""The program of a sandbox for programs of the model that call tools: it runs one, and asks for its calls in rounds.

It is sent to the sandbox as text, after `confined` and `repl`.  The event loop has no clock and no sockets: when
nothing can run, the calls that wait are one round, and go to the server at once; if none waits, the loop's time moves
to the next timer.  So what a program does depends on its code and on the outcomes of its calls alone.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import io
import json
import linecache
import random
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple, NoReturn, TypeVar, TypeVarTuple

from penstock.extensions.tools.sandbox.confined import answer
from penstock.extensions.tools.sandbox.repl import COROUTINE, written

PLACE = "<program>"
VALUE = "<value>"
"""The variable that holds the value of the last expression; no program has a name like it."""

LONGEST_ARGUMENTS = 2**20
"""Characters of the arguments of a call, in JSON within JSON."""

LONGEST_ROUND = 3 * 2**20
"""The same of all calls of a round: the server reads no longer answer than four mebibytes."""

NUMBERS = count()

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class ToolError(Exception):
    """The error of a tool, in its words."""

    __module__ = "__main__"


class Numbered:
    """An object whose place in a set depends on what the program did before, and not on its address."""

    __slots__ = ()

    def __hash__(self) -> int:
        return number_of(self)


class Future(Numbered, asyncio.Future[Any]):
    """The outcome of a call, or of what a task waits for."""

    number: int


class Task(Numbered, asyncio.Task[Any]):
    """A task of the program."""

    number: int


class Call(NamedTuple):
    """A call that waits for its outcome."""

    function: str
    arguments: str
    size: int
    outcome: asyncio.Future[Any]


class Calls:
    """The calls of the program, and the channel over which they leave."""

    def __init__(self, requests: io.BufferedReader, control: int, request: dict[str, Any]) -> None:
        self._requests = requests
        self._control = control
        self._number: int = request["number"]
        self._at_once: int = request["at_once"]
        self._waiting: deque[Call] = deque()
        self.is_past: bool = request["is_past"]
        """True if the server knows that the program has done all this before, up to its next call at least."""

    async def outcome(self, function: str, arguments: str) -> Any:
        """Call a function of a tool, and return its result."""
        size = len(json.dumps(arguments))
        if size > LONGEST_ARGUMENTS:
            raise ToolError(f"The arguments are longer than {LONGEST_ARGUMENTS} characters.")
        call = Call(function, arguments, size, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        return await call.outcome

    def exchange(self) -> bool:
        """Send a round of the calls that wait, and hand out the outcomes; return False if no call waits."""
        asked = list(self._round())
        if asked:
            calls = [(call.function, call.arguments) for call in asked]
            for call, (result, error) in zip(asked, self._ask(calls=calls)["outcomes"], strict=True):
                if error is not None:
                    call.outcome.set_exception(ToolError(error))
                else:
                    call.outcome.set_result(value_of(result))
        return bool(asked)

    def end(self) -> None:
        """Tell the server that the program has ended, and wait for it to end this process."""
        self._ask()

    def _round(self) -> Iterator[Call]:
        """Take the calls of the next round off those that wait; those that the program has cancelled do not count."""
        size = number = 0
        while self._waiting and number < self._at_once:
            call = self._waiting[0]
            if not call.outcome.done():
                size, number = size + call.size, number + 1
                if size > LONGEST_ROUND:
                    return
                yield call
            self._waiting.popleft()

    def _ask(self, **question: Any) -> dict[str, Any]:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        answer(self._control, number=self._number, **question)
        reply: dict[str, Any] = json.loads(self._requests.readline() or "null")
        self._number, self.is_past = reply["number"], reply["is_past"]
        return reply


class Loop(asyncio.BaseEventLoop):
    """An event loop whose tasks wait for timers and calls alone.  All loops of a program have one time."""

    calls: Calls
    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self.set_task_factory(self._task)

    def time(self) -> float:
        return Loop.now

    def create_future(self) -> asyncio.Future[Any]:
        return Future(loop=self)

    def run_in_executor(
        self, executor: Any, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """Run a function at once: a thread would end sooner or later than it did before."""
        done: asyncio.Future[Result] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - the task that awaits it gets it
            done.set_exception(exc)
        return done

    def select(self, timeout: float | None) -> list[Any]:
        """Wait until a task can run again, for at most ``timeout`` seconds of the loop's time."""
        if timeout == 0 or self.calls.exchange():
            return []
        if timeout is None:
            raise RuntimeError("All tasks wait, and neither for a tool nor for a time.")
        if not self.calls.is_past:
            time.sleep(timeout)
        Loop.now += timeout
        return []

    def _task(self, loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return Task(coro, loop=loop, **options)

    def _process_events(self, events: list[Any]) -> None:
        """Do nothing: `select` has no events."""

    def _write_to_self(self) -> None:
        """Do nothing: no thread wakes the loop."""


class Policy(asyncio.DefaultEventLoopPolicy):
    """Makes each loop of the program one of ours."""

    def new_event_loop(self) -> Loop:
        return Loop()


def number_of(each: Any) -> int:
    """Return the number of an object, which gets the next free one at the first call."""
    if not hasattr(each, "number"):
        each.number = next(NUMBERS)
    number: int = each.number
    return number


def in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``as_completed`` with tasks that begin in the order in which they are given."""

    def as_completed(fs: Iterable[Any], *, timeout: float | None = None) -> Any:
        return original([asyncio.ensure_future(each) for each in dict.fromkeys(fs)], timeout=timeout)

    return as_completed


def value_of(result: str) -> Any:
    """Return the result of a call: parsed, if it is JSON, else the text."""
    try:
        return json.loads(result, parse_constant=refuse)
    except (ValueError, RecursionError):
        return result


def refuse(constant: str) -> NoReturn:
    """Raise `ValueError`: NaN and infinity are words of Python's parser, and no JSON."""
    raise ValueError(constant)


def function_of(calls: Calls, path: str, parameters: Mapping[str, str], text: str | None) -> Callable[..., Any]:
    """Return the function that calls a tool, from the tool's names by those of the parameters.

    ``text`` is the one parameter of a tool that takes plain text; None for one that takes JSON.
    """

    async def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False))
        if len(args) > len(parameters):
            raise TypeError(f"{path}() takes {len(parameters)} positional arguments, and {len(args)} were given")
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{path}() got multiple values for argument {min(twice)!r}")
        given |= kwargs
        named = {parameters.get(name, name): value for name, value in given.items()}
        if text is None:
            return await calls.outcome(path, json.dumps(named, ensure_ascii=False, allow_nan=False))
        if list(named) != [text] or not isinstance(named[text], str):
            raise TypeError(f"{path}() takes one argument, a string")
        return await calls.outcome(path, named[text])

    call.__name__ = path.rpartition(".")[2]
    call.__qualname__ = path
    return call


def namespace(calls: Calls, functions: list[Any]) -> dict[str, Any]:
    """Return what a program finds: the functions, those of a namespace as attributes of an object."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    names: dict[str, Any] = vars(main)
    names |= {"__builtins__": builtins, "ToolError": ToolError, "asyncio": asyncio, "json": json}
    for path, parameters, text in functions:
        whole, _, name = path.rpartition(".")
        place = vars(names.setdefault(whole, types.SimpleNamespace())) if whole else names
        place[name] = function_of(calls, path, parameters, text)
    return names


def run(code: str, names: dict[str, Any]) -> None:
    """Run a program, and write the value of its last expression."""
    tree = ast.parse(code, PLACE)
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.fix_missing_locations(
            ast.copy_location(ast.Assign([ast.Name(VALUE, ast.Store())], last.value), last)
        )
    compiled = compile(tree, PLACE, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(compiled, names)  # noqa: S307 - the purpose of this program
    if compiled.co_flags & COROUTINE:
        asyncio.run(waiting)
    if names.get(VALUE) is not None:
        sys.stdout.write(repr(names[VALUE]) + "\n")


def show(exc: BaseException) -> None:
    """Write the traceback of a program, from its own first frame on, and without the frames of this file."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != PLACE:
        trace = trace.tb_next
    shown = traceback.TracebackException(type(exc), exc, trace)
    own = [frame for frame in shown.stack if frame.filename != __name__]
    shown.stack = traceback.StackSummary.from_list(own)
    sys.stdout.write("".join(shown.format()))


def serve(requests: io.BufferedReader, control: int, order: dict[str, Any]) -> None:
    """Run one program."""
    request = json.loads(requests.readline())
    calls = Loop.calls = Calls(requests, control, request)
    random.seed(0)
    asyncio.set_event_loop_policy(Policy())
    asyncio.as_completed = asyncio.tasks.as_completed = in_order(asyncio.as_completed)
    code = request["code"]
    linecache.cache[PLACE] = (len(code), None, code.splitlines(keepends=True), PLACE)
    sys.stdout = sys.stderr = output = written()
    try:
        run(code, namespace(calls, request["functions"]))
    except BaseException as exc:  # noqa: BLE001 - including SystemExit
        sys.stdout = output if not output.closed else written()
        show(exc)
    calls.end()

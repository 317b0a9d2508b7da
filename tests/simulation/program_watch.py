"""The programs of a simulation: what each asks, the processes that run them, and a tool of the server that they call.

The code of a program is a JSON object.  What it asks next depends on the code and on all outcomes before, so that a
mistake in them shows.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

from penstock.extensions.programs import host
from penstock.extensions.tools.sandbox.process import SandboxDied
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import ListedTool
from penstock.services.slots import Slots
from penstock.services.tools import HostSettings, ToolResult
from tests.simulation.ledger import Violation
from tests.simulation.loop import PROCESS, Process

Json = dict[str, Any]

METER = "meter"
"""The label of the server's own tool, which counts its calls."""

LOOK, MEASURE = "look", "measure"
"""The function of the client, and that of the meter."""

SCHEMA: Json = {
    "type": "object",
    "properties": {"nonce": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["nonce", "number"],
}

PATHS = {LOOK: LOOK, MEASURE: f"{METER}.{MEASURE}"}
"""The functions as programs call them."""

PLACES = 2
"""Programs of a server that run at once."""

KEPT_SECONDS = 10.0
"""Seconds for which a program keeps its process."""

STEP_SECONDS = 0.3
"""The most seconds that a step of a program takes."""

BROKEN = 0.1
"""The share of the meter's calls that fail."""


class Asked(NamedTuple):
    """A call of a program."""

    function: str
    nonce: str
    number: int

    @property
    def arguments(self) -> Json:
        return {"nonce": self.nonce, "number": self.number}


def next_of(code: str, outcomes: Sequence[Sequence[str]]) -> list[Asked] | str:
    """Return what a program asks after the outcomes of its rounds, or what it prints at its end."""
    wanted = json.loads(code)
    digest = sha256(json.dumps([wanted, outcomes]).encode()).hexdigest()[:16]
    if len(outcomes) == wanted["rounds"]:
        return f"found {digest}"
    draw = random.Random(digest)
    functions = draw.choices((LOOK, MEASURE), k=draw.randint(1, 3))
    return [Asked(function, wanted["nonce"], draw.randrange(10**9)) for function in functions]


@dataclass
class KnownProgram:
    """A program that runs for a client, with all that the client knows of it."""

    owner: str
    way: str
    code: str
    call_id: str = ""
    outcomes: list[list[str]] = field(default_factory=list)
    """The outcomes of its rounds that are over."""
    asked: list[Asked] = field(default_factory=list)
    """The calls of the round that is not over."""
    got: dict[str, str] = field(default_factory=dict)
    """Their outcomes by the ids of their items, in the order of the calls: those of the client are empty at first."""
    waiting: list[Json] = field(default_factory=list)
    """The items of those that the client has to answer."""
    of_meter: dict[str, str] = field(default_factory=dict)
    """The results of all calls of the meter, by the ids of their items."""
    history: list[Json] = field(default_factory=list)
    previous: str = ""
    conversation: str = ""
    has_ended: bool = False

    @property
    def nonce(self) -> str:
        return str(json.loads(self.code)["nonce"])

    def take(self, given: Sequence[Json], answer: Json) -> None:
        """Take a response to a request; raise `Violation` if its items are not what the program does."""
        outputs = {item["call_id"]: item["output"] for item in given if item["type"] == "function_call_output"}
        for call in self.waiting:
            self.got[call["id"]] = outputs[call["call_id"]]
        self.waiting = []
        self._end_round()
        for item in answer["output"]:
            match item["type"]:
                case "program":
                    self.begins(item)
                case "function_call" | "mcp_call":
                    self.calls(item)
                case "program_output":
                    self._ends(item)
                case _:
                    pass
        if not self.has_ended and not self.waiting:
            raise Violation(f"the program of {answer} neither waits nor has ended")
        self.history += [*given, *answer["output"]]
        self.previous = answer["id"]

    def begins(self, item: Json) -> None:
        """Take the item of the program."""
        if self.call_id or item["code"] != self.code:
            raise Violation(f"{self} has begun as {item}")
        self.call_id = item["call_id"]
        self._ask()

    def calls(self, item: Json) -> None:
        """Take the item of a call."""
        if item.get("caller") != {"type": "program", "caller_id": self.call_id}:
            raise Violation(f"{item} is no call of {self}")
        wanted = self.asked[len(self.got)] if len(self.got) < len(self.asked) else None
        if wanted is None or item["name"] != wanted.function or json.loads(item["arguments"]) != wanted.arguments:
            raise Violation(f"a program calls {item}, and not {wanted}, after {self.outcomes} of {self.code}")
        if item["type"] == "mcp_call":
            self.got[item["id"]] = self.of_meter[item["id"]] = _outcome(item)
        else:
            self.got[item["id"]] = ""
            self.waiting.append(item)
        self._end_round()

    def _end_round(self) -> None:
        if self.asked and len(self.got) == len(self.asked) and all(self.got.values()):
            self.outcomes.append([*self.got.values()])
            self._ask()

    def _ask(self) -> None:
        following = next_of(self.code, self.outcomes)
        self.asked = [] if isinstance(following, str) else following
        self.got = {}

    def _ends(self, item: Json) -> None:
        wanted = next_of(self.code, self.outcomes)
        if self.has_ended or item["call_id"] != self.call_id or item["result"].strip() != wanted:
            raise Violation(f"a program ends with {item}, and not with {wanted!r}, after {self.outcomes}")
        self.has_ended = True


def _outcome(item: Json) -> str:
    """Return what the program gets of a call of the meter, all of whose results differ."""
    error = item["error"]
    return str(item["output"] if error is None else error["content"][0]["text"])


class Measured(NamedTuple):
    """A call of the meter, with the key of its owner."""

    owner: str
    nonce: str
    number: int


@dataclass
class ProgramWatch:
    """All processes of programs that have started, and all calls of the meter, by what they returned."""

    processes: list[SimulatedProcess] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    def running(self, server: Process | None) -> int:
        """Return how many programs have a process at a server."""
        return sum(each.alive and each.server is server for each in self.processes)

    def measure(self, owner: str, arguments: Json) -> str:
        """Take note of a call of the meter, and return what no other call returns."""
        result = f"m{next(self._numbers)}"
        self.measured[result] = Measured(owner, arguments["nonce"], arguments["number"])
        return result


WATCH: ContextVar[ProgramWatch] = ContextVar("WATCH")
"""The watch over the programs of the server that runs."""


# The tool of the server


@dataclass(frozen=True)
class Meter:
    """The host of the meter."""

    functions = (ListedTool(MEASURE, SCHEMA),)

    def session(self, request: ResolvedRequest) -> MeterSession:
        return MeterSession(request.facts.origin.owner)

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class MeterSession:
    """One response's use of the meter."""

    owner: str

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        watch = WATCH.get()
        result = watch.measure(self.owner, json.loads(text))
        await asyncio.sleep(random.choice((0.0, 0.1, 2.0)))
        return ToolResult(error=result) if random.random() < BROKEN else ToolResult(result)

    async def close(self) -> None:
        """Do nothing."""


def meter(_: HostSettings) -> Meter:
    """Return the host."""
    return Meter()


# The sandbox


class SimulatedProcess:
    """The process of a program, which takes time for each step."""

    def __init__(self) -> None:
        self.server = PROCESS.get()
        self.alive = True
        self.written = ""
        self._code = ""
        self._outcomes: list[list[str]] = []
        WATCH.get().processes.append(self)

    async def ask(self, question: Json, seconds: float, *, goes_on: bool) -> Json:
        """Return the calls of the next round, or nothing at the end."""
        await asyncio.sleep(random.uniform(0.0, STEP_SECONDS))
        if not self.alive:
            raise SandboxDied("it was killed")
        if goes_on:
            self._outcomes.append(
                [result if error is None else error for result, error in json.loads(question["outcomes"])]
            )
        else:
            self._code = question["code"]
        following = next_of(self._code, self._outcomes)
        if isinstance(following, str):
            self.written = following
            return {}
        return {"calls": [[PATHS[asked.function], json.dumps(asked.arguments)] for asked in following]}

    def resume(self) -> None:
        """Do nothing: it has no threads."""

    pause = resume

    def kill(self) -> None:
        """End it."""
        self.alive = False

    async def end(self) -> None:
        """End it, which takes time."""
        self.kill()
        await asyncio.sleep(random.uniform(0.0, STEP_SECONDS))


class _Folder:
    async def remove(self) -> None:
        """Do nothing: there is no folder."""


class _Sandbox:
    async def start(self, _: _Folder) -> SimulatedProcess:
        """Return a new process."""
        await asyncio.sleep(random.uniform(0.0, STEP_SECONDS))
        return SimulatedProcess()


async def _new_folder() -> _Folder:
    return _Folder()


def _host(settings: HostSettings) -> host.ProgramHost:
    sandbox: Any = _Sandbox()
    return host.ProgramHost(sandbox, Slots(PLACES), settings.limit, KEPT_SECONDS)


setattr(host, "new_folder", _new_folder)  # noqa: B010 - a simulated one
setattr(host, "host", _host)  # noqa: B010 - the same

"""The world of a simulation: servers over one store, their clients, and faults, as a plan has them."""

from __future__ import annotations

import asyncio
import random
import shutil
from contextvars import copy_context
from functools import partial
from pathlib import Path

from penstock.api.http.api_key import digest_of
from tests.simulation import batches, dialects, files, programs, scripts
from tests.simulation.children import models_file
from tests.simulation.clients import Client
from tests.simulation.hooks import HookReceiver
from tests.simulation.invariants import check_end, check_idle, is_settled
from tests.simulation.ledger import Known, Ledger, Violation
from tests.simulation.lines import LineWatch
from tests.simulation.loop import PROCESS, Process, SimulatedLoop, WorkFault
from tests.simulation.network import End
from tests.simulation.plan import Action, Plan
from tests.simulation.program_watch import ProgramWatch
from tests.simulation.servers import (
    AT_ONCE,
    HOOKS_HOST,
    LIMITED,
    PER_MINUTE,
    SimulatedServer,
    hook_url,
    settings_of,
)
from tests.simulation.stores import SimulatedStore

SCRIPTS = {**scripts.SCRIPTS, **dialects.SCRIPTS, **files.SCRIPTS, **batches.SCRIPTS, **programs.SCRIPTS}

KEYS = {"alice": "alice-0123456789", "bob": "bob-0123456789ab", "limited": "limited-01234567"}
"""The API key of each owner."""

IN_ADVANCE = 3
"""Requests of the limited key that a server may hold in advance, and those that it takes for one request."""

COMMIT_SECONDS = 0.01
"""The most seconds that a commit takes on a disk without faults."""

AFTERMATH_SECONDS = 5.0
"""Seconds after a fault of the disk in which changes may still wait."""

CHECK_SECONDS = 5.0
"""Seconds between two checks while the world runs."""

SETTLING_SECONDS = 400.0
"""Seconds after the last fault in which all responses end."""

IDLE_SECONDS = 100.0
"""Seconds without clients after which a server keeps nothing of them: kept connections end after 75 seconds."""


class World:
    """The servers, the clients and the faults of a plan, over a store, with a folder for settings."""

    def __init__(self, plan: Plan, loop: SimulatedLoop, folder: Path, store: SimulatedStore) -> None:
        self.plan, self.loop, self.store = plan, loop, store
        self.draw = random.Random(f"{plan.seed} world")
        self.ledger, self.keys = Ledger(), KEYS
        self.history: list[str] = []
        """A line for each action, with its time."""
        self.wrongs: list[str] = []
        """What models have done that they should not."""
        self.lines, self.programs = LineWatch(self), ProgramWatch()
        _prepare(folder)
        hosts = [f"10.0.0.{number}" for number in range(1, plan.servers + 1)]
        self.servers = [
            SimulatedServer(
                *(loop, store, host, settings_of(folder, store.url, host, resumes=plan.resumes, models=models)),
                delay=self._delay,
                when_begun=self._check_limit,
                when_wrong=self.wrongs.append,
                lines=self.lines,
                programs=self.programs,
            )
            for number, host in enumerate(hosts, 1)
            for models in [models_file(folder, number) if plan.has_models else None]
        ]
        self.hooks = HookReceiver(loop, KEYS)
        self.exceeded = 0
        """The most responses at once of a key, if they are more than it may have."""
        self.lost_until = self.full_until = self.slow_until = 0.0
        """The times until which commits are lost, the disk is full, and the disk is slow."""
        self.lost_share = 0.0
        """The share of the store's work that is lost in that time."""
        self._disk_faults: list[tuple[float, float]] = []
        """The beginnings and ends of all faults of the disk."""
        self._strikes: list[tuple[str, int, random.Random]] = []
        """For each coming strike: what a client sees before it, and how often."""
        self._clients: dict[str, asyncio.Task[None]] = {}
        self._restarts: set[asyncio.Task[None]] = set()

    # Running

    async def run(self) -> None:
        """Carry out the plan; raise `Violation` if a server breaks a promise."""
        self.hooks.start()
        for server in self.servers:
            server.start()
        watching = asyncio.create_task(self._watch())
        try:
            await self._act()
            await self._heal()
            await self._settle()
        finally:
            watching.cancel()
        for server in self.servers:
            async with asyncio.timeout(60.0):
                await server.stop()
        self._check_errors()

    async def _act(self) -> None:
        for action in sorted(self.plan.actions, key=lambda action: action.at):
            await asyncio.sleep(action.at - self.loop.time())
            self.note(f"begins {action}")
            fault = getattr(self, f"_{action.kind.replace(' ', '_')}", None)
            if fault is None:
                self._start_client(action)
            else:
                fault(random.Random(f"{self.plan.seed} action {action.number}"))

    def _start_client(self, action: Action) -> None:
        client = Client(self, f"{action.kind} {action.number}")
        context = copy_context()
        context.run(PROCESS.set, Process(client.name))
        self._clients[client.name] = self.loop.create_task(
            client.run(SCRIPTS[action.kind]), context=context, name=client.name
        )

    async def _heal(self) -> None:
        """End all faults, and start the servers that are down."""
        self.lost_until = self.full_until = self.slow_until = 0.0
        self.hooks.until = 0.0
        self._strikes.clear()
        self.loop.network.apart.clear()
        for server in self.servers:
            if server.process:
                server.process.paused_until = 0.0
                server.process.steps_left = -1
        if self._restarts:
            await asyncio.wait(self._restarts)
        for server in self.servers:
            server.start()
        self.note("all faults are over")

    async def _settle(self) -> None:
        """Wait until the clients and all responses have ended, and check what is left."""
        deadline = self.loop.time() + SETTLING_SECONDS
        while any(not task.done() for task in self._clients.values()) or not is_settled(self):
            await asyncio.sleep(1.0)
            self._check_clients()
            if self.loop.time() > deadline:
                busy = [name for name, task in self._clients.items() if not task.done()]
                raise Violation(f"what has begun never ends: clients {busy}, and {is_settled(self, explains=True)}")
        self._check_clients()
        try:
            async with asyncio.timeout(SETTLING_SECONDS):
                await check_end(self)
        except TimeoutError as error:
            raise Violation("a request after the end gets no answer") from error
        await asyncio.sleep(IDLE_SECONDS)
        await check_idle(self)

    async def _watch(self) -> None:
        """Start servers that have ended by themselves; check limits."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for server in self.servers:
                if server.process is None and not self._restarts:
                    server.start()

    def _check_clients(self) -> None:
        for task in self._clients.values():
            if task.done() and (error := task.exception()):
                raise error

    def _check_limit(self, owner: str) -> None:
        """Note if all servers together run more responses of the limited key than it may have."""
        if owner == digest_of(KEYS[LIMITED]):
            running = sum(
                engine.by_owner[owner] for server in self.servers if server.process for engine in server.engines
            )
            self.exceeded = max(self.exceeded, running if running > AT_ONCE else 0)

    def _check_errors(self) -> None:
        if self.exceeded and not self.plan.has("disk", "pauses"):  # a server without its store counts alone
            raise Violation(f"a key had {self.exceeded} responses at once, of at most {AT_ONCE}")
        for wrong in self.wrongs:
            raise Violation(wrong)
        for context in self.loop.errors:
            raise Violation(f"{context.get('message')}: {context.get('exception')!r}") from context.get("exception")

    def note(self, line: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.loop.time():9.3f} {line}")

    def may_lose(self, known: Known) -> bool:
        """Return True if an accepted response may be missing: its server did not wait for a store out of reach."""
        return not known.mode.startswith("background") and self.had_disk_fault(known.at)

    def may_run_again(self, known: Known) -> bool:
        """Return True if a response may have run more than once: with other events each time."""
        return self.plan.resumes and known.mode.startswith("background")

    @property
    def surely_admitted(self) -> int:
        """The requests of the limited key that no server refuses, whatever the others hold in advance."""
        is_lost = self.plan.has("deaths", "disk")  # with what a server held in advance
        return 0 if is_lost else PER_MINUTE - IN_ADVANCE * len(self.servers)

    def had_disk_fault(self, time: float) -> bool:
        """Return True if changes may have waited for the disk at a time."""
        return any(begin <= time <= end + AFTERMATH_SECONDS for begin, end in self._disk_faults)

    # Faults

    def _delay(self, name: str) -> float:
        now = self.loop.time()
        if not name.startswith("store"):
            return 0.0
        if name == "store-write" and now < self.full_until:
            raise WorkFault(self.store.full(), is_late=False)
        if now < self.lost_until and self.draw.random() < self.lost_share:
            is_late = self.draw.random() < 0.5
            raise WorkFault(self.store.lost(), is_late=is_late)
        if now < self.slow_until:
            return self.draw.uniform(0.1, 3.0)
        return self.draw.uniform(0.0, COMMIT_SECONDS) if name == "store-write" else 0.0

    def _slow_disk(self, draw: random.Random) -> None:
        self.slow_until = self._disk_fault(draw.uniform(1.0, 20.0))

    def _full_disk(self, draw: random.Random) -> None:
        self.full_until = self._disk_fault(draw.uniform(0.5, 15.0))

    def _lost_commits(self, draw: random.Random) -> None:
        self.lost_share = draw.choice((0.1, 0.5))
        self.lost_until = self._disk_fault(draw.uniform(0.5, 30.0))

    def _disk_fault(self, seconds: float) -> float:
        until = self.loop.time() + seconds
        self._disk_faults.append((self.loop.time(), until))
        return until

    def _break(self, draw: random.Random) -> None:
        def is_chosen(end: End) -> bool:
            return end.process in processes

        processes = [server.process for server in self.servers if server.process]
        self.loop.network.break_one(draw, is_chosen)

    def _cut(self, draw: random.Random) -> None:
        """Let two servers not reach each other for a while, or a server and a client or a receiver of webhooks."""
        names = [HOOKS_HOST, *(server.host for server in self.servers)] + [
            name for name, task in self._clients.items() if not task.done()
        ]
        pair = frozenset((draw.choice([server.host for server in self.servers]), draw.choice(names)))
        self.loop.network.apart.add(pair)
        self.loop.call_later(draw.uniform(0.5, 30.0), self.loop.network.apart.discard, pair)

    def _pause(self, draw: random.Random) -> None:
        """Stop a process as SIGSTOP does, for less or more than the time after which it counts as dead."""
        if process := draw.choice(self.servers).process:
            process.paused_until = self.loop.time() + draw.choice((0.3, 3.0, 25.0))

    def _unhook(self, draw: random.Random) -> None:
        self.hooks.fail(draw)

    def _kill(self, draw: random.Random) -> None:
        self._end(draw.choice(self.servers), draw)

    def _doom(self, draw: random.Random) -> None:
        """Kill a server after some of its callbacks, which is between any two steps of its work."""
        server = draw.choice(self.servers)
        if server.process:
            server.process.steps_left = draw.choice((1, 30, 300, 2000)) + draw.randrange(300)
            server.process.at_step = partial(self._end, server, draw)

    def _strike(self, draw: random.Random) -> None:
        """Kill a server in the moment in which a client has got something of it."""
        self._strikes.append((draw.choice(("id", "id", "end", "answer")), draw.choice((1, 1, 1, 2, 4)), draw))

    def saw(self, what: str, host: str | None) -> None:
        """Take note that a client has got an id, the end of a stream or an answer of a server."""
        for each in tuple(self._strikes):
            awaited, times, draw = each
            if awaited != what:
                continue
            self._strikes.remove(each)
            if times > 1:
                self._strikes.append((awaited, times - 1, draw))
                continue
            for server in self.servers:
                if server.host == host and server.process:
                    self._end(server, draw)

    def _end(self, server: SimulatedServer, draw: random.Random) -> None:
        self.note(f"{server.host} is killed")
        server.kill(resets=draw.random() < 0.5)
        self._restart(server, draw.choice((0.1, 2.0, 30.0)))

    def _stop(self, draw: random.Random) -> None:
        """Stop a server as SIGTERM does, and start it again."""
        server = draw.choice(self.servers)
        stopping = self.loop.create_task(server.stop())
        self._restarts.add(stopping)
        stopping.add_done_callback(partial(self._stopped, server, draw.choice((0.1, 2.0, 30.0))))

    def _stopped(self, server: SimulatedServer, seconds: float, stopping: asyncio.Task[None]) -> None:
        self._restarts.discard(stopping)
        if error := stopping.exception():
            self.loop.call_exception_handler({"message": "a server stopped with an error", "exception": error})
        self._restart(server, seconds)

    def _restart(self, server: SimulatedServer, seconds: float) -> None:
        async def restart() -> None:
            await asyncio.sleep(seconds)
            server.start()
            self.note(f"{server.host} starts")

        restarting = self.loop.create_task(restart())
        self._restarts.add(restarting)
        restarting.add_done_callback(self._restarts.discard)


def _prepare(folder: Path) -> None:
    """Make the folder of a simulation, with the keys and limits of its servers, and no store."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    options = {owner: f"limits={LIMITED}" if owner == LIMITED else f"webhook={hook_url(owner)}" for owner in KEYS}
    lines = [f"{key} {options[owner]}" for owner, key in KEYS.items()]
    (folder / "keys").write_text("\n".join(lines))
    (folder / "keys").chmod(0o600)
    limits = f"[{LIMITED}]\nresponses = {AT_ONCE}\nrequests_per_minute = {PER_MINUTE}\n"
    (folder / "limits.toml").write_text(limits)

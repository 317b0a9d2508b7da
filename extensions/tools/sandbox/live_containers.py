"""The containers of this server: each has a folder, and a process of Python and one of the shell in it.

A process starts with the first call that needs it.  The calls of a container run one after another, also those of
several responses.  A slot for a sandbox is held during a call only.  Between calls the threads of Python are stopped,
so that an idle container takes memory and no processor.  Idle containers are bounded by the number of all containers:
the oldest one makes room for a new one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.sandbox.folder import CHUNK, Folder, sweep
from penstock.extensions.tools.sandbox.plan import Kind, Plan
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.process import Process, SandboxDied
from penstock.extensions.tools.sandbox.stored_containers import StoredContainers
from penstock.pipeline import metrics
from penstock.pipeline.errors import StageError, StoredFileNotFound, StoreFailed
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import ContainerUse
from penstock.pipeline.tasks import uncut
from penstock.services.containers import (
    MEMORY,
    TTL,
    Described,
    FolderFull,
    FoundFile,
    LiveContainer,
    MemoryLimit,
    OwnerLimits,
    Recorded,
    TooManyContainers,
    no_owner_limits,
)
from penstock.services.slots import Limit, Slots, sandbox_slots, unlimited
from penstock.services.store.store import Store
from penstock.services.tools import HostSettings

PER_SLOT: Final = 2
"""Containers of a server for each slot, as those that are idle hold none."""


@dataclass(eq=False)
class OpenContainer:
    """A container of this server; only `OpenContainers` makes and ends one."""

    known: Described
    """The container as it was made."""
    folder: Folder
    plan: Plan
    """The plan of its sandboxes."""
    users: int = 0
    """The responses and requests that use it: only an idle one, without users, ends of itself."""
    uploaded: set[str] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    """The files of the store that were put into the folder."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call."""
    processes: dict[Kind, Process] = field(default_factory=dict)
    used_at: float = 0.0
    ending: asyncio.Task[None] | None = None
    """The end of the container, from its beginning on."""
    expiry: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        """True if no call can run in it any more."""
        return self.ending is not None

    @property
    def described(self) -> Described:
        """The container as it is now."""
        return replace(self.known, last_active_at=self.used_at, is_live=not self.has_ended)

    @property
    def home(self) -> str:
        """The path of the folder for code in the container."""
        return self.plan.home(self.folder.path)

    async def files(self) -> list[FoundFile]:
        """Return the files in the folder, in the order of their paths."""
        return await asyncio.to_thread(self.folder.files)

    async def content(self, path: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file as long as it is now; raises `NoSuchFile` before the first piece."""
        file = await uncut(partial(self.folder.open, path), os.close)
        try:
            left = os.fstat(file).st_size
            while left > 0 and (data := await uncut(partial(os.read, file, min(CHUNK, left)))):
                left -= len(data)
                yield data
        finally:
            os.close(file)

    @asynccontextmanager
    async def uploading(self) -> AsyncGenerator[FolderUpload, None]:
        """Receive a file for the length of a block; nothing is left of it unless the block finishes it."""
        room = self.plan.limits.disk - sum(file.size for file in await self.files())
        upload = FolderUpload(self, *(await uncut(self.folder.begin, self._drop_begun)), room)
        try:
            yield upload
        finally:
            os.close(upload.file)
            if not upload.is_finished:
                # The client may leave while it sends the file, and this task may be cancelled once more.
                await asyncio.shield(asyncio.to_thread(upload.folder.abandon, upload.hidden))

    def _drop_begun(self, begun: tuple[int, str]) -> None:
        file, hidden = begun
        os.close(file)
        asyncio.get_running_loop().run_in_executor(None, self.folder.abandon, hidden)

    async def delete(self, path: str) -> None:
        """Delete a file; raises `NoSuchFile`."""
        await asyncio.to_thread(self.folder.delete, path)
        self.uploaded.discard(path)

    async def drop(self, kind: Kind) -> None:
        """End the process of a kind and wait for it; the next call starts a new one in the same folder.

        A folder that has exceeded its limits is emptied: no process could work in it.
        """
        if (process := self.processes.pop(kind, None)) is None:
            return
        if not self.has_ended:
            metrics.SANDBOXES_KILLED.labels(process.excess or ("timeout" if process.alive else "died")).inc()
        await process.end()
        if process.excess == "disk" and not self.has_ended:
            for other in list(self.processes):
                await self.processes.pop(other).end()
            full, self.folder = self.folder, await asyncio.to_thread(Folder, drops_user=bool(self.folder.user))
            await full.remove()


class FolderUpload:
    """A file on its way into the folder of a container."""

    def __init__(self, container: OpenContainer, file: int, hidden: str, room: int) -> None:
        self.folder = container.folder
        self.file = file
        self.hidden = hidden
        self.is_finished = False
        self._container = container
        self._room = room

    async def write(self, data: bytes) -> None:
        """Append bytes; raises `FolderFull`."""
        self._room -= len(data)
        if self._room < 0:
            raise FolderFull
        try:
            await uncut(partial(write_all, self.file, data))
        except OSError as error:
            raise FolderFull from error

    async def finish(self, name: str) -> FoundFile:
        """Give the file its name, in the place of one that has it; raises `FolderFull`."""
        found = await asyncio.to_thread(self.folder.finish, self.hidden, name)
        self.is_finished = True
        self._container.uploaded.add(name)
        return found


@dataclass
class OpenContainers:
    """The containers of this server, at most ``PER_SLOT`` for each of the ``slots``.

    An owner may have half of them, and no more than ``limits_of`` allows.  ``limit`` limits the calls of an owner that
    run at once.  ``sandboxes`` has the kinds of sandboxes that work here.
    """

    slots: Slots = field(default_factory=sandbox_slots)
    limit: Limit = unlimited
    ttl: float = TTL
    memory: MemoryLimit = "4g"
    limits_of: Callable[[str], OwnerLimits] = no_owner_limits
    store: Store | None = None
    """The store, whose files may be put into containers, and which records these."""
    call_seconds: float = 120.0
    """Seconds that a call may take."""
    sandboxes: dict[Kind, Sandbox] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _live: dict[str, OpenContainer] = field(default_factory=dict)
    _making: dict[str, str] = field(default_factory=dict)
    """The owners of the containers that are being made, by id."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_closed: bool = False

    @property
    def _ledger(self) -> StoredContainers | None:
        return self.store.part(StoredContainers) if self.store else None

    @property
    def are_offered(self) -> bool:
        """True if a sandbox works on this machine."""
        return bool(self.sandboxes)

    @property
    def largest_file(self) -> int:
        """Bytes of all files of a container."""
        return self._plan().limits.disk

    @property
    def most(self) -> int:
        """The most containers of this server."""
        return PER_SLOT * self.slots.limit

    def get(self, container_id: str, owner: str) -> OpenContainer | None:
        """Return the container of an owner; None if it is not here, or has ended."""
        container = self._live.get(container_id)
        return container if container and container.known.owner == owner else None

    def of(self, owner: str) -> list[OpenContainer]:
        """Return the containers of an owner, the oldest first."""
        return [container for container in self._live.values() if container.known.owner == owner]

    async def elsewhere(self, container_ids: Sequence[str], owner: str) -> Mapping[str, Recorded]:
        """Return the living containers of an owner that other servers of the store have, by id."""
        return await self._ledger.elsewhere(container_ids, owner) if self._ledger else {}

    async def create(
        self, container_id: str, owner: str, name: str, ttl: float, memory_limit: MemoryLimit | None
    ) -> OpenContainer:
        """Make a container at once; raises `TooManyContainers`."""
        now = self.clock()
        described = Described(
            container_id, owner=owner, name=name, created_at=now, last_active_at=now, ttl=ttl, memory_limit=memory_limit
        )
        container = await self.enter(described, waits=False)
        await self.leave(container)
        return container

    @asynccontextmanager
    async def used(self, container: LiveContainer) -> AsyncGenerator[None, None]:
        """Keep a container from expiring for the length of a block."""
        assert isinstance(container, OpenContainer)
        self._count_user(container)
        try:
            yield
        finally:
            await self.leave(container)

    async def place(self, container: LiveContainer, file_ids: Sequence[str]) -> None:
        """Put files of the store into the folder, each once; raises `FolderFull`, or `StoredFileNotFound`."""
        assert isinstance(container, OpenContainer)
        for file_id in file_ids:
            if file_id in container.placed:
                continue
            stored = await self.store.part(StoredFiles).get(file_id, container.known.owner) if self.store else None
            if self.store is None or stored is None:
                raise StoredFileNotFound(shortened(file_id), param=None)
            async with container.uploading() as upload:
                async for piece in self.store.part(StoredFiles).chunks(stored):
                    await upload.write(piece)
                await upload.finish(stored.filename)
            container.placed.add(file_id)

    async def end(self, container: LiveContainer) -> None:
        """End a container with its processes and files; calls that run in it fail."""
        assert isinstance(container, OpenContainer)
        await asyncio.shield(self._begin_end(container))  # a client that leaves must not cancel the end

    async def close(self) -> None:
        """End all containers, and make no more."""
        self._is_closed = True
        await self._notify()
        for container in list(self._live.values()):
            self._begin_end(container)
        await asyncio.gather(*self._tasks)

    # The calls of responses

    async def enter(self, wanted: Described, *, waits: bool = True) -> OpenContainer:
        """Return the container with an id, which is made if there is none, and count a user until `leave`.

        If the owner has as many as it may, the oldest idle one ends.  If there is none, this waits for one, or raises
        `TooManyContainers`.
        """
        async with self._changed:
            while (found := self.get(wanted.id, wanted.owner)) is None:
                if self._is_closed:
                    raise SandboxDied("the server is stopping")
                if wanted.id not in self._making:
                    if self._makes_room(wanted.owner):
                        break
                    if not waits:
                        raise TooManyContainers
                await self._changed.wait()
            else:
                self._count_user(found)
                return found
            self._making[wanted.id] = wanted.owner
        try:
            folder = await new_folder()
            now = self.clock()
            plan = self._plan().within(disk=self.limits_of(wanted.owner).disk)
            known = replace(wanted, created_at=now, ttl=min(wanted.ttl, self.ttl))
            made = self._live[wanted.id] = OpenContainer(known, folder, plan, used_at=now)
            self._count_user(made)
            metrics.CONTAINERS.inc()
        finally:
            del self._making[wanted.id]
            await self._notify()
        if self._ledger:
            try:
                with suppress(StoreFailed):  # other servers then do not find it
                    await self._ledger.add(known)
            except BaseException:  # the client has left, or the time of the call is over: no caller would leave it
                await self.leave(made)
                raise
        return made

    async def leave(self, container: OpenContainer) -> None:
        """Count a user less: from the last one on, the container is idle."""
        container.users -= 1
        container.used_at = self.clock()
        if container.users or container.has_ended:
            return
        container.expiry = asyncio.get_running_loop().call_later(container.known.ttl, self._begin_end, container)
        await self._notify()
        if self._ledger:
            with suppress(StoreFailed):  # it looks idle for longer than it is
                await self._ledger.touch(container.known.id, container.used_at)

    @asynccontextmanager
    async def process(self, container: OpenContainer, kind: Kind, seconds: float) -> AsyncGenerator[Process, None]:
        """Hold a slot, and give the process of a kind, for the length of a block; the caller has the turn.

        A free slot, and the start of the process if there is none, may take ``seconds``.  Raises `SandboxDied`.
        """
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(seconds):
                    await held.enter_async_context(place_at_work(container.known.owner, self.slots, self.limit))
                    process = await self._started(container, kind)
            except TimeoutError:
                raise SandboxDied("no sandbox was free in time") from None
            except OSError as exc:
                raise SandboxDied(f"it cannot be started: {exc.strerror}") from None
            process.resume()
            try:
                yield process
            finally:
                if process.alive:
                    process.pause()

    async def _started(self, container: OpenContainer, kind: Kind) -> Process:
        if kind not in container.processes and not container.has_ended:
            limit, disk = container.known.memory_limit, container.plan.limits.disk
            started = await self.sandboxes[kind].start(container.folder, MEMORY[limit] if limit else None, disk)
            container.processes[kind] = started
        if container.has_ended:
            await container.drop(kind)
            raise SandboxDied("the container has ended")
        if not container.processes[kind].alive:
            raise SandboxDied("it has ended since the latest call")
        return container.processes[kind]

    # Life

    def _plan(self) -> Plan:
        """Return the plan of one kind of sandbox; those of the others have the same limits and mode."""
        return next(iter(self.sandboxes.values())).plan

    def _count_user(self, container: OpenContainer) -> None:
        container.users += 1
        container.used_at = self.clock()
        if container.expiry:
            container.expiry.cancel()
            container.expiry = None

    def _makes_room(self, owner: str) -> bool:
        """Return True if an owner may have one more container, for which the oldest idle one may have to end."""
        own = self.of(owner)
        making = list(self._making.values())
        share = self.most if not owner else -(-self.most // 2)
        if len(own) + making.count(owner) >= min(self.limits_of(owner).number or share, share):
            return self._ends_idle(own)
        return len(self._live) + len(making) < self.most or self._ends_idle(self._live.values())

    def _ends_idle(self, among: Iterable[OpenContainer]) -> bool:
        idle = min((each for each in among if not each.users), key=lambda each: each.used_at, default=None)
        if idle is not None:
            self._begin_end(idle)
        return idle is not None

    def _begin_end(self, container: OpenContainer) -> asyncio.Task[None]:
        if container.ending:
            return container.ending
        del self._live[container.known.id]
        metrics.CONTAINERS.dec()
        if container.expiry:
            container.expiry.cancel()
        container.ending = asyncio.create_task(self._clean_up(container))
        self._tasks.add(container.ending)
        container.ending.add_done_callback(self._tasks.discard)
        return container.ending

    async def _clean_up(self, container: OpenContainer) -> None:
        for process in list(container.processes.values()):
            process.kill()
        async with container.turn:
            for kind in list(container.processes):
                await container.drop(kind)
        await container.folder.remove()
        await self._notify()
        if self._ledger:
            with suppress(StoreFailed):  # its row goes with those of dead servers
                await self._ledger.end(container.known.id)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@dataclass(frozen=True)
class Turn:
    """The turn of a call in a container."""

    container: OpenContainer
    process: Process
    seconds: float
    """The time that is left to the call."""


class Lease:
    """One response's use of a container by one tool, from its first call until `close`."""

    def __init__(self, containers: OpenContainers, kind: Kind, use: ContainerUse, owner: str) -> None:
        self.container: OpenContainer | None = None
        """The container, from the first call on."""
        self.limits = containers.sandboxes[kind].plan.limits
        self._containers = containers
        self._kind: Kind = kind
        self._use = use
        self._owner = owner
        self._is_closed = False
        self._running: Process | None = None

    @asynccontextmanager
    async def call(self, seconds: float) -> AsyncGenerator[Turn, None]:
        """Give the sandbox for one call, once it is its turn; raises `SandboxDied`.

        The sandbox ends if the block is cancelled, or raises `SandboxDied`; the folder of its container stays.
        """
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(seconds):
                container = await self._entered()
        except TimeoutError:
            raise SandboxDied("no container was free in time") from None
        async with container.turn:
            until = now() + seconds
            try:
                await self._place(container)
                async with self._containers.process(container, self._kind, seconds) as process:
                    self._check_open()
                    self._running = process
                    yield Turn(container, process, until - now())
            except (SandboxDied, asyncio.CancelledError):
                known = container.processes.get(self._kind)
                if self._running or (known and not known.alive):
                    await asyncio.shield(container.drop(self._kind))  # the next call may start once it has ended
                raise
            finally:
                self._running = None

    async def close(self) -> None:
        """Stop the call that runs, and let the container be."""
        self._is_closed = True
        if self._running:
            self._running.kill()
        container, self.container = self.container, None
        if container:
            await self._containers.leave(container)

    async def _place(self, container: OpenContainer) -> None:
        """Put the files of the request into the folder."""
        try:
            await self._containers.place(container, self._use.file_ids)
        except FolderFull:
            raise SandboxDied("its folder has no room for the files of the request") from None
        except StageError as error:
            raise SandboxDied(error.message) from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxDied("the response has ended")

    async def _entered(self) -> OpenContainer:
        self._check_open()
        if self.container is None or self.container.has_ended:
            if not self._use.is_own and not self._containers.get(self._use.id, self._owner):
                raise SandboxDied("the container has ended")
            now = self._containers.clock()
            ttl = self._containers.ttl
            wanted = Described(
                self._use.id,
                owner=self._owner,
                name="",
                created_at=now,
                last_active_at=now,
                ttl=ttl,
                memory_limit=self._use.memory_limit,
            )
            entered = await self._containers.enter(wanted)
            if self._is_closed:  # the response may have ended while the container was made
                await self._containers.leave(entered)
                self._check_open()
            if self.container and not self.container.has_ended:  # another call was faster
                await self._containers.leave(entered)
            else:
                self.container = entered
        return self.container


def write_all(file: int, data: bytes) -> None:
    """Write all of the data to a descriptor."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


@asynccontextmanager
async def place_at_work(owner: str, slots: Slots, limit: Limit) -> AsyncGenerator[None, None]:
    """Hold one of the places for sandboxes at work for the length of a block, after waiting for it."""
    async with AsyncExitStack() as held:
        with metrics.SANDBOXES_WAITING.track_inprogress():
            await held.enter_async_context(limit(owner))
            await held.enter_async_context(slots.slot(owner))
        held.enter_context(metrics.SANDBOXES.track_inprogress())
        yield


async def new_folder() -> Folder:
    """Return a new folder; if the caller is cancelled, it is removed."""
    making = asyncio.create_task(asyncio.to_thread(Folder, drops_user=os.geteuid() == 0))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await (await making).remove()
        raise


async def containers(settings: HostSettings) -> OpenContainers | None:
    """Return the containers of this server, none yet; what a killed server has left is removed."""
    if settings.slots is None:
        return None
    await sweep()
    return OpenContainers(
        settings.slots,
        limit=settings.limit,
        ttl=settings.container_ttl,
        memory=settings.container_memory,
        limits_of=settings.container_limits,
        store=settings.store,
        call_seconds=settings.call_seconds,
    )

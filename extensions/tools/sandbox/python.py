"""The host of ``python``: each container has its own Python, and its variables persist between calls."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.extensions.tools.sandbox.kinds import python_description
from penstock.extensions.tools.sandbox.live_containers import Lease, OpenContainer, OpenContainers, Turn
from penstock.extensions.tools.sandbox.plan import Kind
from penstock.extensions.tools.sandbox.probe import offered
from penstock.extensions.tools.sandbox.process import Process, SandboxDied
from penstock.pipeline.frames import CodeOutputs, ResolvedRequest
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.params.request import OUTPUTS
from penstock.services.containers import FoundFile, NoSuchFile
from penstock.services.tools import ContainerFiles, Declaration, HostSettings, ToolResult

_INTERRUPTS = 2
"""Interrupts of code that runs too long before it is killed."""
_INTERRUPT_SECONDS: Final = 2.5
"""Seconds that interrupted code may take to end: on a busy machine it waits for its turn."""
_NOTHING: Final = "(The code wrote nothing.)"

MOST_IMAGES: Final = 8
"""Images of one call among its outputs."""

MOST_CITABLE: Final = 1_000
"""Files of a container that a message may cite, those that were changed last."""

LARGEST_IMAGE: Final = 2**21
"""Bytes of such an image."""

_KINDS: Final = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
"""The types of images by the bytes that they begin with."""

_SUFFIXES: Final = (".png", ".jpg", ".jpeg")


class SandboxHost:
    """Gives each response the sandbox of its container from its first call on, when a slot is free.

    ``describe`` returns the words of the tool from the seconds of a call, and from the place of its files.
    """

    def __init__(self, kind: Kind, containers: OpenContainers, describe: Callable[..., str]) -> None:
        self._kind: Kind = kind
        self._containers = containers
        self._describe = describe

    async def declaration(self, request: ResolvedRequest, seconds: float) -> Declaration:
        """Return the tool with the facts of the sandbox that works on this machine."""
        has_drive = self._containers.sandboxes[self._kind].has_home
        return Declaration(
            kinds()[self._kind].tools, self._describe(self._containers.call_seconds, has_drive=has_drive)
        )

    def lease(self, request: ResolvedRequest) -> Lease:
        """Return the use of a container by one response; nothing is started yet."""
        facts = request.facts
        return Lease(self._containers, self._kind, facts.container(self._kind), facts.origin.owner)

    async def close(self) -> None:
        """End all containers."""
        await self._containers.close()


class PythonHost(SandboxHost):
    """Runs Python code."""

    def __init__(self, containers: OpenContainers) -> None:
        super().__init__("python", containers, python_description)

    def session(self, request: ResolvedRequest) -> PythonSession:
        return PythonSession(self.lease(request), shows_images=OUTPUTS in request.facts.include)


async def host(settings: HostSettings) -> PythonHost | None:
    """Return the host, if its sandbox works on this machine."""
    containers = settings.containers
    if not isinstance(containers, OpenContainers) or not (sandbox := await offered("python", "Python")):
        return None
    containers.sandboxes["python"] = sandbox
    return PythonHost(containers)


class PythonSession:
    """One response's use of Python in a container."""

    def __init__(self, lease: Lease, *, shows_images: bool = False) -> None:
        self._lease = lease
        self._shows_images = shows_images
        self.files: ContainerFiles | None = None

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        """Run one cell.  An exception in the code is output; a timeout or a dead sandbox is an error."""
        process: Process | None = None
        try:
            async with self._lease.call(seconds) as turn:
                process, container = turn.process, turn.container
                before = await container.files() if self._shows_images else ()
                error = await self._run(turn, text, seconds)
                after = await container.files()
                self.files = files_of(container, after)
                images = await _images(container, _written(before, after)) if self._shows_images else ()
                return _outcome(process.written, error, images)
        except SandboxDied as exc:
            lost = "variables and files" if process and process.excess == "disk" else "variables"
            return _outcome(process.written if process else "", f"The sandbox has ended ({exc}). All {lost} are lost.")

    async def close(self) -> None:
        await self._lease.close()

    async def _run(self, turn: Turn, code: str, seconds: float) -> str | None:
        """Run a cell; return the error if it takes too long."""
        try:
            await turn.process.ask({"code": code}, turn.seconds)
        except TimeoutError:
            late = f"The code ran longer than {seconds:g} seconds"
        else:
            return None
        for _ in range(_INTERRUPTS):  # the first does nothing if the cell has not begun, as on a busy machine
            turn.process.interrupt()
            with suppress(TimeoutError):
                await turn.process.answer(_INTERRUPT_SECONDS)
                return f"{late} and was interrupted. Variables and files are kept."
        await turn.container.drop("python")
        return f"{late} and was killed. All variables are lost."


def files_of(container: OpenContainer, files: Sequence[FoundFile]) -> ContainerFiles | None:
    """Return what a message may cite of the files of a container."""
    latest = sorted(files, key=lambda file: file.changed_at, reverse=True)[:MOST_CITABLE]
    paths = tuple(sorted(file.path for file in latest))
    return ContainerFiles(container.known.id, container.home, paths) if paths else None


def _written(before: Sequence[FoundFile], after: Sequence[FoundFile]) -> Iterator[FoundFile]:
    """Yield the images that a call has written, the oldest first."""
    known = set(before)
    for file in sorted(after, key=lambda each: each.changed_at):
        if file not in known and file.path.lower().endswith(_SUFFIXES) and file.size <= LARGEST_IMAGE:
            yield file


async def _images(container: OpenContainer, files: Iterator[FoundFile]) -> tuple[dict[str, Any], ...]:
    """Return the outputs for images."""
    shown: list[dict[str, Any]] = []
    for file in files:
        if len(shown) == MOST_IMAGES:
            break
        try:
            data = await asyncio.to_thread(container.folder.read, file.path, LARGEST_IMAGE)
        except NoSuchFile:
            continue
        if kind := next((kind for start, kind in _KINDS.items() if data.startswith(start)), None):
            shown.append({"type": "image", "url": f"data:{kind};base64,{base64.b64encode(data).decode()}"})
    return tuple(shown)


def _outcome(written: str, error: str | None = None, images: Sequence[dict[str, Any]] = ()) -> ToolResult:
    logs = ({"type": "logs", "logs": written},) if written else ()
    outputs = (*logs, *images)
    result = written or ("" if error else _NOTHING)
    return ToolResult(result=result, error=error, data=CodeOutputs(outputs) if outputs else None)

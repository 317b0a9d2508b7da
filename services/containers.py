"""The interface of containers: sandboxes that outlive a response, each with an id, an owner and a folder.

The server that made a container has it.  The others of the same store know of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal, Protocol, TypeAlias

MemoryLimit: TypeAlias = Literal["1g", "4g", "16g", "64g"]
"""The limits of memory that a client may give."""

MEMORY: Final[dict[MemoryLimit, int]] = {"1g": 1 << 30, "4g": 4 << 30, "16g": 16 << 30, "64g": 64 << 30}
"""Their bytes."""

TTL: Final = 1200.0
"""Seconds without use after which a container ends, as at OpenAI."""


HOME: Final = "/mnt/data"
"""The folder of a container, as its code and clients see it.  Models were trained to keep files there."""


class NoSuchFile(Exception):
    """There is no such file in the folder, or the server may not read it."""


class FolderFull(Exception):
    """The folder has no room for a file."""


class TooManyContainers(Exception):
    """All containers that an owner may have are in use."""


@dataclass(frozen=True)
class OwnerLimits:
    """The limits of the containers of an owner; None where only the server has one."""

    number: int | None = None
    """Containers on one server."""
    disk: int | None = None
    """Bytes of all files of a container."""


NO_OWNER_LIMITS: Final = OwnerLimits()


def no_owner_limits(_: str) -> OwnerLimits:
    """Limit the containers of no owner."""
    return NO_OWNER_LIMITS


@dataclass(frozen=True)
class Described:
    """A container as its owner sees it; times are in seconds since 1970."""

    id: str
    owner: str
    name: str
    created_at: float
    last_active_at: float
    ttl: float
    """Seconds without use after which it ends."""
    memory_limit: MemoryLimit | None = None
    is_live: bool = True


@dataclass(frozen=True)
class Recorded:
    """A container, and the server of the store that has it."""

    described: Described
    server_id: str
    url: str
    """The address of the server for the others."""


@dataclass(frozen=True)
class FoundFile:
    """A file of a container."""

    path: str
    """Its path in the folder."""
    size: int
    """Bytes."""
    changed_at: int
    """Nanoseconds since 1970."""
    inode: int = 0


def file_id(container_id: str, path: str) -> str:
    """Return the id of the file with a path in the folder of a container."""
    return f"cfile_{sha256(f'{container_id}/{path}'.encode()).hexdigest()[:32]}"


class ContainerUpload(Protocol):
    """A file on its way into a container."""

    async def write(self, data: bytes) -> None:
        """Append bytes; raises `FolderFull`."""
        ...

    async def finish(self, name: str) -> FoundFile:
        """Give the file its name, in the place of one that has it; raises `FolderFull`."""
        ...


class LiveContainer(Protocol):
    """A container of this server."""

    @property
    def described(self) -> Described:
        """The container as it is now."""
        ...

    @property
    def uploaded(self) -> set[str]:
        """The paths of the files that came from clients."""
        ...

    async def files(self) -> Sequence[FoundFile]:
        """Return the files in the folder, in the order of their paths."""
        ...

    def content(self, path: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file; raises `NoSuchFile` before the first piece."""
        ...

    def uploading(self) -> AbstractAsyncContextManager[ContainerUpload]:
        """Return a block that receives a file; nothing is left of it unless the block finishes it."""
        ...

    async def delete(self, path: str) -> None:
        """Delete a file; raises `NoSuchFile`."""
        ...


class Containers(Protocol):
    """The containers of this server."""

    @property
    def are_offered(self) -> bool:
        """True if a sandbox works on this machine."""
        ...

    @property
    def ttl(self) -> float:
        """Seconds without use after which a container ends; one may have less."""
        ...

    @property
    def largest_file(self) -> int:
        """Bytes of all files of a container."""
        ...

    @property
    def memory(self) -> MemoryLimit:
        """The largest limit of memory that a client may give."""
        ...

    def get(self, container_id: str, owner: str) -> LiveContainer | None:
        """Return the container of an owner; None if it is not here, or has ended."""
        ...

    def of(self, owner: str) -> Sequence[LiveContainer]:
        """Return the containers of an owner."""
        ...

    async def elsewhere(self, container_ids: Sequence[str], owner: str) -> Mapping[str, Recorded]:
        """Return the living containers of an owner that other servers of the store have, by id."""
        ...

    async def create(
        self, container_id: str, owner: str, name: str, ttl: float, memory_limit: MemoryLimit | None
    ) -> LiveContainer:
        """Make a container at once; raises `TooManyContainers`."""
        ...

    def used(self, container: LiveContainer) -> AbstractAsyncContextManager[None]:
        """Return a block that counts as a use: the container does not expire before its end."""
        ...

    async def place(self, container: LiveContainer, file_ids: Sequence[str]) -> None:
        """Put files of the store into the folder, each once; raises `FolderFull`, or `StoredFileNotFound`."""
        ...

    async def end(self, container: LiveContainer) -> None:
        """End a container with its processes and files; calls that run in it fail."""
        ...

    async def close(self) -> None:
        """End all containers, and make no more."""
        ...

"""The parts of the store that packages bring along: tables of their own, and what is done with these beside requests.

Each part is a class, and an entry point of the group ``penstock.store_parts``.  Nothing here imports one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from penstock.pipeline.plugins import STORE_PARTS, WrongPlugin, installed, value_named
from penstock.services.store.database import Statement
from penstock.services.store.migrations import Statements
from penstock.services.use import Use

if TYPE_CHECKING:
    from penstock.services.store.writer import StoreContext


class StorePart:
    """One server's access to the tables of a package; `Store.part` returns it."""

    name: ClassVar[str]
    """The name under which a database keeps the number of statements of `tables` that it has executed."""
    tables: ClassVar[Statements] = ()
    """The statements that make the tables, to which others are only ever appended (see ``migrations.py``)."""
    queued: ClassVar[tuple[str, ...]] = ()
    """The statements that wait in the queue, in their order of execution (see ``statements.py``).

    They are executed before responses end.
    """
    counted: ClassVar[tuple[str, ...]] = ()
    """The tables whose ``bytes`` count as those of the ``owner`` of a row."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    async def has_file(self, file_id: str, owner: str) -> bool:
        """Return True if this part has a file of an owner with this id."""
        return False

    def used(self, use: Use, response_id: str | None) -> Iterable[Statement]:
        """Return the statements that note what an answer has used; they are among the ``queued``.

        Executed twice they have no further effect, as a commit of unknown outcome is repeated.  They are written
        together with the end of a stored response, whose ``response_id`` is given, and before it: they change nothing
        unless the row of the response is still this server's (see ``NOTIFY`` in ``statements.py``).
        """
        return ()

    async def recover(self) -> None:
        """Take back what dead servers have left unfinished; raises `StoreFailed`."""

    async def sweep(self) -> None:
        """Delete what has expired; raises `StoreFailed`."""


@cache
def installed_parts() -> tuple[type[StorePart], ...]:
    """Return the parts that are installed, by name; raises `WrongPlugin`."""
    parts = [value_named(name, "the store", STORE_PARTS, type) for name in sorted(installed(STORE_PARTS))]
    for part in parts:
        if not issubclass(part, StorePart):
            raise WrongPlugin(part.__qualname__, "it is no StorePart", "the store")
    return tuple(parts)


def tables_of_parts() -> dict[str, Statements]:
    """Return the statements that make the tables of the installed parts, by the name of the part."""
    return {part.name: part.tables for part in installed_parts()}


class ShelvedFile(Protocol):
    """A file on a `FileShelf`; times are in seconds since 1970."""

    @property
    def id(self) -> str: ...
    @property
    def filename(self) -> str: ...
    @property
    def purpose(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def created_at(self) -> float: ...
    @property
    def expires_at(self) -> float | None: ...


class NewFile(Protocol):
    """A file on its way onto a `FileShelf`."""

    @property
    def id(self) -> str: ...
    @property
    def created_at(self) -> float: ...
    async def write(self, data: bytes) -> None:
        """Append bytes; raises `StoreFailed`."""
        ...

    async def finish(
        self, filename: str, purpose: str, media_type: str = ..., expires_at: float | None = ...
    ) -> ShelvedFile:
        """Make the file visible, durably; raises `StoreFailed`."""
        ...


@runtime_checkable
class FileShelf(Protocol):
    """The part that keeps files, for packages that may not import the one that brings it."""

    async def get(self, file_id: str, owner: str) -> ShelvedFile | None:
        """Return a file; None if there is none."""
        ...

    def chunks(self, file: Any, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Yield the bytes of a file."""
        ...

    def uploading(
        self, owner: str, created_at: float | None = None, size: int = 0
    ) -> AbstractAsyncContextManager[NewFile]:
        """Receive a new file for the length of a block; nothing is left of it unless the block finishes it."""
        ...

    async def delete(self, file_id: str, owner: str) -> bool:
        """Delete a file durably; False if there is none."""
        ...


@runtime_checkable
class RemembersOwners(Protocol):
    """The part that remembers what holds for owners that no key stands for, for what they have left running."""

    def words_of(self, owner: str) -> str | None:
        """Return the words that an owner had last, as those of a key; None if it is not known."""
        ...

"""The parts of the store that packages bring along: tables of their own, and what is done with these beside requests.

Each part is a class, and an entry point of the group ``penstock.store_parts``.  Nothing here imports one.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

from penstock.pipeline.plugins import STORE_PARTS, WrongPlugin, installed, value_named
from penstock.services.store.migrations import Statements

if TYPE_CHECKING:
    from penstock.services.store.writer import StoreContext


class StorePart:
    """One server's access to the tables of a package; `Store.part` returns it."""

    name: ClassVar[str]
    """The name under which a database keeps the number of statements of `tables` that it has executed."""
    tables: ClassVar[Statements] = ()
    """The statements that make the tables, to which others are only ever appended (see ``migrations.py``)."""
    queued: ClassVar[tuple[str, ...]] = ()
    """The statements that wait in the queue, in their order of execution (see ``statements.py``)."""
    counted: ClassVar[tuple[str, ...]] = ()
    """The tables whose ``bytes`` count as those of the ``owner`` of a row."""

    def __init__(self, context: StoreContext) -> None:
        self.context = context

    async def has_file(self, file_id: str, owner: str) -> bool:
        """Return True if this part has a file of an owner with this id."""
        return False

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

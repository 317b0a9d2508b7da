"""The index of recordings: to which session each belongs, by the ids of its request, or by its tokens."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.extensions.rollouts.lines import Unusable
from penstock.extensions.rollouts.prefixes import Ends, hashes_of
from penstock.extensions.rollouts.reading import Head, read_turns
from penstock.pipeline.recordings.format import UnreadableRecording


class Skipped(msgspec.Struct, frozen=True):
    """A recording that is in no path."""

    folder: str
    reason: str


_TABLES = """
CREATE TABLE IF NOT EXISTS heads (
  number INTEGER PRIMARY KEY, response TEXT UNIQUE, at REAL, scope INTEGER, name TEXT, previous TEXT, opening TEXT,
  home INTEGER, head BLOB
);
CREATE INDEX IF NOT EXISTS by_time ON heads (at, response);
CREATE INDEX IF NOT EXISTS by_name ON heads (name);
CREATE INDEX IF NOT EXISTS by_home ON heads (home, at, response);
CREATE TABLE IF NOT EXISTS scopes (number INTEGER PRIMARY KEY, key TEXT, model TEXT, UNIQUE (key, model));
CREATE TABLE IF NOT EXISTS named (scope INTEGER, name TEXT, home INTEGER, PRIMARY KEY (scope, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ends (scope INTEGER, hash INTEGER, home INTEGER, PRIMARY KEY (scope, hash)) WITHOUT ROWID;
"""


_PLACELESS = "SELECT number, scope, name, previous, opening, head FROM heads WHERE home IS NULL"


def temporary() -> sqlite3.Connection:
    """Open a database that is deleted when it is closed."""
    base = sqlite3.connect("", isolation_level=None)
    base.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN;")
    return base


class Placeless(NamedTuple):
    """A recording of the index that has no home yet."""

    number: int
    scope: int
    name: str
    previous: str
    opening: str
    packed: bytes


class Index:
    """The recordings by their sessions, in a database; their folders may be relative to ``root``."""

    def __init__(self, base: sqlite3.Connection, root: Path = Path()) -> None:
        self.base = base
        self.root = root
        for statement in filter(str.strip, _TABLES.split(";")):
            base.execute(statement)
        self.read_ends()

    def read_ends(self) -> None:
        """Read the ends of turns again, which another process may have added."""
        self._ends = Ends()
        for (end,) in self.base.execute("SELECT hash FROM ends"):
            self._ends.add(end)

    def close(self) -> None:
        """Close the database."""
        self.base.close()

    def add(self, head: Head) -> None:
        """Add a recording.  Raise `Unusable` if there is one of the same response already."""
        execute = self.base.execute
        execute("INSERT OR IGNORE INTO scopes (key, model) VALUES (?, ?)", (head.key, head.model))
        row = (head.response, head.at, self._scope(head), _named(head), head.previous)
        try:
            execute(
                "INSERT INTO heads (response, at, scope, name, previous, opening, head) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*row, head.opening if head.has_history else "", msgspec.msgpack.encode(head, enc_hook=str)),
            )
        except sqlite3.IntegrityError:
            raise Unusable("there is another recording of the same response") from None

    def group(self) -> list[Skipped]:
        """Place each recording, by time.  Return those that belong nowhere and have no tokens."""
        placed = (self.place(Placeless(*row)) for row in self.base.execute(f"{_PLACELESS} ORDER BY at, response"))
        return [each for each in placed if isinstance(each, Skipped)]

    def placeless(self, after: tuple[float, str], most: int) -> list[Placeless]:
        """Return recordings without a home after a time and a response, by these."""
        rest = "AND (at, response) > (?, ?) ORDER BY at, response LIMIT ?"
        return [Placeless(*row) for row in self.base.execute(f"{_PLACELESS} {rest}", (*after, most))]

    def linked(self, row: Placeless) -> int | None:
        """Return the home that the ids of a recording name, if it is known."""
        if row.name:
            return self._named(row.scope, row.name)
        return self._home_of(row.scope, row.previous)

    def is_orphan(self, row: Placeless) -> bool:
        """True if a recording continues what is not known here, at least by its ids."""
        is_known = self.linked(row) or self._opened(row.scope, row.opening)
        return not row.name and bool(row.previous or row.opening) and not is_known

    def home_of(self, head: Head) -> int | None:
        """Return the home of a recording that is not in the index, as far as it shows without its tokens."""
        scope = self._scope(head)
        row = Placeless(0, scope or 0, name=_named(head), previous=head.previous, opening="", packed=b"")
        if scope is None or row.name:
            return scope and self.linked(row)
        return self.linked(row) or self._opened(scope, head.opening if head.has_history else "")

    def place(self, row: Placeless) -> int | Skipped:
        """Give a recording its home, the number of the first one of its session, and return it."""
        execute, home = self.base.execute, self.linked(row)
        if not row.name:
            head = self.unpacked(row.packed)
            try:
                turns = read_turns(head.folder)
            except (Unusable, UnreadableRecording) as error:
                turns = ()
                if home is None:
                    return Skipped(str(head.folder), str(error))
            for turn in turns:
                hashes = hashes_of(turn.prompt, turn.output)
                read, end = hashes[: len(turn.prompt)], int(hashes[-1])
                home = home or self._extended(row.scope, read) or self._opened(row.scope, row.opening) or row.number
                self._ends.add(end)
                execute("INSERT OR REPLACE INTO ends VALUES (?, ?, ?)", (row.scope, end, home))
            execute("INSERT OR REPLACE INTO named VALUES (?, ?, ?)", (row.scope, f"opening {head.opening}", home))
        elif home is None:
            home = row.number
            execute("INSERT INTO named VALUES (?, ?, ?)", (row.scope, row.name, home))
        execute("UPDATE heads SET home = ? WHERE number = ?", (home, row.number))
        assert home is not None
        return home

    def sessions(self, wanted: str) -> Iterator[tuple[Head, Iterator[Head]]]:
        """Yield the first recording of each session, and all of them, by time."""
        execute = self.base.execute
        homes = "SELECT first.number, first.head FROM heads AS first WHERE first.number = first.home"
        for home, packed in execute(f"{homes} ORDER BY first.at, first.response"):
            head = self.unpacked(packed)
            if wanted in ("", name_of(head)):
                yield head, self.members(home)

    def first(self, home: int) -> Head:
        """Return the recording that a session has its id from."""
        (packed,) = self.base.execute("SELECT head FROM heads WHERE number = ?", (home,)).fetchone()
        return self.unpacked(packed)

    def members(self, home: int) -> Iterator[Head]:
        """Yield all recordings of a session, by time."""
        members = self.base.execute("SELECT head FROM heads WHERE home = ? ORDER BY at, response", (home,))
        return (self.unpacked(member) for (member,) in members)

    def unpacked(self, packed: bytes) -> Head:
        """Return what a recording says of its place."""
        head = _decode_head(packed)
        return replace(head, folder=self.root / head.folder)

    def keys_of(self, session: str) -> set[str]:
        """Return the keys that have a session with an id."""
        statement = """
            SELECT DISTINCT key FROM heads JOIN scopes ON scopes.number = heads.scope
            WHERE heads.name IN ('session ' || ?1, 'conversation ' || ?1) OR heads.response = ?1
        """
        return {key for (key,) in self.base.execute(statement, (session,))}

    def _scope(self, head: Head) -> int | None:
        return self._one("SELECT number FROM scopes WHERE key = ? AND model = ?", head.key, head.model)

    def _named(self, scope: int, name: str) -> int | None:
        return self._one("SELECT home FROM named WHERE scope = ? AND name = ?", scope, name)

    def _home_of(self, scope: int, response: str) -> int | None:
        return self._one("SELECT home FROM heads WHERE scope = ? AND response = ?", scope, response)

    def _extended(self, scope: int, hashes: NDArray[np.int64]) -> int | None:
        for _, end in self._ends.within(hashes):
            if home := self._one("SELECT home FROM ends WHERE scope = ? AND hash = ?", scope, end):
                return home
        return None

    def _opened(self, scope: int, opening: str) -> int | None:
        return self._named(scope, f"opening {opening}") if opening else None

    def _one(self, statement: str, *values: int | str) -> int | None:
        row = self.base.execute(statement, values).fetchone()
        return row[0] if row else None


_decode_head = msgspec.msgpack.Decoder(Head, dec_hook=lambda kind, value: kind(value)).decode


def _named(head: Head) -> str:
    if head.session:
        return f"session {head.session}"
    return f"conversation {head.conversation}" if head.conversation else ""


def name_of(head: Head) -> str:
    """Return the id of the session that begins with a recording."""
    return head.session or head.conversation or head.response

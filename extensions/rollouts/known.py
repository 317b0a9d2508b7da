"""The sessions of a folder in which servers record, by an index on the disk that grows with the recordings.

All servers that record into a folder share its index.  It only repeats what the recordings and the rewards say, but
for what was exported of a session: without the file, the sessions are exported once more.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from penstock.extensions.rollouts.forms import rows
from penstock.extensions.rollouts.index import Index, Placeless, Skipped, name_of
from penstock.extensions.rollouts.lines import Unusable
from penstock.extensions.rollouts.paths import Reward
from penstock.extensions.rollouts.reading import Head, read_head
from penstock.extensions.rollouts.rewards import FILE as REWARDS
from penstock.extensions.rollouts.rewards import Rewards, lines_of, rewarded
from penstock.extensions.rollouts.sessions import assembled
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.recordings.format import FILES, UnreadableRecording
from penstock.pipeline.recordings.response_folder import RESPONSE

logger = logging.getLogger(__name__)

FILE = "rollouts-1.sqlite3"
"""The name of the index in a folder of recordings, with the version of its tables."""

AT_ONCE = 64
"""Recordings that are indexed before other servers, and other requests, may use the index."""

LAST_BYTES = 4096
"""Bytes at the end of a file that have its last line if that is an `End`."""

BUSY_SECONDS = 60.0
"""Seconds that a server waits for another one that uses the index."""

QUIET_SECONDS = 2.0
"""Seconds after the last line in which further files of a recording may come, whose response is written last."""

_TICK = 10**9
"""Nanoseconds in which a folder may change again without another time."""

_LOOKS = 86_400.0
"""Seconds in which a recording that seemed to be over may still go on."""

_NEW, _WHOLE, _SILENT = range(3)
"""The states of recordings: being written, whole, and over without a response, so that another server may go on."""

_FILES = tuple(name for name, _ in FILES.values())

_TABLES = (
    "CREATE TABLE IF NOT EXISTS recordings (name TEXT PRIMARY KEY, state INTEGER, at REAL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_state ON recordings (state, name)",
    """CREATE TABLE IF NOT EXISTS known (
        number INTEGER PRIMARY KEY, home INTEGER UNIQUE, id TEXT UNIQUE, session TEXT, key TEXT, model TEXT,
        began_at REAL, turned_at REAL, done_at REAL, version INTEGER, sent_version INTEGER DEFAULT 0,
        sent TEXT DEFAULT '', sending TEXT DEFAULT '', sending_version INTEGER DEFAULT 0, since REAL DEFAULT 0,
        due_at REAL DEFAULT 0, attempts INTEGER DEFAULT 0
    )""",
    "CREATE INDEX IF NOT EXISTS by_session ON known (session)",
    "CREATE INDEX IF NOT EXISTS changed ON known (turned_at) WHERE version > sent_version",
    "CREATE TABLE IF NOT EXISTS noted (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID",
)

_FOUND = """
    INSERT INTO known (home, id, session, key, model, began_at, turned_at, done_at, version)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT (home) DO UPDATE SET
    began_at = max(began_at, excluded.began_at), turned_at = max(turned_at, excluded.turned_at), version = version + 1
"""

_REWARDED = """
    UPDATE known SET version = version + 1, turned_at = max(turned_at, :at), done_at = max(done_at, :done_at)
    WHERE session = :session AND (key = :key OR :key = '' AND (SELECT count(DISTINCT key) = 1 FROM known AS other
    WHERE other.session = :session))
"""

_DUE = """
    WHERE version > sent_version AND due_at <= :now AND (
        done_at >= began_at AND turned_at <= :now - :settles OR turned_at <= :now - :after
    ) ORDER BY turned_at LIMIT :most
"""

_WENT_ON = """
    UPDATE known SET version = version + 1, turned_at = max(turned_at, ?)
    WHERE home = (SELECT home FROM heads WHERE response = ?)
"""

_UNENDED = "SELECT name, at FROM recordings WHERE state = ? AND name > ? ORDER BY name LIMIT ?"

_FORGET = (
    "DELETE FROM recordings WHERE name = ?",
    "DELETE FROM heads WHERE response = ? AND number != home",
)
_FORGET_SESSIONS = (
    """DELETE FROM heads WHERE number = home AND response NOT IN (SELECT name FROM recordings)
    AND NOT EXISTS (SELECT 1 FROM heads AS other WHERE other.home = heads.number AND other.number != other.home)""",
    *(f"DELETE FROM {table} WHERE home NOT IN (SELECT number FROM heads)" for table in ("known", "named", "ends")),
)
"""The statements that forget recordings that are gone: the first one of a session stays as long as others of it do."""


class KnownSession(msgspec.Struct, frozen=True):
    """A session of the index."""

    home: int
    id: str
    session: str
    key: str
    model: str
    began_at: float
    """The time at which its latest response began."""
    turned_at: float
    """The time of the end of its latest response, or of its latest reward."""
    done_at: float
    """The time of the latest reward that ended it; 0 if none did."""
    version: int
    """It grows with each response and each reward."""
    sent: str
    """The digest of what was exported last."""
    since: float
    """The time from which on the export is tried."""
    attempts: int


_COLUMNS = ", ".join(KnownSession.__struct_fields__)


class KnownSessions:
    """The sessions of a folder, for one thread; a recording is over after ``silence`` seconds without a line."""

    def __init__(self, folder: Path, silence: float) -> None:
        self._folder = folder
        self._silence = silence
        self._base = _opened(folder / FILE)
        self._index = Index(self._base, folder)
        self._rewards = Rewards(self._base)
        self._writing: dict[str, Head | float] = {}
        """The recordings that are being written: what they say of their place, or the time at which they were found."""
        self._data_version = 0
        self._has_looked = False
        self.is_stopping = False
        """Set by another thread to have a refresh end early."""

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def refresh(self) -> None:
        """Take what was recorded since the last time, and the rewards that came."""
        if (now := self._one("PRAGMA data_version")) != self._data_version:
            self._data_version = now
            self._index.read_ends()
        self._forget()
        self._list()
        self._look_again()
        self._add()
        self._place()
        self._reward()

    def page(self, after: str, most: int) -> list[KnownSession] | None:
        """Return the sessions after the one with an id, the latest first; None if there is no such one."""
        begin = self._one("SELECT number FROM known WHERE id = ?", after) if after else 2**62
        return None if begin is None else self._select("WHERE number < ? ORDER BY number DESC LIMIT ?", (begin, most))

    def named(self, session: str) -> list[KnownSession]:
        """Return the sessions that a client has called so, of all keys and models."""
        return self._select("WHERE session = ? ORDER BY number", (session,))

    def due(self, after: float, settles: float, most: int) -> list[KnownSession]:
        """Return sessions that are over and not exported: ``after`` seconds without a turn, or by a reward."""
        busy = self._busy()
        values = {"now": time.time(), "after": after, "settles": settles, "most": most + len(busy)}
        return [each for each in self._select(_DUE, values) if each.home not in busy][:most]

    def claim(self, session: KnownSession, digest: str, seconds: float) -> bool:
        """Have no other server export a session for some seconds; False if another has it, or has exported it."""
        now = time.time()
        return self._update(
            """sending = :digest, sending_version = :version, due_at = :until, attempts = attempts + 1,
            since = CASE WHEN sending = :digest THEN since ELSE :now END
            WHERE home = :home AND due_at <= :now AND version > sent_version""",
            {"digest": digest, "version": session.version, "until": now + seconds, "now": now, "home": session.home},
        )

    def retry(self, digest: str, seconds: float) -> None:
        """Have an export tried again in some seconds."""
        self._update("due_at = ? WHERE sending = ?", (time.time() + seconds, digest))

    def sent(self, digest: str) -> None:
        """Note that an export has arrived."""
        self._update(
            "sent = sending, sent_version = sending_version, due_at = 0, attempts = 0 WHERE sending = ?", (digest,)
        )

    def digest(self, session: KnownSession) -> str:
        """Return a digest of what a session has now."""
        names = [(head.response, self._ended_at(head)) for head in self._index.members(session.home)]
        whole = msgspec.json.encode((session.id, names, self.rewards(session)))
        return blake2b(whole, digest_size=16).hexdigest()

    def responses(self, session: KnownSession) -> int:
        """Return the number of responses of a session."""
        return self._one("SELECT count(*) FROM heads WHERE home = ?", session.home) or 0

    def has_recordings(self, session: KnownSession) -> bool:
        """True if a recording of a session is still there."""
        return any(head.folder.is_dir() for head in self._index.members(session.home))

    def rows(self, session: KnownSession) -> Iterator[msgspec.Struct]:
        """Yield the rows of a session as they are now; none if its recordings are gone."""
        whole = assembled(self._index.first(session.home), self._index.members(session.home))
        yield from rows("penstock", rewarded(whole.paths, self.rewards(session)))

    def rewards(self, session: KnownSession) -> tuple[Reward, ...]:
        """Return the rewards of a session."""
        given = self._rewards.of(session.session, session.key, {each.key for each in self.named(session.session)})
        self._rewards.ambiguous.clear()
        return given

    def _forget(self) -> None:
        """Forget the recordings that are gone, once: the index of a server that runs for long may name some."""
        if self._has_looked:
            return
        self._has_looked = True
        names = self._base.execute("SELECT name FROM recordings")
        gone = [(name,) for (name,) in names if not (self._folder / name).is_dir()]
        if gone:
            with self._changing():
                for statement in _FORGET:
                    self._base.executemany(statement, gone)
                for statement in _FORGET_SESSIONS:
                    self._base.execute(statement)

    def _list(self) -> None:
        """Note the recordings that have begun."""
        now, changed_at = time.time_ns(), self._folder.stat().st_mtime_ns
        if changed_at == self._noted("folder"):
            return
        with self._changing(), os.scandir(self._folder) as entries:
            names = ((entry.name, _NEW, now / _TICK) for entry in entries if entry.is_dir())
            self._base.executemany("INSERT OR IGNORE INTO recordings VALUES (?, ?, ?)", names)
            self._note("folder", changed_at if now - changed_at > _TICK else 0)

    def _look_again(self) -> None:
        """Note recordings that go on although they seemed to be over."""
        seemed = self._base.execute(
            "SELECT name, at FROM recordings WHERE state = ? AND at > ?", (_SILENT, time.time() - _LOOKS)
        ).fetchall()
        for name, at in seemed:
            if (now := _written_at(self._folder / name)) > at:
                self._set(name, _NEW, now)

    def _add(self) -> None:
        """Add the recordings that are over, some at a time."""
        after, writing = "", dict[str, Head | float]()
        while not self.is_stopping and (found := self._base.execute(_UNENDED, (_NEW, after, AT_ONCE)).fetchall()):
            after = found[-1][0]
            over = [(name, each) for name, at in found if (each := self._over(name, at, writing))]
            if over:
                with self._changing():
                    for name, (state, at, head) in over:
                        self._set(name, state, at)
                        self._base.execute(_WENT_ON, (at, name))
                        if head:
                            with suppress(Unusable):  # another recording of the same response, or this one
                                self._index.add(head)
        self._writing = writing

    def _over(
        self, name: str, found_at: float, writing: dict[str, Head | float]
    ) -> tuple[int, float, Head | None] | None:
        """Return the state and the end of a recording, and its place if it has one; None while it is being written."""
        path, known = self._folder / name, self._writing.get(name)
        is_whole, at = (path / RESPONSE).exists(), _written_at(path)
        is_over = is_whole or at + self._silence < time.time() or _is_ended(path, at)
        head = known if isinstance(known, Head) else _head_of(path)
        if is_over:
            return _WHOLE if is_whole else _SILENT, at, head
        writing[name] = head or found_at
        return None

    def _place(self) -> None:
        """Place the recordings, some at a time, but for those that continue one which is still being written."""
        begun = [each.at if isinstance(each, Head) else each for each in self._writing.values()]
        after, oldest = (-1.0, ""), min(begun, default=float("inf"))
        while not self.is_stopping and (found := self._index.placeless(after, AT_ONCE)):
            heads = [self._index.unpacked(row.packed) for row in found]
            after = heads[-1].at, heads[-1].response
            ready = [
                (row, head)
                for row, head in zip(found, heads, strict=True)
                if head.at <= oldest or not self._index.is_orphan(row)
            ]
            if ready:
                with self._changing():
                    for row, head in ready:
                        self._placed(row, head)

    def _placed(self, row: Placeless, head: Head) -> None:
        home = self._index.place(row)
        if isinstance(home, Skipped):
            self._base.execute("DELETE FROM heads WHERE number = ?", (row.number,))
            return
        first = self._index.first(home)
        session = name_of(first)
        done_at = self._one("SELECT max(done_at) FROM rewards WHERE session = ? AND key IN (?, '')", session, head.key)
        kind = "session" if first.session else "conversation" if first.conversation else "response"
        digest = blake2b(msgspec.json.encode((kind, session, head.key, head.model)), digest_size=16).hexdigest()
        ended_at = self._ended_at(head)
        row_of_it = (home, f"rollout_{digest}", session, head.key, head.model, head.at, ended_at, done_at or 0.0)
        self._base.execute(_FOUND, row_of_it)

    def _reward(self) -> None:
        """Take the rewards that came."""
        try:
            size = (self._folder / REWARDS).stat().st_size
        except FileNotFoundError:
            return
        if size == self._noted("size of rewards"):
            return
        begin = self._noted("rewards") or 0
        with self._changing():
            for end, each in lines_of(self._folder, begin if begin <= size else 0):
                begin = end
                self._rewards.add((each,))
                done_at = each.at if each.done else 0.0
                values = {"session": each.session, "key": each.key, "at": each.at, "done_at": done_at}
                self._base.execute(_REWARDED, values)
            self._note("rewards", begin)
            self._note("size of rewards", size)

    def _busy(self) -> set[int | None]:
        """Return the sessions of which a response is being recorded."""
        return {self._index.home_of(each) for each in self._writing.values() if isinstance(each, Head)}

    def _ended_at(self, head: Head) -> float:
        return self._one("SELECT at FROM recordings WHERE name = ?", head.folder.name) or head.at

    def _select(self, clause: str, values: Any) -> list[KnownSession]:
        return [KnownSession(*row) for row in self._base.execute(f"SELECT {_COLUMNS} FROM known {clause}", values)]

    def _update(self, assigned: str, values: Any) -> bool:
        return self._base.execute(f"UPDATE known SET {assigned}", values).rowcount > 0

    def _set(self, name: str, state: int, at: float) -> None:
        self._base.execute("UPDATE recordings SET state = ?, at = ? WHERE name = ?", (state, at, name))

    def _noted(self, name: str) -> int | None:
        value: int | None = self._one("SELECT value FROM noted WHERE name = ?", name)
        return value

    def _note(self, name: str, value: int) -> None:
        self._base.execute("INSERT OR REPLACE INTO noted VALUES (?, ?)", (name, value))

    def _one(self, statement: str, *values: Any) -> Any:
        row = self._base.execute(statement, values).fetchone()
        return row[0] if row else None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the index, which no other server changes meanwhile."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")


def _opened(path: Path) -> sqlite3.Connection:
    """Open the index, which only its owner can read; begin anew if it is broken."""
    try:
        return _checked(path)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        logger.warning("%s is broken, and made anew: %s", path, named_error(error))
        path.unlink()
        return _checked(path)


def _checked(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    base = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for statement in ("PRAGMA journal_mode = TRUNCATE", "PRAGMA synchronous = NORMAL", *_TABLES):
        base.execute(statement)
    return base


def _head_of(path: Path) -> Head | None:
    """Return what a recording says of its place; None if it has no tokens, or none yet."""
    try:
        return replace(read_head(path), folder=Path(path.name))
    except (Unusable, UnreadableRecording, OSError):
        return None


def _written_at(path: Path) -> float:
    """Return the time of the last line of a recording, or of its folder if it has no file yet; 0 if it is gone."""
    times = _times_of(path, RESPONSE, *_FILES) or _times_of(path, "")
    return max(times, default=0.0)


def _times_of(path: Path, *names: str) -> list[float]:
    """Return the times of those files of a folder that are there."""
    times = list[float]()
    for name in names:
        with suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return times


def _is_ended(path: Path, at: float) -> bool:
    """True if all files of a recording have their `End`, and no further one has come for a while."""
    files = [path / name for name in _FILES if (path / name).exists()]
    return time.time() - at > QUIET_SECONDS and bool(files) and all(map(_has_end, files))


def _has_end(path: Path) -> bool:
    """True if the last line of a file is its `End`."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            data = file.read()
    except FileNotFoundError:  # it repeated another one, and was deleted
        return True
    return data.endswith(b"\n") and data[:-1].rpartition(b"\n")[2].startswith(b'{"type":"End"')

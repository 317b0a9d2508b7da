"""Rewards: what sessions were worth, as lines of a file in the folder of their recordings.

Each line is one write at the end of the file, so that several servers share a folder.  The last line counts for a
session, a key, a name and a response.  A line that a server which was killed has not finished is left out.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from penstock.extensions.rollouts.paths import Reward, TokenPath
from penstock.pipeline.logs import counted

logger = logging.getLogger(__name__)

FILE = "rewards.jsonl"
"""The name of the file in a folder of recordings."""

MOST_LINE = 2**16
"""Bytes of a line; a longer one is none of ours."""

MODE = 0o600
"""The permissions of the file."""


class RewardLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the file."""

    session: str
    reward: float
    name: str = ""
    response: str = ""
    """The id of the response that it is for; empty for the whole session."""
    key: str = ""
    """The digest of the key of the session; empty if the sender gave none."""
    done: bool = False
    """True if the session is over."""
    at: float = 0.0
    """The time at which it came, in seconds since 1970."""


_decode = msgspec.json.Decoder(RewardLine).decode


def write_reward(folder: Path, line: RewardLine) -> RewardLine:
    """Append a line with the time of now, and return it once it is on the disk.  Raises `OSError`."""
    line = replace(line, at=time.time())
    encoded = msgspec.json.encode(line) + b"\n"
    path = folder / FILE
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a line that was cut stays a line of its own
            encoded = b"\n" + encoded
        if os.write(descriptor, encoded) < len(encoded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        sync_folder(folder)
    return line


def sync_folder(folder: Path) -> None:
    """Have the names of new files of a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lines_of(folder: Path, begin: int = 0) -> Iterator[tuple[int, RewardLine]]:
    """Yield the rewards of a folder from a byte on, each with the byte after its line.

    The last line is left out until it has its end, and so are lines that cannot be read, which the log counts.
    """
    try:
        file = (folder / FILE).open("rb")
    except FileNotFoundError:
        return
    broken = 0
    with file:
        file.seek(begin)
        end = begin
        while data := file.readline(MOST_LINE):
            if len(data) < MOST_LINE and not data.endswith(b"\n"):  # it is still being written, or was cut
                break
            end += len(data)
            if data != b"\n":
                try:
                    line = _decode(data)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    broken += 1
                else:
                    yield end, line
    if broken:
        logger.warning("%s has %s that cannot be read", folder / FILE, counted(broken, "line"))


_TABLE = """
    create table if not exists rewards (
        session text, key text, name text, response text, reward real, at real, done_at real,
        primary key (session, key, name, response)
    ) without rowid
"""

_PUT = """
    insert into rewards values (?, ?, ?, ?, ?, ?, ?) on conflict do update
    set reward = excluded.reward, at = excluded.at, done_at = max(done_at, excluded.done_at) where excluded.at >= at
"""

_OF = "select key, reward, name, response from rewards where session = ? and key in (?, '') order by at"


class Rewards:
    """The rewards of folders, in a database on the disk: the last one counts."""

    def __init__(self, database: sqlite3.Connection) -> None:
        database.execute(_TABLE)
        self._database = database
        self.ambiguous: dict[str, tuple[str, ...]] = {}
        """The sessions with a reward without a key that went to none, each with its keys."""

    def add(self, lines: Iterable[RewardLine]) -> None:
        """Add rewards."""
        for line in lines:
            row = (line.session, line.key, line.name, line.response, line.reward, line.at, line.at if line.done else 0)
            self._database.execute(_PUT, row)

    def of(self, session: str, key: str, keys: Collection[str]) -> tuple[Reward, ...]:
        """Return the rewards of a session of a key; ``keys`` are all keys that have a session with this id.

        One without a key counts if there is no other key, or if it is for one response, as that has one key.
        """
        found: dict[tuple[str, str], Reward] = {}
        for of_key, reward, name, response in self._database.execute(_OF, (session, key)):
            if of_key != key and not response and len(keys) > 1:
                self.ambiguous[session] = tuple(sorted(keys))
            else:
                found[name, response] = Reward(reward, name, response)
        return tuple(found.values())


def rewarded(paths: Iterable[TokenPath], rewards: Sequence[Reward]) -> tuple[TokenPath, ...]:
    """Return paths with the rewards of their session, and with those of the responses that they have."""
    given = []
    for path in paths:
        responses = {"", *(turn.response for turn in path.turns)}
        given.append(replace(path, rewards=tuple(each for each in rewards if each.response in responses)))
    return tuple(given)


@contextmanager
def rewards_in(folders: Sequence[Path]) -> Iterator[Rewards]:
    """Read the rewards of folders into a temporary database, for the length of a block."""
    with closing(sqlite3.connect("", isolation_level=None)) as database:
        database.execute("pragma journal_mode = off")
        rewards = Rewards(database)
        for folder in folders:
            rewards.add(line for _, line in lines_of(folder))
        yield rewards
        for session, keys in rewards.ambiguous.items():
            logger.warning(
                "A reward of session %s went to none: it names no key, and there are %s", session, ", ".join(keys)
            )

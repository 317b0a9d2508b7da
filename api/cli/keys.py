"""Keys: make, list and revoke API keys, in a key file or in the store of the servers.

``webhook`` prints the secret that signs the webhooks of a key, which is made from PENSTOCK_WEBHOOK_SECRET.

Both hold the SHA-256 of a key, so that a key can be seen only once, when it is made.  A server reads its key file at
the start and at SIGHUP, and with --store-keys the keys of its store at each heartbeat.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import getpass
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from penstock.api.cli.arguments import Parser
from penstock.api.cli.command_line import parsed_settings
from penstock.api.http.api_key import HASHED, ApiKey, key_of
from penstock.api.http.key_sources import api_keys, text_of, without_comment
from penstock.api.limits.table import read_limits
from penstock.api.runs.store_settings import NO_STORE, is_missing, store_place
from penstock.api.settings import Settings
from penstock.api.start.assembly import open_store, unknown_limits, unknown_models
from penstock.api.values import seconds
from penstock.pipeline.audit import decided
from penstock.pipeline.errors import CannotRun, CannotStart, StageError
from penstock.pipeline.plugins import AUDITS, optional_function
from penstock.services.standard_webhooks import Signer
from penstock.services.store.stored_keys import StoredKeys

LEAST_SHOWN = 8
"""The fewest characters of a digest that name a key."""


class _KeyStore(Protocol):
    """A place that holds keys."""

    effect: str
    """The moment from which a change holds."""

    async def all(self) -> Sequence[ApiKey]: ...

    async def add(self, key: ApiKey) -> None:
        """Add a key; raise `CannotRun` if another has its name, also one that is added at the same time."""
        ...

    async def revoke(self, digest: str) -> None: ...


@dataclass
class _KeyFile:
    """A key file.  Each change replaces it by a whole new one; what it does not concern stays as it is."""

    path: Path
    effect: str = "once the server gets SIGHUP"

    async def all(self) -> Sequence[ApiKey]:
        return api_keys(self.path, None, own=None, may_be_none=True)

    async def add(self, key: ApiKey) -> None:
        with self._changed() as lines:
            _refuse_name(key, await self.all() if lines else ())
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            lines.append(f"{HASHED}{key.digest} {key.words}\n")

    async def revoke(self, digest: str) -> None:
        with self._changed() as lines:
            lines[:] = [line for line in lines if not self._has(line, digest)]

    def _has(self, line: str, digest: str) -> bool:
        text = without_comment(line)
        return bool(text) and key_of(text, own=None).digest == digest

    @contextmanager
    def _changed(self) -> Iterator[list[str]]:
        """Yield the lines of the file, to be changed, and write them; other commands on the same folder wait."""
        path = self.path.resolve()
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            is_there = path.exists()
            lines = text_of(path).splitlines(keepends=True) if is_there else []
            yield lines
            number, fresh = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
            try:
                with open(number, "w", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 (it is open)
                    file.writelines(lines)
                    if is_there:
                        about = path.stat()
                        os.fchmod(number, about.st_mode)
                        with suppress(PermissionError):  # it is another user's, who shares the folder
                            os.fchown(number, about.st_uid, about.st_gid)
                    file.flush()
                    os.fsync(number)
                os.replace(fresh, path)  # noqa: PTH105 (both are texts)
            except BaseException:
                os.unlink(fresh)  # noqa: PTH108 (it is a text)
                raise
        finally:
            os.close(folder)


@dataclass
class _StoredKeys:
    """The keys of a store."""

    stored: StoredKeys
    effect: str = "at the next heartbeat of servers with --store-keys"

    async def all(self) -> Sequence[ApiKey]:
        return [key_of(f"{HASHED}{digest} {words}", own=None) for digest, words in await self.stored.all()]

    async def add(self, key: ApiKey) -> None:
        _refuse_name(key, await self.all())
        await self.stored.add(key.digest, key.words)
        try:
            _refuse_name(key, await self.all())
        except CannotRun:
            await self.stored.revoke(key.digest)
            raise

    async def revoke(self, digest: str) -> None:
        await self.stored.revoke(digest)


def _refuse_name(key: ApiKey, others: Sequence[ApiKey]) -> None:
    if any(other.name == key.name and other.digest != key.digest for other in others):
        raise CannotRun(f"there is a key {key.name} already: revoke it, or choose another name")


def main(arguments: Sequence[str]) -> None:
    """Make, list and revoke API keys."""
    place = Parser(add_help=False)
    places = place.add_mutually_exclusive_group(required=True)
    places.add_argument("--file", type=Path, help="the key file (--api-key-file of the server)")
    places.add_argument("--store", help="the store: a SQLite file, or a PostgreSQL database (postgresql://...)")
    parser = Parser(prog="penstock keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("make", parents=[place], help="make a key, and print it")
    make.add_argument("name", help="a name for the holder of the key")
    make.add_argument("--like", metavar="KEY", help="a key whose other words it has, too")
    make.add_argument("--team", metavar="NAME", help="the team that it is of, in the accounts")
    make.add_argument("--limits", metavar="NAME", help="the table of limits that holds for the key")
    make.add_argument("--tools", metavar="TOOLS", help="the tools that it may use, with commas, or none")
    make.add_argument("--models", metavar="MODELS", help="the models that it may use: names or patterns, with commas")
    make.add_argument("--webhook", metavar="URL", help="the URL that gets its webhooks")
    make.add_argument("--no-record", action="store_const", const="no", dest="record", help="never record its responses")
    make.add_argument("--expires", metavar="TIME", help="a date (2027-01-31), or a time from now on (90d)")
    commands.add_parser("list", parents=[place], help="list the keys")
    for command, does in (("revoke", "revoke a key"), ("webhook", "print the secret of its webhooks")):
        named = commands.add_parser(command, parents=[place], help=does)
        named.add_argument("key", help=f"its name, or the first {LEAST_SHOWN} or more characters of its SHA-256")
    chosen = parser.parse_args(arguments)
    try:
        asyncio.run(_run(chosen))
    except (OSError, StageError, CannotStart, ValueError) as error:
        raise CannotRun(str(error)) from error


async def _run(chosen: argparse.Namespace) -> None:
    async with _opened(chosen) as place:
        if chosen.command in ("make", "revoke"):
            with _audited():
                await _change(place, chosen)
        elif chosen.command == "list":
            _show(await place.all())
        else:
            print(_signer().of_owner((await _found(place, chosen.key)).digest).secrets)


async def _change(place: _KeyStore, chosen: argparse.Namespace) -> None:
    if chosen.command == "make":
        await _make(place, chosen)
    else:
        await _revoke(place, await _found(place, chosen.key))


def _audited() -> AbstractContextManager[None]:
    """Note changes of keys in the audit log that PENSTOCK_AUDIT or penstock.toml names, for the length of a block."""
    settings = parsed_settings([])
    write: Callable[[Settings], AbstractContextManager[None]] | None = optional_function("audit", AUDITS)
    return write(settings) if write and settings.audit else nullcontext()


def _note(action: str, key: ApiKey) -> None:
    """Note who has changed a key: the user of the system that runs this command."""
    facts = {"key_owner": key.digest[:LEAST_SHOWN], "team": key.team or None, "limits": key.limits or None}
    decided("penstock keys", "changed", key.title, change=action, user=getpass.getuser(), **facts)


@asynccontextmanager
async def _opened(chosen: argparse.Namespace) -> AsyncGenerator[_KeyStore, None]:
    if chosen.file:
        yield _KeyFile(chosen.file)
        return
    if chosen.store == NO_STORE:
        raise CannotRun(f"--store {NO_STORE} keeps no keys")
    if is_missing(place := store_place(chosen.store)):
        raise CannotRun(f"--store {place}: there is no such store; a server makes it at its first start")
    async with open_store(place) as store:
        yield _StoredKeys(store.keys)


async def _make(place: _KeyStore, chosen: argparse.Namespace) -> None:
    expires = None if chosen.expires is None else _moment(chosen.expires)
    fields = {"name": chosen.name, "team": chosen.team, "limits": chosen.limits, "tools": chosen.tools}
    fields |= {"models": chosen.models, "webhook": chosen.webhook, "record": chosen.record, "expires": expires}
    like = dict(word.split("=", 1) for word in (await _found(place, chosen.like)).words.split()) if chosen.like else {}
    fields = like | {field: value for field, value in fields.items() if value is not None}
    words = [f"{field}={value}" for field, value in fields.items()]
    plain = f"sk-{secrets.token_urlsafe(32)}"
    try:
        key = key_of(" ".join((plain, *words)), own=None)
    except ValueError as error:
        raise ValueError(f"the key {error}") from None
    warnings = list(_warnings(key))
    await place.add(key)
    _note("make", key)
    print(plain)
    for warning in warnings:
        print(f"penstock: {warning}", file=sys.stderr)
    print(
        f"This is the only time that the key {key.digest[:LEAST_SHOWN]} is shown. It is valid {place.effect}.",
        file=sys.stderr,
    )


def _warnings(key: ApiKey) -> Iterator[str]:
    """Yield what of a key could not be compared with the settings of the server.

    Raises `CannotRun` if the settings that are read here have no such limits or models.
    """
    settings = parsed_settings([]) if key.limits or key.models else None
    here = "run this where the server's penstock.toml is"
    if settings and key.limits and settings.limits is None:
        yield f"it was not checked whether the server has limits called {key.limits}: set PENSTOCK_LIMITS, or {here}"
    elif settings and settings.limits and (reason := unknown_limits(key, read_limits(settings.limits))):
        raise CannotRun(f"the key has {reason} ({settings.limits})")
    if settings and key.models and not settings.models:
        yield f"it was not checked whether the server has models of these names: {here}"
    elif settings and (reason := unknown_models(key, settings)):
        raise CannotRun(f"the key has {reason}")


def _moment(text: str) -> str:
    """Return the time of a duration from now on, or else the text itself."""
    try:
        moment = datetime.now(UTC) + timedelta(seconds=seconds(text))
    except (ValueError, OverflowError):
        return text
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _show(keys: Sequence[ApiKey]) -> None:
    for key in keys:
        print(" ".join((key.digest[:LEAST_SHOWN], key.words, "(expired)" if key.is_expired else "")).rstrip())


def _signer() -> Signer:
    if not (secret := os.environ.get("PENSTOCK_WEBHOOK_SECRET")):
        raise CannotRun("set PENSTOCK_WEBHOOK_SECRET as for the server")
    return Signer.of(secret)


async def _found(place: _KeyStore, named: str) -> ApiKey:
    start = named.removeprefix(HASHED)
    keys = {key.digest: key for key in await place.all()}
    found = [
        key
        for key in keys.values()
        if key.name == named or (len(start) >= LEAST_SHOWN and key.digest.startswith(start))
    ]
    if len(found) != 1:
        several = ", ".join(key.digest[:LEAST_SHOWN] for key in found)
        raise CannotRun(f"several keys are called {named}: {several}" if found else f"there is no key {named}")
    return found[0]


async def _revoke(place: _KeyStore, key: ApiKey) -> None:
    await place.revoke(key.digest)
    _note("revoke", key)
    print(f"Revoked {key.digest[:LEAST_SHOWN]} {key.words}: refused {place.effect}.", file=sys.stderr)

"""Check: verify all that can be wrong before a model is loaded."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import uvloop

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.drawn import described, drawn, drawn_of_several
from penstock.api.cli.mistakes import explained
from penstock.api.dialects.named import spoken
from penstock.api.http.auth import Keys
from penstock.api.http.connections import bind
from penstock.api.http.key_sources import UnusableKeys, seal_keys
from penstock.api.limits.admission import Admission
from penstock.api.runs.store_settings import is_file, is_missing, without_password
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of, open_store, toolbox
from penstock.api.start.backends import model_here
from penstock.api.start.parts import UNSTARTABLE
from penstock.pipeline.distribution import DISTRIBUTION, namesake, own_version
from penstock.pipeline.errors import CannotRun, CannotStart
from penstock.pipeline.logs import counted, log_to_stderr
from penstock.pipeline.plugins import CHECKS, installed, load, optional_function
from penstock.pipeline.recordings.writer import make_folder
from penstock.services.model_names import in_words
from penstock.services.prompts import Prompts
from penstock.services.store.store import Store
from penstock.services.web.ssrf import AllowedNetworks, Blocked, check_address
from penstock.stages.models.vllm_private import TESTED, installed_vllm

APART = 30.0
"""Seconds by which the clocks of a server and its database may differ: servers count expiry and age by their own."""


class NotChecked(Exception):
    """A check needs what another one, which it names, has found to be wrong."""


Check: TypeAlias = Callable[[], Awaitable[str]]
"""A check: it describes what it found, or raises the error that ends the start of a server."""


@dataclass(frozen=True)
class Checks:
    """The checks of the settings, which open the store once, for the length of a block."""

    settings: Settings
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Checks:
        """Begin; the store is opened when a check needs it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the store."""
        with suppress(*UNSTARTABLE):  # a store of the operator may fail to close, once all is checked
            await self._closing.aclose()

    @cached_property
    def _opened(self) -> asyncio.Future[Store]:
        return asyncio.ensure_future(self._open())

    @cached_property
    def _keys(self) -> asyncio.Future[Keys]:
        return asyncio.ensure_future(self._read_keys())

    @property
    def all(self) -> dict[str, Check]:
        """The checks by name."""
        first = (self.distribution, self.user, self.keys, self.address, self.store, self.clock)
        last = (
            *(self.tools, self.prompts, self.webhooks, self.record),
            *(self.vllm, self.model, self.dialects, self.pipeline),
        )
        models = {f"model {name}": partial(described, self.settings, name) for name in self.settings.models}
        found = {name: optional_function(name, CHECKS) for name in sorted(installed(CHECKS))}
        of_extensions = {name: partial(check, self.settings) for name, check in found.items() if check}
        return {
            **{check.__name__: check for check in first},
            **of_extensions,
            **models,
            **{check.__name__: check for check in last},
        }

    async def distribution(self) -> str:
        """Look for another distribution of the package's name."""
        return "; ".join(filter(None, [f"{DISTRIBUTION} {own_version()}", namesake()]))

    async def user(self) -> str:
        """Compare the user of this process with the owner of the store, who serves."""
        name, owner = _name(os.geteuid()), _owner(self.settings.store)
        if owner in ("", name):
            return name
        return f"{name}; the store belongs to {owner}: run this as {owner} to find what that user cannot read"

    async def keys(self) -> str:
        """Read the keys, and the limits of keys."""
        settings = self.settings
        seal_keys(settings.seal_key_file, settings.seal_keys)
        keys = await self._keys
        if keys.refused:
            raise UnusableKeys("; ".join(f"the key {each}" for each in sorted(keys.refused)))
        return keys.count if keys.are_needed else "none: all clients that reach the server may use it"

    async def _open(self) -> Store:
        """Open the store; raise `CannotStart` if root would make one that the owner of its folder could not open."""
        place = self.settings.store
        owner = _owner(place)
        if os.geteuid() == 0 and owner not in ("", _name(0)) and is_missing(place):
            raise CannotStart(
                f"{place}: there is no such store, and the folder belongs to {owner}: run this as {owner}"
            )
        return await self._closing.enter_async_context(open_store(place))

    async def _read_keys(self) -> Keys:
        keys = keys_of(self.settings, Admission(self.settings.limits))
        if self.settings.store_keys:
            await keys.read_store((await self._opened).keys)
        return keys

    async def address(self) -> str:
        """Bind the address."""
        with bind(self.settings.host, self.settings.port) as bound:
            return "{} port {} is free".format(*bound.getsockname())

    async def store(self) -> str:
        """Open the store, which creates or upgrades it."""
        store = await self._opened
        left = await store.orphaned_models(restarts=self.settings.resume_interrupted)
        waiting = (
            f"; {counted(sum(left.values()), 'background response')} without a server: for {in_words(sorted(left))}"
        )
        return f"{without_password(self.settings.store)}{waiting if left else ''}"

    async def clock(self) -> str:
        """Compare the clock of this machine with that of the store."""
        store = await self._opened
        before = time.time()
        now = await store.clock()
        after = time.time()
        apart = max(before - now, now - after, 0.0) if now is not None else 0.0
        if apart > APART:
            raise CannotStart(f"the clock of this machine and that of the database are {apart:.0f} s apart")
        return f"{datetime.fromtimestamp(after, UTC):%Y-%m-%d %H:%M:%S} UTC"

    async def tools(self) -> str:
        """Open the tools of the settings."""
        own = self.settings.model_copy(update={"mcp_config": None})  # `mcp` has checked the servers
        opened = await toolbox(own, Keys())
        await opened.close()
        return ", ".join(sorted(opened.namespaces | opened.own.keys())) or "none"

    async def prompts(self) -> str:
        """Read the prompts."""
        return ", ".join(sorted(Prompts(self.settings.prompts).templates)) or "none"

    async def webhooks(self) -> str:
        """Look for the addresses of the receivers of webhooks, which have to be public or allowed."""
        try:
            keys = await self._keys
        except (*UNSTARTABLE, CannotRun) as error:
            raise NotChecked("row of the keys") from error
        urls = {*keys.webhooks, *filter(None, [self.settings.webhook])}
        allowed = AllowedNetworks.parse(self.settings.allow_address)
        hosts = sorted({urlsplit(url).hostname or "" for url in urls})
        for host in hosts:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
                for *_, address in found if not allowed.names(host) else ():
                    check_address(str(address[0]), allowed)
            except Blocked as error:
                raise CannotStart(f"{host}: {error}: see --allow-address") from error
            except OSError as error:
                raise CannotStart(f"{host} is unknown here: {error.strerror}") from error
        return f"to {', '.join(hosts)}" if hosts else "none"

    async def record(self) -> str:
        """Make the folder of the recordings."""
        if self.settings.record is None:
            return "nothing"
        make_folder(self.settings.record)
        return f"into {self.settings.record}"

    async def vllm(self) -> str:
        """Compare the vLLM of this process with those that penstock is tested with; `pipeline` finds what it lacks."""
        installed = installed_vllm()
        if self.settings.in_this_process is None or installed is None:
            return "none runs here"
        return f"{installed}; penstock is tested with {' and '.join(TESTED)}"

    async def model(self) -> str:
        """Look for the files of a model that this process would load."""
        here = self.settings.in_this_process
        if here is None or find_spec("vllm") is None:
            return "none is loaded here"
        return model_here(here)

    async def dialects(self) -> str:
        """Look for the dialects."""
        return ", ".join(f"{dialect.name} at {dialect.base}" for dialect in spoken(self.settings.dialect))

    async def pipeline(self) -> str:
        """Build the pipeline, with the stages of the operator."""
        load(self.settings.plugins, self.settings.tables)  # its mistakes are found without the model, too
        try:
            await self.model()
        except (*UNSTARTABLE, CannotRun) as error:
            raise NotChecked("model") from error
        return await (drawn_of_several(self.settings) if self.settings.models else drawn(self.settings))


def _owner(place: str) -> str:
    """Return the owner of a store that is a file, or else of the folder in which it would be; "" if none is known."""
    if not is_file(place):
        return ""
    for path in (Path(place).absolute(), *Path(place).absolute().parents):
        try:
            return _name(path.stat().st_uid)
        except FileNotFoundError:
            continue
        except OSError:  # a folder that this user cannot read: opening the store says which
            break
    return ""


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


async def passes(settings: Settings, arguments: Sequence[str]) -> bool:
    """Check the settings, print what was found, and return False if there is a mistake."""
    async with Checks(settings) as checks:
        return await all_pass(checks.all, arguments)


async def all_pass(checks: Mapping[str, Check], arguments: Sequence[str]) -> bool:
    """Run all checks, and print what each found; return False if one found a mistake.

    Options that an error names are shown where the operator set them, on the command line ``arguments`` or elsewhere.
    """
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok     {name}: {await check()}", flush=True)
        except NotChecked as cause:
            print(f"-      {name}: not checked, as the {cause} is wrong", flush=True)
        except (*UNSTARTABLE, CannotRun) as error:
            failed += 1
            print(f"wrong  {name}: {explained(error, arguments)}", flush=True)
    return not failed


def main(arguments: Sequence[str]) -> None:
    """Verify the settings of a server, and all that it needs but its model."""
    settings = read_settings(arguments, "check")
    log_to_stderr(settings.log_level)
    for package in ("extensions", "services", "stages"):  # what these log at a start, the checks print
        logging.getLogger(f"penstock.{package}").setLevel(logging.WARNING)
    sys.exit(not uvloop.run(passes(settings, arguments)))

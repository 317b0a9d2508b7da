"""The books of a server: what the file of accounts says now, and what was spent of its budgets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from penstock.api.http.auth import Keys
from penstock.api.runs.store_settings import NO_STORE
from penstock.api.settings import Settings
from penstock.extensions.accounts.accounts_file import Accounts, UnusableAccounts, read_accounts
from penstock.extensions.accounts.budgets import Gate
from penstock.extensions.accounts.ledger import Ledger
from penstock.extensions.accounts.spending import Spending
from penstock.pipeline.audit import decided
from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.logs import counted, nearest
from penstock.services.use import Use

logger = logging.getLogger(__name__)


def check(settings: Settings) -> None:
    """Raise `UnusableAccounts` if the settings have a file of accounts that cannot be used."""
    if settings.accounts is None:
        return
    if settings.store == NO_STORE or not settings.ledger_ttl:
        raise UnusableAccounts("--accounts needs a store, and a --ledger-ttl that is not 0")
    read_accounts(settings.accounts)


async def described(settings: Settings) -> str:
    """Read the file of accounts, and return what it has."""
    check(settings)
    if settings.accounts is None:
        return "no prices or budgets"
    accounts = read_accounts(settings.accounts)
    prices, budgets = len(accounts.prices), len([*accounts.budgets.named()])
    return f"{counted(prices, 'price')} in {accounts.currency}, {counted(budgets, 'budget')}"


class Books:
    """The prices and budgets of a ``file``, which hold from now on, and what was spent by the ``ledger``."""

    def __init__(self, file: Path, keys: Keys, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._file, self.keys = file, keys
        self.spending = Spending(ledger, clock)
        self.gate = Gate(keys, self.spending, read_accounts(file), clock)
        self._following: asyncio.Task[None] | None = None

    @property
    def accounts(self) -> Accounts:
        """The contents of the file."""
        return self.gate.accounts

    @property
    def currency(self) -> str:
        """The currency of all costs."""
        return self.accounts.currency

    def cost(self, use: Use) -> float | None:
        """Return the cost of a use that is written into the ledger, and note that it was spent."""
        cost = self.accounts.priced.cost(use)
        self.spending.note(use, cost)
        return cost

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None, None]:
        """Follow what other servers write, for the length of a block."""
        with suppress(StoreFailed):  # a store that cannot be read refuses no client
            await self.spending.read()
        self._begin()
        try:
            yield
        finally:
            self._end()

    def read_again(self) -> None:
        """Read the file again; a wrong one leaves in effect what was read before."""
        try:
            accounts = read_accounts(self._file)
        except UnusableAccounts as error:
            logger.error("SIGHUP: the accounts stay as they were: %s", error)  # noqa: TRY400 - the error says all
            decided("SIGHUP", "refused", "the accounts")
            return
        change = ", and have not changed" if accounts == self.accounts else ""
        logger.info("SIGHUP: the accounts were read again%s", change)
        if not change:
            decided("SIGHUP", "changed", "the accounts")
        self.gate.take(accounts)
        self._begin()

    def _begin(self) -> None:
        self._end()
        self._warn()
        if not self.accounts.budgets.are_none:
            self._following = asyncio.create_task(self.spending.follow())

    def _end(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    def _warn(self) -> None:
        """Log the names of budgets that no key has."""
        budgets = self.accounts.budgets
        known = self.keys.all
        _warn_of("key", budgets.key, {key.name for key in known})
        _warn_of("team", budgets.team, {key.team for key in known})


def _warn_of(kind: str, named: Iterable[str], known: Iterable[str]) -> None:
    known = sorted(filter(None, known))
    for name in named:
        if name not in known:
            logger.warning(
                "budgets.%s.%s: no API key has %s=%s%s", kind, name, _WORDS[kind], name, nearest(name, known)
            )


_WORDS = {"key": "name", "team": "team"}

"""The resource of the accounts: it sets up the ledger of a server, and yields the routes that read it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from penstock.api.resources.resources import ServerParts
from penstock.extensions.accounts.ledger import Ledger


@asynccontextmanager
async def accounts(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Keep the accounts of a server for the length of a block, and yield their routes."""
    ledger = parts.scheduler.store.part(Ledger)
    ledger.keep, ledger.names = parts.settings.ledger_ttl, parts.keys
    yield ()

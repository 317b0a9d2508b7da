"""The resource of the accounts: it sets up the ledger of a server, and yields the routes that read it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from penstock.api.resources.resources import BASE, ServerParts, checked
from penstock.api.runs.store_settings import NO_STORE
from penstock.extensions.accounts.anthropic_usage import AnthropicUsage
from penstock.extensions.accounts.books import Books, check
from penstock.extensions.accounts.ledger import Ledger
from penstock.extensions.accounts.openai_usage import OpenAIUsage
from penstock.extensions.accounts.page.page import usage_page
from penstock.extensions.accounts.page.usage_data import Usage


@checked(check)
@asynccontextmanager
async def accounts(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Keep the accounts of a server for the length of a block, and yield their routes."""
    settings, admission = parts.settings, parts.scheduler.admission
    ledger, books = parts.scheduler.store.part(Ledger), None
    ledger.keep = settings.ledger_ttl
    async with AsyncExitStack() as closing:
        if settings.accounts is not None:
            books = Books(settings.accounts, parts.keys, ledger)
            ledger.prices = books
            await closing.enter_async_context(books.kept())
            admission.gates.append(books.gate)
            parts.at_sighup.append(books.read_again)
        routes = [
            *OpenAIUsage(ledger).routes(BASE),
            *AnthropicUsage(ledger).routes(BASE),
            web.get("/usage", usage_page),
        ]
        if settings.operator_key is not None:
            usage = Usage(ledger, books, keeps=settings.store != NO_STORE and bool(settings.ledger_ttl))
            routes.append(web.get("/usage/data", usage.data))
        yield routes

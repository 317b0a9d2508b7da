"""Signing in, as a resource without routes: it lets the keys of a server take the tokens of issuers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from aiohttp import ClientError, web

from penstock.api.resources.resources import ServerParts, checked
from penstock.api.settings import Settings
from penstock.extensions.sign_in.discovery import PATIENCE, IssuerKeys, NotFetched, opened_session
from penstock.extensions.sign_in.issuers import UnusableSignIn
from penstock.extensions.sign_in.sign_in import IssuedTokens, read_sign_in
from penstock.extensions.sign_in.stored_owners import StoredOwners
from penstock.pipeline.audit import decided
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.logs import counted

logger = logging.getLogger(__name__)


def check_file(settings: Settings) -> None:
    """Read the file of issuers; raises `UnusableSignIn`."""
    if settings.sign_in:
        read_sign_in(settings.sign_in, settings.tool_labels)


@checked(check_file)
@asynccontextmanager
async def sign_in(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Take the tokens of the issuers for the length of a block, if the settings name a file of them."""
    file, own_tools = parts.settings.sign_in, parts.settings.tool_labels
    if file is None:
        yield ()
        return
    owners = parts.scheduler.store.part(StoredOwners)
    async with opened_session() as session:
        tokens = IssuedTokens(session, parts.keys, own_tools, owners.remember)
        await tokens.take(read_sign_in(file, own_tools))
        taking = set[asyncio.Task[None]]()

        def read_again() -> None:
            try:
                issuers = read_sign_in(file, own_tools)
            except UnusableSignIn as error:
                logger.error("SIGHUP: the issuers stay as they were: %s", error)  # noqa: TRY400 - the error says all
                decided("SIGHUP", "refused", "the issuers")
                return
            if issuers == tokens.issuers:
                logger.info("SIGHUP: the issuers were read again, and have not changed")
                return
            logger.info("SIGHUP: the issuers were read again")
            decided("SIGHUP", "changed", "the issuers", now=", ".join(issuers))
            task = asyncio.create_task(tokens.take(issuers))
            taking.add(task)
            task.add_done_callback(taking.discard)

        parts.at_sighup.append(read_again)
        parts.keys.sign_in = tokens
        try:
            yield ()
        finally:
            parts.keys.sign_in = None
            await tokens.close()


async def check(settings: Settings) -> str:
    """Fetch the keys of the issuers."""
    if settings.sign_in is None:
        return "none"
    found = list[str]()
    async with opened_session() as session:
        for url, issuer in read_sign_in(settings.sign_in, settings.tool_labels).items():
            try:
                async with asyncio.timeout(PATIENCE):
                    keys, _ = await IssuerKeys(url, issuer.jwks, session).fetched()
            except NotFetched as error:
                raise CannotStart(f"--sign-in {settings.sign_in}: {url}: {error}") from None
            except (ClientError, OSError, ValueError) as error:
                raise CannotStart(f"--sign-in {settings.sign_in}: {url}: {named_error(error)}") from None
            found.append(f"{url} ({counted(len(keys.keys), 'key')})")
    return ", ".join(found)

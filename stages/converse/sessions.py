"""The sessions of one response: each opened at the first call that needs it, and all closed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.pipeline.frames import CallFinished, Conversation
from penstock.pipeline.protocol.items import WebSearchCall, of_type
from penstock.stages.converse.turn import Called
from penstock.stages.services.tools import Citable, Outcome, Session, Source, Toolbox, bounded

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds in which a session may itself end a call that took too long."""

OUTPUTS = "code_interpreter_call.outputs"
SOURCES = "web_search_call.action.sources"


class Sessions:
    """What one response uses of a toolbox; a call gets ``seconds``, and ``longest`` characters of it are read."""

    def __init__(self, toolbox: Toolbox, conversation: Conversation, seconds: float, longest: int) -> None:
        self._toolbox = toolbox
        self._conversation = conversation
        self._seconds = seconds
        self._longest = longest
        self._servers = {server.label: server for server in conversation.tools.servers}
        self._has_browsed = any(of_type((*conversation.history, *conversation.input), WebSearchCall))
        self._open: dict[str, Session] = {}

    @property
    def source(self) -> Callable[[int], Source | None] | None:
        """How to find the page behind a cursor, where pages may have been read."""
        if not self._has_browsed and "browser" not in self._open:
            return None
        browser: object = self._session("browser")
        return browser.source if isinstance(browser, Citable) else None

    def action(self, call: Called) -> dict[str, Any] | None:
        """How the item of a call tells what is about to run."""
        session = self._session(call.namespace)
        return session.action(call.name, call.text) if session else None

    async def run(self, call: Called) -> CallFinished:
        """Run a call; whatever goes wrong is told in how it finished."""
        outcome = await self._outcome(call)
        is_read = not outcome.error or outcome.error == outcome.result
        failure = "" if is_read else f"Error: {outcome.error}"
        result = "\n".join(filter(None, (bounded(outcome.result, self._longest), bounded(failure, self._longest))))
        return CallFinished(result, outcome.error, self._shown(call.namespace, outcome.data))

    async def close(self) -> None:
        """End whatever still runs."""
        sessions, self._open = self._open, {}
        for error in await asyncio.gather(*(session.close() for session in sessions.values()), return_exceptions=True):
            if isinstance(error, Exception):
                logger.error("A session of tools could not be closed", exc_info=error)

    async def _outcome(self, call: Called) -> Outcome:
        session = self._session(call.namespace)
        if session is None:
            return Outcome(error=f"There is no tool {call.namespace}.{call.name} here.")
        try:
            async with asyncio.timeout(self._seconds + GRACE):
                return await session.run(call.name, call.text, self._seconds)
        except TimeoutError:
            return Outcome(error=f"The call took longer than {self._seconds:g} seconds.")
        except Exception:
            logger.exception("A call of %s met a bug", call.namespace)
            return Outcome(error="Internal error.")

    def _session(self, namespace: str) -> Session | None:
        if namespace not in self._open:
            if namespace in self._servers:
                self._open[namespace] = self._toolbox.mcp.session(self._servers[namespace])
            elif host := self._toolbox.hosts.get(namespace):
                self._open[namespace] = host.session(self._conversation)
        return self._open.get(namespace)

    def _shown(self, namespace: str, data: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """What the item shows: some of it only where the request asked for it."""
        if namespace == "python" and OUTPUTS not in self._conversation.include:
            return ()
        if namespace == "browser" and SOURCES not in self._conversation.include:
            return tuple({key: value for key, value in action.items() if key != "sources"} for action in data)
        return data

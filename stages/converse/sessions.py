"""The tool sessions of one response: each is opened at the first call that needs it, and all are closed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.pipeline.frames import BrowserAction, CallData, CallFinished, CodeOutputs, ResolvedRequest
from penstock.pipeline.protocol.items import WebSearchCall, of_type
from penstock.stages.converse.turn import Called
from penstock.stages.services.tools import Citable, Outcome, Session, Source, Toolbox, bounded

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Extra seconds for a session to end an overlong call itself, before the call is cancelled."""

OUTPUTS = "code_interpreter_call.outputs"
SOURCES = "web_search_call.action.sources"


class Sessions:
    """The sessions that one response has open.

    A call may take ``seconds``, and the model reads at most ``longest`` characters of its result.
    """

    def __init__(self, toolbox: Toolbox, conversation: ResolvedRequest, seconds: float, longest: int) -> None:
        self._toolbox = toolbox
        self._conversation = conversation
        self._seconds = seconds
        self._longest = longest
        self._servers = {server.label: server for server in conversation.tools.servers}
        self._has_browsed = any(of_type((*conversation.history, *conversation.input), WebSearchCall))
        self._open: dict[str, Session] = {}

    @property
    def source(self) -> Callable[[int], Source | None] | None:
        """A function that finds the page of a browser cursor, or None if the conversation has not used the browser."""
        if not self._has_browsed and "browser" not in self._open:
            return None
        browser: object = self._session("browser")
        return browser.source if isinstance(browser, Citable) else None

    def action(self, call: Called) -> dict[str, Any] | None:
        """Return the ``action`` that the call's item shows while the call runs, or None if it shows none."""
        session = self._session(call.namespace)
        return session.action(call.name, call.text) if session else None

    async def run(self, call: Called) -> CallFinished:
        """Run a call and return how it finished; errors are part of the result, never raised."""
        outcome = await self._outcome(call)
        is_read = not outcome.error or outcome.error == outcome.result
        failure = "" if is_read else f"Error: {outcome.error}"
        result = "\n".join(filter(None, (bounded(outcome.result, self._longest), bounded(failure, self._longest))))
        return CallFinished(result, outcome.error, self._shown(outcome.data))

    async def close(self) -> None:
        """Close all open sessions; log errors instead of raising them."""
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

    def _shown(self, data: CallData | None) -> CallData | None:
        """Return the data that the item shows: code outputs and web sources only if the request includes them."""
        match data:
            case CodeOutputs() if OUTPUTS not in self._conversation.include:
                return None
            case BrowserAction(action) if SOURCES not in self._conversation.include:
                return BrowserAction({key: value for key, value in action.items() if key != "sources"})
            case _:
                return data

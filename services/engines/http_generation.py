"""One generation over HTTP, from the choice of a server to the last token.

Before the first token has arrived, a prompt can be retried on another server; after it, any error is final.  Closing
the connection ends the generation, because vLLM aborts a request when its client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec import UNSET

from penstock.pipeline import metrics
from penstock.pipeline.errors import EngineDead, EngineFailed, EngineOverloaded, ImagesRefused, InvalidPrompt
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import EngineFrame, GenerationFinished, Prompt, TokenChunk
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.services.engines.affinity import RANK_HEADER, SESSION_HEADER, hinted_session, session_id
from penstock.services.engines.engine import PARAMETERS
from penstock.services.engines.http_endpoints import ENDPOINTS, LET_GO, Answer, RequestRefused
from penstock.services.engines.http_scores import prompt_logprobs, separated
from penstock.services.engines.replicas import Core, Replica, Replicas
from penstock.services.engines.weights import spans
from penstock.services.foreign import Unreadable, read_whole

logger = logging.getLogger(__name__)

REFUSAL_WAIT = 1.0
"""Seconds to wait for a refusal.  A prompt that was not refused by then counts as accepted."""

LOSSES = 1
"""Retries after a server broke off.  There are few, because the prompt itself may have crashed the server."""

FULL = (429, 503)
"""HTTP statuses of a server that is shutting down or has a full queue."""

_OF_IMAGES = re.compile(r"^(?!.*\(length \d).*(?:image|multi-?modal)", re.IGNORECASE | re.DOTALL)
"""A refusal of the images of a prompt; that of a prompt that is too long may speak of images, too."""

End = Literal["cancelled", "stopped", "lost"]


@dataclass(eq=False)
class HttpGeneration:
    """The generation for ``prompt``, on one server at a time."""

    _replicas: Replicas
    prompt: Prompt
    started: float
    end: End | None = None
    """Why the generation was broken off; None if it was not."""

    def __post_init__(self) -> None:
        wanted = self.prompt.facts.sampling.prompt_logprobs
        self._scores = None if wanted is UNSET else wanted
        self._core: Core | None = None
        self._answer: Answer[Any] = Answer(ENDPOINTS[0], None)
        self._response: aiohttp.ClientResponse | None = None
        self._connecting: asyncio.Timeout | None = None
        self._first: TokenChunk | None = None
        self._has_tokens = False
        self._full: list[Replica] = []
        self._unreachable: list[Replica] = []
        self._broken: list[Replica] = []

    def is_for(self, response_id: str) -> bool:
        """Return True if this is an unfinished generation for the response with this id."""
        return self.prompt.facts.response_id == response_id and self._answer.finish_reason is None

    def finish(self, end: End) -> None:
        """Close the connection.  The consumer still gets the tokens received so far, then the end."""
        self.end = self.end or end
        connecting, self._connecting = self._connecting, None
        if connecting:
            connecting.reschedule(0)
        elif self._response and not self._response.content.is_eof():
            self._response.content.feed_eof()  # at the end of a body aiohttp releases the connection

    def lose(self) -> None:
        """Give up the connection: its server no longer answers."""
        self.finish("lost")

    def leave(self) -> None:
        """Close the connection, discarding tokens not yet read."""
        if self._response:
            self._response.close()
            self._response = None
        if self._core:
            self._core.running.discard(self)

    async def begin(self) -> None:
        """Send the prompt and wait until a server has accepted it; raise the error if none does.

        A server that stays silent for `REFUSAL_WAIT` seconds has accepted the prompt.
        """
        while self._response is None and self.end is None:
            try:
                await self._connect()
                if self._scores is not None:  # its answer comes as a whole, which no timeout may cut
                    return
                async with asyncio.timeout(REFUSAL_WAIT):
                    self._first = await self._read()
            except (aiohttp.ClientError, RequestRefused) as error:
                self._give_up(error)
            except TimeoutError:
                return

    async def frames(self) -> AsyncGenerator[EngineFrame, None]:
        """Yield all tokens, then the end.  Tokens that arrived since the last read come as one chunk."""
        chunk = self._first or await self._next()
        while chunk:
            yield chunk
            chunk = await self._next()
        if self.end == "stopped":
            raise EngineFailed("The server is stopping.")
        reason: Any = "cancelled" if self.end == "cancelled" else self._answer.finish_reason
        if reason not in ("stop", "length", "cancelled"):
            raise self._failed(f"ended the generation with the reason {reason!r}")
        prompt_tokens = self._answer.prompt_tokens if self.prompt.images else None
        duration, weights = time.monotonic() - self.started, spans(self._answer.weights, self._answer.tokens)
        if self._core:
            self._replicas.hear(self._core.replica, weights, self.started)
        yield GenerationFinished(
            reason,
            cached_tokens=self._answer.cached_tokens,
            duration=duration,
            prompt_tokens=prompt_tokens,
            weights=weights,
        )

    async def _next(self) -> TokenChunk | None:
        while True:
            try:
                if self._response is None and self.end is None:
                    await self._connect()
                return await self._read()
            except (aiohttp.ClientError, RequestRefused) as error:
                self._give_up(error)

    async def _read(self) -> TokenChunk | None:
        if self._response and self._scores is not None:
            return await self._read_scored(self._response, self._scores)
        while self._response and not self._answer.is_complete and not self._answer.fault:
            data = await self._response.content.readany()
            if not data:
                break
            if chunk := self._answer.feed(data):
                self._has_tokens = True
                return chunk
        if isinstance(self._answer.fault, EngineFailed):
            raise self._failed("sent an answer that cannot be read", self._answer.fault)
        if self._answer.fault:
            raise self._answer.fault
        if self.end in (None, "lost") and not self._has_end():
            raise aiohttp.ServerDisconnectedError
        return None

    async def _read_scored(self, response: aiohttp.ClientResponse, top: int) -> TokenChunk | None:
        """Read an answer with log probabilities of the prompt, which comes as a whole."""
        if self._answer.is_complete:
            return None
        try:
            body = await read_whole(response.content.iter_any())
            if self.end is not None:
                return None
            scores = await asyncio.to_thread(separated, body)
            chunk = await asyncio.to_thread(self._answer.read, scores.rest)
            found = await asyncio.to_thread(prompt_logprobs, scores, top)
        except (Unreadable, *NO_JSON) as error:
            raise self._failed("sent an answer that cannot be read", error) from error
        self._answer.is_complete = self._has_tokens = chunk is not None
        return chunk and msgspec.structs.replace(chunk, prompt_logprobs=found, cached_tokens=self._answer.cached_tokens)

    def _has_end(self) -> bool:
        """Return True if the generation ended normally.

        A server that shuts down may send another finish reason before the first token; the prompt is then retried.
        """
        reason = self._answer.finish_reason
        return reason is not None and (self._has_tokens or reason in ("stop", "length"))

    async def _connect(self) -> None:
        """Send the prompt to a server.  If `finish` is called meanwhile, there is no response."""
        cached = await self._replicas.cached(self.prompt)
        if self.end is not None:  # a cancellation may have come while a thread looked into the caches
            return
        core = self._core = self._choose(cached)
        replica, facts = core.replica, self.prompt.facts
        endpoint = replica.endpoint_for(self.prompt)
        self._answer = Answer(endpoint, facts.sampling.most_alternatives)
        core.running.add(self)
        body = endpoint.body(self.prompt)
        session = hinted_session(facts) if replica.takes_hints else session_id(facts)
        headers = {**facts.scheduling.trace_headers, SESSION_HEADER: session}
        if replica.takes_hints and (over := self._replicas.place(session, core)):
            endpoint.add_arguments(body, {LET_GO: over})
        if len(replica.cores) > 1:
            headers[RANK_HEADER] = str(core.number)
        try:
            async with asyncio.timeout(None) as self._connecting:
                self._response = await replica.post(endpoint, body, headers)
        except TimeoutError:  # `finish` ends the wait for an answer by this timeout
            if self.end is None:
                raise
        finally:
            self._connecting = None

    def _choose(self, cached: Mapping[str, int] | None) -> Core:
        facts, without = self.prompt.facts, [*self._full, *self._unreachable]
        core = self._replicas.choose(facts, len(self.prompt.token_ids), without, self._broken, cached)
        if core is None and self._full:
            raise EngineOverloaded("The engine is overloaded: its queue is full. Try again in a moment.")
        if core is None:
            raise EngineDead("No engine can be reached.")
        replica = core.replica
        if self.prompt.grammar is not None and replica.grammar_fault:
            raise InvalidPrompt(replica.grammar_fault)
        if self.prompt.images and not replica.endpoint.takes_images:
            raise _images_refused(self.prompt, "The engine accepts no images: it needs --enable-scale-out.")
        return core

    def _give_up(self, error: aiohttp.ClientError | RequestRefused) -> None:
        """Leave the current server; raise unless the prompt may be retried on another one."""
        self.leave()
        self._answer = Answer(ENDPOINTS[0], None)
        if self.end == "lost":
            self.end = None
        assert self._core is not None
        replica = self._core.replica
        if self._has_tokens:
            raise self._lost(error) from None
        if isinstance(error, RequestRefused) and error.status in FULL:
            self._full.append(replica)
        elif isinstance(error, RequestRefused) and error.status < 500:
            if not replica.refuses_rank(error):
                raise _refusal(error, self.prompt) from error
            self._replicas.rank_anew()
            return
        elif isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            self._unreachable.append(replica)
            replica.exclude(f"The engine at {replica.url} cannot be reached.")
        elif len(self._broken) < LOSSES:
            self._broken.append(replica)
        else:
            raise self._lost(error) from None
        metrics.ENGINE_FAILOVERS.labels(replica.address).inc()

    def _lost(self, error: aiohttp.ClientError | RequestRefused) -> EngineFailed:
        if isinstance(error, RequestRefused):
            return self._failed(f"answered {error.status}: {named_error(error)}")
        return self._failed("closed the connection before the answer was complete", error)

    def _failed(self, what: str, cause: Exception | None = None) -> EngineFailed:
        """Return the error: clients read which of the engines failed, and only the operator reads its address."""
        assert self._core is not None
        replica = self._core.replica
        details = f"{replica.url}: {named_error(cause)}" if cause else replica.url
        return EngineFailed(f"{self._replicas.name(replica)} {what.rstrip('.')}.", details)


def _images_refused(prompt: Prompt, reason: str) -> ImagesRefused:
    return ImagesRefused(reason, dict.fromkeys(prompt.images, reason))


def _refusal(error: RequestRefused, prompt: Prompt) -> InvalidPrompt | EngineFailed:
    if error.status in (401, 403):
        logger.error("The engine refuses this server: %s", error)
        return EngineFailed("The engine refuses this server.")
    if error.status < 400:
        return EngineFailed("The engine answered with a redirect, which is not followed.")
    if prompt.images and _OF_IMAGES.search(str(error)):
        return _images_refused(prompt, str(error))
    return InvalidPrompt(str(error), param=error.param and PARAMETERS.get(error.param, error.param))

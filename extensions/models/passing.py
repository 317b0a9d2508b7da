"""The requests that this server does not read: embeddings, scores, rankings, audio and images, passed on as bytes.

A request goes to the server of the model that it names, and the answer comes back as it comes.  Its client's key stays
here, and so does the key of the other server.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import msgspec
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    TCPConnector,
    hdrs,
    web,
)

from penstock.api.http.access_log import CLIENT_CLOSED, MODEL
from penstock.api.http.auth import OWNER, team_of, title_of
from penstock.api.http.conventions import REQUEST_ID, REQUEST_ID_HEADER
from penstock.api.http.errors import STREAMING
from penstock.api.http.lines import LINE, USE
from penstock.api.http.openapi import FORM, JSON, Operation, operation
from penstock.api.http.prefix import path_of
from penstock.api.http.request_body import off_loop, receive, release
from penstock.api.http.sse import SSE_HEADERS
from penstock.api.resources.resources import ServerParts
from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.models.named_bodies import NamedBody, read_named
from penstock.extensions.models.targets import ROUTES, Directory, Target
from penstock.pipeline import metrics
from penstock.pipeline.errors import (
    InvalidRequest,
    ModelNotFound,
    ModelUnavailable,
    StageError,
    StoreFailed,
    UpstreamFailed,
)
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.request import trace_headers
from penstock.pipeline.tasks import LARGE_BYTES, apart
from penstock.pipeline.urls import shown_url
from penstock.services import tracing
from penstock.services.foreign import Unreadable, decoded, read_whole
from penstock.services.use import Use

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Seconds to connect to another server, and for it to list its models."""

READ_TIMEOUT = 300.0
"""Seconds for which the other server may be silent."""

KEPT_SECONDS = 2.0
"""Seconds for which an idle connection to another server is kept: less than after which servers close it."""

PASSED_BACK = (hdrs.CONTENT_TYPE, hdrs.CONTENT_LENGTH, hdrs.CONTENT_ENCODING, hdrs.RETRY_AFTER)
"""The headers of an answer that its client gets."""

REDIRECTS = range(300, 400)
"""The statuses that are not followed: an answer of another place is not what the operator has set."""

OF_KEYS = frozenset({401, 403, 407})
"""The statuses that are about the key of this server, which its client cannot mend."""

FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"})
"""The routes whose bodies are forms."""

UNNAMED = "--embeddings"
"""The model in the metrics for a server with models of its own."""

REFUSED = (ClientConnectorError, ConnectionTimeoutError)
"""The errors of a server that has got no byte of a request."""

_AROUND = 1_024
"""Bytes at the start and at the end of an answer in which its number of tokens is looked up."""

_TOTAL = re.compile(rb'"usage"\s*:\s*\{[^\[\]]{0,400}?"total_tokens"\s*:\s*(\d{1,9})\s*[,}]')

_BILLED = re.compile(rb'"billed_units"\s*:\s*(\{[^{}]{0,200}\})')
"""The tokens of an answer in Cohere's form."""
_BILLED_TOKENS = re.compile(rb'"(?:input|image)_tokens"\s*:\s*(\d{1,9})\s*[,}]')


class BrokenOff(Exception):
    """Another server broke off its answer."""


class PassedOn(Body):
    """A body that another server reads; this one reads the name of the model, and passes all on as it came."""

    model: str | None = None
    """The model; by default the only one that answers such requests."""


_REFUSALS = (InvalidRequest, ModelNotFound, ModelUnavailable, UpstreamFailed)


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_cards = msgspec.json.Decoder(_Cards).decode


@dataclass
class TokenCount:
    """The tokens that an answer says it took, found at its start or at its end, as it passes."""

    _start: bytes = b""
    _end: bytes = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the answer."""
        room = _AROUND - len(self._start)
        self._start += data[:room]
        self._end = (self._end + data[room:][-_AROUND:])[-_AROUND:]

    @property
    def total(self) -> int:
        """The tokens; 0 if the answer does not say it.

        Quotes within texts are escaped, so no text of a client counts.
        """
        known = self._start + self._end
        if found := _TOTAL.search(known):
            return int(found[1])
        billed = _BILLED.search(known)
        return sum(map(int, _BILLED_TOKENS.findall(billed[1]))) if billed else 0


@dataclass(eq=False)
class Names:
    """The names under which servers have their models, by the URL of each server; each lists them once."""

    session: ClientSession
    known: dict[str, Sequence[str]] = field(default_factory=dict)

    async def sent(self, url: str, target: Target, given: str | None) -> str | None:
        """Return the name that a server gets for its model, in the place of the one that the client gave."""
        if not target.name:
            return given
        there = self.known.get(url)
        if there is None:
            try:
                there = self.known[url] = await self._listed(url, target)
            except REFUSED:
                raise
            except (ClientError, TimeoutError):
                there = ()
        return next((name for name in (given, target.name) if name in there), there[0] if there else target.name)

    def forget(self, url: str) -> None:
        """Ask a server again: another one may be there."""
        self.known.pop(url, None)

    async def _listed(self, url: str, target: Target) -> Sequence[str]:
        """Return the names that a server lists; none if it has no such list."""
        timeout = ClientTimeout(CONNECT_TIMEOUT)
        headers = _with_key({}, target)
        async with self.session.get(
            f"{url}/v1/models", headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                return ()
            try:
                cards = await decoded(await read_whole(answer.content.iter_any()), _cards)
            except Unreadable:
                return ()
            return tuple(card.id for card in cards.data)


@dataclass(frozen=True)
class Passing:
    """The routes of the targets in a ``directory``."""

    session: ClientSession
    directory: Directory
    scheduler: Scheduler
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", Names(self.session))

    @property
    def routes(self) -> Sequence[web.RouteDef]:
        """The routes that a model answers."""
        handlers = {path: self.pass_form_on if path in FORMS else self.pass_on for path in ROUTES}
        handlers["/v1/audio/speech"] = self.pass_speech_on
        return [web.post(path, handlers[path]) for path in self.directory.paths]

    @operation(Operation(Any, body=PassedOn, refusals=_REFUSALS))
    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Have the server of the model answer, and pass its answer back as it comes."""
        return await self._pass(request)

    @operation(Operation(Any, body=PassedOn, refusals=_REFUSALS, body_type=FORM))
    async def pass_form_on(self, request: web.Request) -> web.StreamResponse:
        """Have the server of the model answer a form, and pass its answer back as it comes."""
        return await self._pass(request)

    @operation(Operation(bytes, body=PassedOn, refusals=_REFUSALS, answer_type="audio/mpeg"))
    async def pass_speech_on(self, request: web.Request) -> web.StreamResponse:
        """Have the server of the model speak, and pass the sound back as it comes."""
        return await self._pass(request)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        targets, path = self.directory.targets, path_of(request)
        if not targets.fit(path):
            raise web.HTTPNotFound
        given = await off_loop(read_named, await receive(request), _content_type(request))
        request[MODEL] = given.model or ""
        allowed = self.scheduler.allowed(request[OWNER])
        target = targets.of(given.model, path, allowed)
        request[MODEL] = given.model or target.name
        responding = nullcontext() if LINE in request else self.scheduler.admission.responding(request[OWNER])
        async with responding, AsyncExitStack() as leases:
            began, status = time.monotonic(), CLIENT_CLOSED
            try:
                with self.scheduler.in_flight:
                    answer, one = await self._first_answer(request, given, targets.in_turn(target, allowed), leases)
                del given
                async with answer:
                    release(request)
                    status = answer.status
                    return await self._passed_back(request, answer, one.name or request[MODEL])
            except StageError as error:
                status = error.status
                raise
            finally:
                label = target.name or UNNAMED
                metrics.PASSED_SECONDS.labels(label, str(status)).observe(time.monotonic() - began)

    async def _first_answer(
        self, request: web.Request, given: NamedBody, targets: Iterable[Target], leases: AsyncExitStack
    ) -> tuple[ClientResponse, Target]:
        """Return the answer of the first of several models that can, and which; ``leases`` has its lease alone."""
        failed: StageError | None = None
        for one in targets:
            try:
                async with AsyncExitStack() as lease:
                    urls = await lease.enter_async_context(one.servers())
                    answer = await self._answer_of(request, given, one, urls)
                    leases.push_async_exit(lease.pop_all())
                    return answer, one
            except (ModelUnavailable, UpstreamFailed) as error:
                failed = error
        assert failed is not None
        raise failed

    async def _answer_of(
        self, request: web.Request, given: NamedBody, target: Target, urls: Iterable[str]
    ) -> ClientResponse:
        """Return the answer of the first server of a model that takes a connection."""
        refused: Exception | None = None
        for url in urls:
            try:
                return await self._answer_at(request, given, target, url)
            except REFUSED as error:
                logger.warning("%s refuses a connection: %s", shown_url(url), named_error(error))
                target.leave_out(url)
                self.names.forget(url)
                refused = error
            except (ClientError, TimeoutError) as error:
                raise UpstreamFailed from error
        raise UpstreamFailed from refused

    async def _answer_at(self, request: web.Request, given: NamedBody, target: Target, url: str) -> ClientResponse:
        name = await self.names.sent(url, target, given.model)
        body = given.body
        if name is not None and name != given.model:
            body = await apart(len(body) > LARGE_BYTES, given.with_model, name)
        answer = await self.session.post(
            f"{url}{path_of(request)}", data=BytesIO(body), headers=_headers(request, target), allow_redirects=False
        )
        if answer.status == 404:
            self.names.forget(url)
        if answer.status in REDIRECTS or answer.status in OF_KEYS:
            answer.close()
            logger.warning("%s answers with status %s", shown_url(url), answer.status)
            raise UpstreamFailed
        return answer

    async def _passed_back(self, request: web.Request, answer: ClientResponse, model: str) -> web.StreamResponse:
        """Pass an answer back; if it breaks off, close the connection, as its client could not tell otherwise."""
        passed = web.StreamResponse(status=answer.status, headers=_passed_headers(answer.headers))
        request[STREAMING] = True
        await passed.prepare(request)
        tokens = TokenCount()
        try:
            async for data in _pieces(answer):
                tokens.feed(data)
                await passed.write(data)
        except BrokenOff as error:
            logger.warning(
                "%s broke off an answer: %s", shown_url(str(answer.url)), named_error(error.__cause__ or error)
            )
            if request.transport is not None:
                request.transport.close()
            return passed
        finally:
            if LINE not in request:
                self.scheduler.admission.spend_tokens(request[OWNER], tokens.total)
            if answer.status < 400:
                self._account(request, tokens.total, model)
        await passed.write_eof()
        return passed

    def _account(self, request: web.Request, tokens: int, model: str) -> None:
        """Have the store note what a request has used, without a wait for it; all its tokens count as read.

        What the line of a batch has used is counted with its result.
        """
        use = Use(
            id=f"passed_{secrets.token_hex(16)}",
            owner=request[OWNER],
            key_name=title_of(request),
            team=team_of(request),
            model=model,
            api=path_of(request).lstrip("/").removeprefix("v1/").removeprefix("v2/"),
            input_tokens=tokens,
        )
        if LINE in request:
            request[USE] = use
            return
        with suppress(StoreFailed):  # it is closed
            self.scheduler.store.used(use)


async def _pieces(answer: ClientResponse) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer as they come.  Raise `BrokenOff` if the server breaks it off."""
    try:
        async for data in answer.content.iter_any():
            yield data
    except (ClientError, TimeoutError) as error:
        raise BrokenOff from error


def _content_type(request: web.Request) -> str:
    """Return the declared type of a body, which another server gets, too."""
    declared = request.headers.get(hdrs.CONTENT_TYPE, JSON)
    if not declared.isascii() or not declared.isprintable():
        raise InvalidRequest("The Content-Type is not readable.")
    return declared


def _headers(request: web.Request, target: Target) -> dict[str, str]:
    """Return the headers of a request that the other server gets: its client's key is for this one alone."""
    headers = {
        **tracing.current_headers(trace_headers(request.headers)),
        "Content-Type": _content_type(request),
        "Accept-Encoding": "identity",
        REQUEST_ID_HEADER: request[REQUEST_ID],
    }
    return _with_key(headers, target)


def _with_key(headers: dict[str, str], target: Target) -> dict[str, str]:
    return headers | ({"Authorization": f"Bearer {target.key}"} if target.key else {})


def _passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a client gets; those of a stream tell proxies not to hold it back."""
    passed = {name: headers[name] for name in PASSED_BACK if headers.get(name, "").isascii() and name in headers}
    is_stream = passed.get(hdrs.CONTENT_TYPE, "").startswith(SSE_HEADERS["Content-Type"])
    return (SSE_HEADERS if is_stream else {}) | passed


@asynccontextmanager
async def passing(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Keep connections to the servers of models that are not read, for the length of a block; yield their routes."""
    async with ClientSession(
        connector=TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),  # else slow answers to one key let others wait
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT),
        cookie_jar=DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=(hdrs.USER_AGENT,),
    ) as session:
        directory = Directory(parts.settings, parts.scheduler.engine)
        yield Passing(session, directory, parts.scheduler).routes

"""A server as a check sees it: requests, answers and streams, all of bounded size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from io import BytesIO
from typing import Any, Self, TypeAlias

import aiohttp
import msgspec

from penstock.extensions.workbench.conformance.check import Lacking, Limited, Speech, Violation, must
from penstock.extensions.workbench.conformance.sse import EventReader, SentEvent
from penstock.pipeline.errors import NotRecorded
from penstock.pipeline.foreign_errors import named_error

Json: TypeAlias = dict[str, Any]

LONGEST_ANSWER = 4 * 2**20
"""Bytes of an answer, or of a stream, that are read."""
MOST_EVENTS = 50_000
"""Events of a stream that are read."""
DONE = "[DONE]"
"""The data that ends a stream of OpenAI's."""
ADVICE = "the server limits this key (429): raise its limits, or wait a minute, and repeat with --at-once 1 and --only"
"""The remedy for a server that refuses a request for its rate: that says nothing about the rule of a check."""

UNKNOWN = (404, 405, 501)
"""The statuses of a route that a server does not have."""
_NOT_HERE = (
    "not support",
    "unsupported",
    "not implemented",
    "not enabled",
    "disabled",
    "not available",
    "not configured",
    "unknown field",
)
"""Words of a refusal by which a server says that it cannot do something at all."""
_PATHS: Mapping[Speech, str] = {
    "responses": "/responses",
    "chat": "/chat/completions",
    "messages": "/messages",
    "decisions": "/decisions",
}
_LIMITS: Mapping[Speech, str] = {
    "responses": "max_output_tokens",
    "chat": "max_completion_tokens",
    "messages": "max_tokens",
}
"""The parameters that limit an answer."""
FEWEST_TOKENS = 16
"""The lowest limit that all dialects take."""
PREDICATE: Json = {"type": "predicate", "instructions": "The text asks for a greeting."}
"""The question of a decision."""


@dataclass(frozen=True)
class Answer:
    """An answer that is no stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def json(self) -> Json:
        """The body, which has to be one JSON object."""
        return as_object(self.body, "the answer")

    def accepted(self) -> Json:
        """Return the body of an answer that has to be a success."""
        if self.status // 100 == 2:
            return self.json
        text = self.body[:2000].decode(errors="replace")
        says_so = self.status in (400, 422) and any(words in text.lower() for words in _NOT_HERE)
        if self.status in UNKNOWN or says_so:
            raise Lacking(f"{self.status}: {text}")
        raise Violation(f"the request is right, and was refused: {self.status} {text}")

    def refused(self, *statuses: int) -> Json:
        """Return the body of an answer that has to be a refusal with one of the statuses."""
        if self.status not in statuses:
            raise Violation(f"the status is {self.status}, not {' or '.join(map(str, statuses))}")
        return self.json


@dataclass(frozen=True)
class Stream:
    """A stream that was read to its end."""

    answer: Answer
    """The status and the headers; the body is that of a stream that was refused."""
    events: Sequence[SentEvent]
    rest: bytes
    """The bytes after the last event."""

    @property
    def objects(self) -> list[Json]:
        """The data of all events but ``[DONE]``, each of which has to be a JSON object."""
        return [as_object(event.data.encode(), "an event") for event in self.events if event.data != DONE]


def as_object(data: bytes, name: str) -> Json:
    """Return the JSON object that ``data`` has to be."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Violation(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Violation(f"{name} is no JSON object")
    return value


@dataclass
class Server:
    """The server that is checked, and the connections to it."""

    base: str
    model: str
    session: aiohttp.ClientSession
    key: str = ""
    timeout: float = 60.0
    """Seconds for one request."""
    max_tokens: int = 1024
    """Tokens that an answer may have, unless a check limits it further."""
    _streams: dict[bytes, Stream | Violation] = field(default_factory=dict)
    _locks: dict[bytes, asyncio.Lock] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def opened(cls, base: str, model: str = "", **options: Any) -> AsyncGenerator[Self, None]:
        """Close all connections at the end of the block."""
        async with aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(force_close=True),  # a server may close a connection that waits
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,  # a small body may be a large one
            headers={"Accept-Encoding": "identity"},
        ) as session:
            yield cls(base, model, session, **options)

    def talk(self, speech: Speech) -> Talk:
        """Begin the requests of one check."""
        return Talk(self, speech)

    async def once(self, key: bytes, talk: Talk, body: Json) -> Stream:
        """Return the stream of a request that several checks send, which is sent once."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._streams:
                try:
                    self._streams[key] = await talk.open_stream("POST", talk.path, body)
                except Violation as violation:
                    self._streams[key] = violation
        stream = self._streams[key]
        if isinstance(stream, Violation):
            raise Violation(str(stream))
        return stream


@dataclass
class Talk:
    """The requests of one check, the last of which explains its failure."""

    server: Server
    speech: Speech
    sent: str = ""
    came: str = ""
    is_unrecorded: bool = False
    """True once the server has refused a request because it answers from recordings."""

    @property
    def path(self) -> str:
        """The path of the dialect."""
        return _PATHS[self.speech]

    def body(self, **fields: Any) -> Json:
        """Return a request of the dialect."""
        body: Json = {"model": self.server.model, **self.saying("Say hello.")}
        if self.speech == "decisions":
            body["questions"] = [PREDICATE]
        else:
            body |= {_LIMITS[self.speech]: self.server.max_tokens, "temperature": 0}
        return {name: value for name, value in (body | fields).items() if value is not None}

    def saying(self, text: str) -> Json:
        """Return the field of a request in which the user says the text."""
        return {"input": text} if self.speech in ("responses", "decisions") else {"messages": [user(text)]}

    async def ask(self, **fields: Any) -> Json:
        """Return the answer to a request with the fields, which has to be a success."""
        return (await self.send("POST", self.path, self.body(**fields))).accepted()

    async def try_ask(self, **fields: Any) -> Answer:
        """Return the answer to a request with the fields, whatever its status is."""
        return await self.send("POST", self.path, self.body(**fields))

    async def probe(self) -> Answer:
        """Return the answer to a right request for a few tokens, whatever its status is."""
        limit = _LIMITS.get(self.speech)
        return await self.try_ask(**({limit: FEWEST_TOKENS} if limit else {}))

    async def stream(self, **fields: Any) -> Stream:
        """Return the stream of a request, which has to be a success; equal requests of other checks share it."""
        body = self.body(**fields, stream=True)
        stream = await self.server.once(msgspec.json.encode([self.path, body]), self, body)
        self._note("POST", self.path, body, stream.answer.status, _shown(stream))
        if stream.answer.status != 200 or stream.answer.body:
            stream.answer.accepted()
            raise Violation(f"the request is for a stream, and {stream.answer.content_type or 'nothing'} came")
        return stream

    async def send(self, method: str, path: str, body: Json | bytes | None = None, *, key: str | None = None) -> Answer:
        """Return the answer to any request."""
        async with self._answer(method, path, body, key) as (answer, blocks):
            data = bytearray()
            async for block in blocks:
                data += block
                if len(data) > LONGEST_ANSWER:
                    raise Violation(f"the answer has more than {LONGEST_ANSWER} bytes")
        self._note(method, path, body, answer.status, data.decode(errors="replace"))
        return Answer(answer.status, answer.headers, bytes(data))

    async def open_stream(self, method: str, path: str, body: Json | None = None, *, most: int = MOST_EVENTS) -> Stream:
        """Return the events of a stream: all of them, or the first ones, after which the connection is closed."""
        async with self._answer(method, path, body) as (answer, blocks):
            reader, events, size, kept = EventReader(), list[SentEvent](), 0, bytearray()
            is_stream = Answer(answer.status, answer.headers, b"").content_type == "text/event-stream"
            async for block in blocks:
                size += len(block)
                if not is_stream:
                    kept += block
                else:
                    events += _read(reader, block)
                if size > LONGEST_ANSWER or len(events) > MOST_EVENTS:
                    raise Violation(f"the stream does not end after {size} bytes and {len(events)} events")
                if len(events) >= most:
                    answer.close()
                    break
        stream = Stream(Answer(answer.status, answer.headers, bytes(kept)), events[:most], reader.held)
        self._note(method, path, body, answer.status, _shown(stream))
        return stream

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Json | bytes | None, key: str | None = None
    ) -> AsyncGenerator[tuple[aiohttp.ClientResponse, AsyncIterator[bytes]], None]:
        self._note(method, path, body, None, "")
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        timeout = self.server.timeout
        try:
            async with (
                asyncio.timeout(timeout),
                self.server.session.request(
                    method,
                    self.server.base + path,
                    data=data and BytesIO(data),
                    headers=self._headers(key),
                    allow_redirects=False,
                ) as answer,
            ):
                if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                    raise Limited(ADVICE)
                yield answer, answer.content.iter_any()
        except TimeoutError:
            raise Violation(f"no whole answer came within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Violation(f"the connection broke: {named_error(error)}") from error

    def _headers(self, key: str | None) -> dict[str, str]:
        key = self.server.key if key is None else key
        headers = {"Content-Type": "application/json"}
        if self.speech == "messages":
            headers["anthropic-version"] = "2023-06-01"
        if key and self.speech == "messages":
            headers["x-api-key"] = key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _note(self, method: str, path: str, body: Json | bytes | None, status: int | None, came: str) -> None:
        shown = body.decode(errors="replace") if isinstance(body, bytes) else ""
        with suppress(TypeError):
            shown = shown or (msgspec.json.encode(body).decode() if body is not None else "")
        self.sent = f"{method} {path} {shown}".rstrip()
        self.came = "" if status is None else f"{status} {came}"
        self.is_unrecorded |= status == HTTPStatus.BAD_REQUEST and f'"{NotRecorded.code}"' in came


def _read(reader: EventReader, block: bytes) -> list[SentEvent]:
    try:
        return list(reader.feed(block))
    except UnicodeDecodeError as error:
        raise Violation(f"the stream is not UTF-8: {error}") from None


def _shown(stream: Stream) -> str:
    text = stream.answer.body.decode(errors="replace")
    return text or "\n".join(event.data for event in stream.events[-6:])


WORDS = 600
LONG = "word " * WORDS
"""A text by which a prompt is recognized: it has a token for each word, and other prompts here have fewer."""


def check_read(tokens: int, name: str) -> None:
    """Check by the tokens of a prompt that it has `LONG`.

    Shorter prompts cannot be compared: the usage of a server that runs several turns counts them all.
    """
    must(tokens >= WORDS, f"{name} was not read: the prompt has {tokens} tokens, and {WORDS} words")


def user(text: str) -> Json:
    """Return a message of the user."""
    return {"role": "user", "content": text}

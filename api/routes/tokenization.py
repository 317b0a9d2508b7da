"""Tokens of texts and of chats, and the text of tokens: as the engine reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from pydantic import Field

from penstock.api.dialect import READ_REFUSALS, Dialect, Edge, Read
from penstock.api.http.access_log import MODEL
from penstock.api.http.auth import OWNER
from penstock.api.http.errors import as_json, listed_as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.request_body import receive
from penstock.api.http.wire import Reading
from penstock.pipeline.errors import ContextTooLong, InvalidRequest
from penstock.pipeline.frames import TokenIds
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.json_body import read_json
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.engines.engine import engine_of, known_length
from penstock.stages.parse.parser import vocabulary_of
from penstock.stages.parse.text import TokenVocabulary, spelled
from penstock.stages.render.truncation import COUNTED

Value = TypeVar("Value")

OWN = "return_token_strs"
"""The parameter that a chat does not have."""


class TokenizeBody(Body):
    """A text, or a chat with ``messages``: the parameters are then those of ``POST /v1/chat/completions``."""

    required = "prompt"

    prompt: str
    """The text. A chat has ``messages`` in its place, and the parameters of a chat."""
    model: str | None = None
    """A name that is served; the first one by default."""
    add_special_tokens: bool | None = None
    """Put the tokens before and after the text that the vocabulary adds; true by default."""
    return_token_strs: bool | None = None
    """Return the text of each token, too."""


class DetokenizeBody(Body):
    """Tokens of a text."""

    required = "tokens"

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
    """The ids of the tokens."""
    model: str | None = None
    """A name that is served; the first one by default."""


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a prompt; ``token_strs`` are their texts, if the request wants them."""

    count: int
    max_model_len: int | None
    tokens: TokenIds
    token_strs: tuple[str, ...] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of tokens."""

    prompt: str


@dataclass
class TokenizeReader:
    """Reads one body, a chat as its dialect does; notes whether the client wants the texts of tokens."""

    chat: Dialect
    wants_texts: bool = False

    def __call__(self, body: bytes) -> Reading:
        """Read the body; raise `InvalidRequest` for a wrong one."""
        given: Any = read_json(body)
        if not isinstance(given, dict) or "messages" not in given:
            text = read_body(body, TokenizeBody)
            self.wants_texts = text.return_token_strs is True
            prompt = RawPrompt(text.prompt, adds_special=text.add_special_tokens is not False)
            return Reading(CreateResponse(model=text.model).continuing(prompt), self.chat.wire, place=_place)
        self.wants_texts = given.pop(OWN, None) is True
        return self.chat.read(msgspec.json.encode(given))


@dataclass(frozen=True)
class Tokenization:
    """The routes over the edge of Chat Completions."""

    edge: Edge

    @property
    def routes(self) -> Sequence[web.RouteDef]:
        """The routes."""
        return web.post("/tokenize", self.tokenize), web.post("/detokenize", self.detokenize)

    @operation(Operation(Tokens, body=TokenizeBody, refusals=READ_REFUSALS))
    async def tokenize(self, request: web.Request) -> web.Response:
        """Return the tokens of a text, or of the prompt of a chat."""
        read = TokenizeReader(self.edge.dialect)
        tokens = await self._tokens(request, read)
        texts = await self._decoded(request, _texts, tokens) if read.wants_texts else None
        scheduler = self.edge.scheduler
        longest = known_length(engine_of(scheduler.engine, scheduler.resolved(request[OWNER], request[MODEL])))
        return await listed_as_json(Tokens(len(tokens), longest, tokens, texts), "tokens")

    @operation(Operation(Detokenized, body=DetokenizeBody, refusals=READ_REFUSALS))
    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of tokens."""
        tokens = await self._tokens(request, self._read_tokens)
        return as_json(Detokenized(await self._decoded(request, _text, tokens)))

    async def _tokens(self, request: web.Request, read: Read) -> TokenIds:
        body = await receive(request)
        with self.edge.scheduler.in_flight:
            reading = await self.edge.read(request, body, read)
            try:
                return await self.edge.prompt_tokens(reading)
            except ContextTooLong as error:
                most = max(COUNTED, error.limit)
                message = f"This prompt has more than {most} tokens, and this server returns no more of a prompt."
                raise InvalidRequest(message, param=error.param) from error

    def _read_tokens(self, body: bytes) -> Reading:
        given = read_body(body, DetokenizeBody)
        prompt = RawPrompt(token_ids=tuple(given.tokens), adds_special=False)
        return Reading(CreateResponse(model=given.model).continuing(prompt), self.edge.dialect.wire, place=_place)

    async def _decoded(
        self, request: web.Request, decode: Callable[[TokenVocabulary, TokenIds], Value], tokens: TokenIds
    ) -> Value:
        """Return what ``decode`` makes of tokens; raise `InvalidRequest` for one that the vocabulary lacks."""
        scheduler = self.edge.scheduler
        served = scheduler.resolved(request[OWNER], request[MODEL])
        vocabulary = vocabulary_of(scheduler.pipeline, served)
        size: int | None = getattr(engine_of(scheduler.engine, served), "vocabulary_size", None)
        if vocabulary is None or size is None:
            message = "This server knows no vocabulary: tokens are read elsewhere."
            raise InvalidRequest(message, code="unsupported_operation")
        if max(tokens, default=0) >= size:
            message = "The vocabulary of the model does not have all of these tokens."
            raise InvalidRequest(message, param="tokens", code="invalid_value")
        return await apart(len(tokens) > MANY_VALUES, decode, vocabulary, tokens)


def _place(param: str) -> str:
    return "prompt" if param == "input" else param


def _texts(vocabulary: TokenVocabulary, tokens: TokenIds) -> tuple[str, ...]:
    return tuple(spelled(vocabulary, token)[0] for token in tokens)


def _text(vocabulary: TokenVocabulary, tokens: TokenIds) -> str:
    """Return the text of tokens; `TokenVocabulary.decode` has none for ids of the padding of a vocabulary."""
    padding = {token for token in set(tokens) if vocabulary.mark(token) == f"<|reserved_{token}|>"}
    if not padding:
        return vocabulary.decode(tokens)
    runs = groupby(tokens, lambda token: token if token in padding else None)
    return "".join(
        vocabulary.decode(tuple(run)) if token is None else f"<|reserved_{token}|>" * len(tuple(run))
        for token, run in runs
    )

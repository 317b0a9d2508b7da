"""Validation: the input file of a batch, read in slices, whose mistakes are named by the numbers of their lines.

A batch fails by what its file has wrong, as in OpenAI's API: a line that is no JSON or no request, another URL, a name
that stands twice, a model that is not served.  What is wrong in a request itself is the answer to its line alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.api.resources.resources import ServerParts
from penstock.extensions.batches.batch import BatchError, NewLine, StoredBatch
from penstock.extensions.batches.prefixes import prefix_of
from penstock.extensions.batches.stored_batches import StoredBatches
from penstock.pipeline.errors import InvalidRequest, LimitReached, ModelNotFound, StoredFileNotFound
from penstock.pipeline.protocol.params.json_body import NO_JSON, read_json, shortened
from penstock.pipeline.tasks import in_thread

MOST_LINES = 50_000
"""The most requests in a file."""

MOST_BREAKS = 1_000_000
"""The most line breaks in a file: blank lines take time, too."""

MOST_ERRORS = 100
"""The most mistakes that a batch names; the rest of the file is not read after them."""

PURPOSE = "batch"
"""The purpose with which an input file is uploaded."""

GENERATING = frozenset({"/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/decisions", "/v1/messages"})
"""The paths whose models are known here; those of others are known where their requests are passed on."""

_BOM = b"\xef\xbb\xbf"
_ADDED = 500
_KNOWN_NAMES = 1_000

ModelOf = Callable[[str | None], str]
"""Returns the served name of a model, or an empty text if the server has it from elsewhere; raises `ModelNotFound`."""


class _Line(msgspec.Struct):
    custom_id: Any = UNSET
    method: Any = UNSET
    url: Any = UNSET
    body: msgspec.Raw = msgspec.Raw()


class _Head(msgspec.Struct):
    """The parts of a request that decide where it runs, and those of which a prompt is made, in their order there."""

    model: Any = None
    stream: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()

    def prefix(self, model: str) -> str:
        """Return the text by which requests with equal beginnings sort together."""
        parts = self.tools, self.instructions, self.messages, self.input, self.prompt
        return prefix_of((blake2b(model.encode(), digest_size=32).hexdigest().encode(), *map(bytes, parts)))


_line = msgspec.json.Decoder(_Line)
_head = msgspec.json.Decoder(_Head)


class _Wrong(Exception):
    """A line has these mistakes."""

    def __init__(self, *errors: tuple[str, str, str | None]) -> None:
        super().__init__(*errors)
        self.errors = errors


@dataclass
class Reading:
    """The lines of a file for an ``endpoint``, of at most ``longest`` bytes each, read piece by piece.

    It takes time in proportion to the pieces, and is called in threads, one after the other.
    """

    endpoint: str
    model_of: ModelOf
    longest: int
    errors: list[BatchError] = field(default_factory=list)
    count: int = 0
    """Requests so far."""
    models: set[str] = field(default_factory=set)
    """The names of models as the lines have them, the first two at most."""
    _number: int = 0
    _begun: bytearray = field(default_factory=bytearray)
    _is_long: bool = False
    _names: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._served = lru_cache(_KNOWN_NAMES)(self._serve)

    @property
    def held(self) -> int:
        """The bytes of the line that has begun."""
        return len(self._begun)

    @property
    def is_over(self) -> bool:
        """True if no more of the file needs to be read."""
        return len(self.errors) >= MOST_ERRORS or self.count > MOST_LINES

    def feed(self, piece: bytes) -> list[NewLine]:
        """Read the next bytes; return the requests that end in them."""
        found = list[NewLine]()
        if self._number + piece.count(b"\n") > MOST_BREAKS:
            self.count = MOST_LINES + 1
            return found
        *ended, begun = piece.split(b"\n")
        for text in ended:
            self._grow(text)
            found += self._end_line()
        self._grow(begun)
        return found

    def finish(self) -> list[NewLine]:
        """Return the request of a last line without a line break; note what is wrong with the file as a whole."""
        last = list(self._end_line())
        if self.count > MOST_LINES:
            message = f"The input file has more requests than the {MOST_LINES:,} that a batch may have."
            self.errors = [BatchError("too_many_tasks", message)]
        elif not self.count and not self.errors:
            self.errors = [BatchError("empty_file", "The input file has no requests.")]
        return last

    def _grow(self, text: bytes) -> None:
        if self._is_long or len(self._begun) + len(text) > self.longest:
            self._is_long = True
            self._begun.clear()
        else:
            self._begun += text

    def _end_line(self) -> Iterator[NewLine]:
        line, is_long = bytes(self._begun), self._is_long
        self._begun.clear()
        self._is_long = False
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(_BOM)
        line = line.strip()
        if self.is_over or not (line or is_long):
            return
        self.count += 1
        try:
            yield self._read(line, is_long=is_long)
        except _Wrong as wrong:
            for code, message, param in wrong.errors[: MOST_ERRORS - len(self.errors)]:
                self.errors.append(BatchError(code, message, param, self._number))

    def _read(self, text: bytes, *, is_long: bool) -> NewLine:
        if is_long:
            raise _Wrong(("request_too_large", f"This line is over this server's limit of {self.longest} bytes.", None))
        line, head = _parsed(text)
        missing = [name for name in ("custom_id", "method", "url") if getattr(line, name) in (UNSET, None)]
        if not bytes(line.body):
            missing.append("body")
        if missing:
            raise _Wrong(
                *(("missing_required_parameter", f"Missing required parameter: '{name}'.", name) for name in missing)
            )
        for name in ("custom_id", "method", "url"):
            if not isinstance(getattr(line, name), str):
                raise _Wrong(("invalid_type", f"Invalid type for '{name}': expected a string.", name))
        if head is None:
            raise _Wrong(("invalid_type", "Invalid type for 'body': expected an object.", "body"))
        if line.method != "POST":
            got = shortened(line.method)
            raise _Wrong(("invalid_value", f"Invalid value: '{got}'. Supported values are: 'POST'.", "method"))
        if line.url != self.endpoint:
            message = "The URL provided for this request does not match the batch endpoint."
            raise _Wrong(("invalid_url", message, "url"))
        self._check_name(line.custom_id)
        if head.stream is True:
            raise _Wrong(("streaming_unsupported", "Streaming is not supported in the Batch API.", "body.stream"))
        model = self._model(head)
        return NewLine(
            self._number, custom_id=line.custom_id, body=bytes(line.body), model=model, prefix=head.prefix(model)
        )

    def _check_name(self, custom_id: str) -> None:
        digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest in self._names:
            message = f"The custom_id '{shortened(custom_id)}' is that of another request in this file."
            raise _Wrong(("duplicate_custom_id", message, "custom_id"))
        self._names.add(digest)

    def _model(self, head: _Head) -> str:
        """Return the served name of the model of a request; another type than a text is for its answer to refuse."""
        name = head.model if isinstance(head.model, str) else None
        if len(self.models) < 2:  # else they are several
            self.models.add(name or "")
        model, refusal = ("", None) if head.model is not None and name is None else self._served(name)
        if refusal:
            raise _Wrong(("model_not_found", refusal, "body.model"))
        return model

    def _serve(self, name: str | None) -> tuple[str, str | None]:
        try:
            return self.model_of(name), None
        except ModelNotFound as error:
            return "", error.message


def _parsed(text: bytes) -> tuple[_Line, _Head | None]:
    """Return the parts of a line, and those of its request if that is an object."""
    try:
        text.decode()  # what is skipped would not be checked
        try:
            line = _line.decode(text)
        except msgspec.DecodeError:
            line = _line.decode(msgspec.json.encode(read_json(text)))  # a lone surrogate, which JavaScript may send
        is_object = bytes(line.body)[:1] == b"{"
        return line, _head.decode(line.body) if is_object else None
    except (*NO_JSON, InvalidRequest) as error:
        raise _Wrong(("invalid_json_line", "This line is not parseable as valid JSON.", None)) from error


@dataclass(frozen=True)
class Validation:
    """Reads the input files of batches of OpenAI's API.

    ``within_bounds`` raises `LimitReached` if an owner may not have the lines that its block lets begin.
    """

    parts: ServerParts
    stored: StoredBatches
    within_bounds: Callable[[str, int], AbstractAsyncContextManager[None]]

    async def __call__(self, batch: StoredBatch) -> None:
        """Add the lines of a batch, and let it begin, or fail.  Raises `GivenUp`, or `StoreFailed`."""
        reading = Reading(batch.endpoint, partial(self._model_of, batch), longest=self.parts.settings.max_body_bytes)
        errors = await self._read(batch, reading)
        if not errors:
            (model, *others) = reading.models
            try:
                async with self.within_bounds(batch.owner, reading.count):
                    await self.stored.begin(batch.id, "" if others else model)
            except LimitReached as error:
                errors = [BatchError(error.code or "rate_limit_exceeded", error.message)]
        if errors:
            await self.stored.fail(batch.id, errors)

    async def _read(self, batch: StoredBatch, reading: Reading) -> list[BatchError]:
        """Add the lines of the input file; return what is wrong with it."""
        shelf = self.parts.scheduler.store.files
        file_id = batch.input_file_id or ""
        file = None if shelf is None else await shelf.get(file_id, batch.owner)
        if shelf is None or file is None:
            return [_missing(file_id)]
        if file.purpose != PURPOSE:
            message = f"The file {shortened(file_id)} has the purpose '{file.purpose}'. It must be '{PURPOSE}'."
            return [BatchError("invalid_request", message, "file_id")]
        try:
            async for piece in shelf.chunks(file):
                await self._add(batch, reading, await in_thread(reading.feed, piece))
                if reading.is_over:
                    break
            await self._add(batch, reading, await in_thread(reading.finish))
        except StoredFileNotFound:
            return [_missing(file_id)]
        return reading.errors

    async def _add(self, batch: StoredBatch, reading: Reading, lines: list[NewLine]) -> None:
        if not reading.errors:  # else it fails, and runs nothing
            for first in range(0, len(lines), _ADDED):
                await self.stored.add_lines(batch.id, lines[first : first + _ADDED])

    def _model_of(self, batch: StoredBatch, name: str | None) -> str:
        return self.parts.scheduler.resolved(batch.owner, name) if batch.endpoint in GENERATING else ""


def _missing(file_id: str) -> BatchError:
    message = f"Cannot find file {shortened(file_id)}, or this API key does not have access to it."
    return BatchError("invalid_request", message, "file_id")

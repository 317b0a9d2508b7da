"""The recording of one answer: its folder, which the writer's thread fills with what the proxy has noted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.extensions.workbench.wiretap.spoken import Generation, redacted_answer
from penstock.extensions.workbench.wiretap.streams import BodyReader, Decoder, EventReader, Unrecordable
from penstock.extensions.workbench.wiretap.token_file import Asked, NoTokens, write_tokens
from penstock.extensions.workbench.wiretap.tokens import WITH_TOKENS, Tokens
from penstock.pipeline import metrics
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.pipeline.recordings.format import End, Failure, Header, line
from penstock.pipeline.recordings.masking import mask, mask_json
from penstock.pipeline.recordings.response_folder import REQUEST, append, write_json
from penstock.pipeline.recordings.wire import WIRE, AnswerBegun, WireBody, WireEvent

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True)
class Sent:
    """The body of a request, and its ``Content-Encoding``."""

    body: bytes
    coding: str


@dataclass(frozen=True)
class Begun:
    """The headers of an answer."""

    status: int
    content_type: str
    coding: str


@dataclass(frozen=True)
class Over:
    """The end of an answer: in order, with a failure, or because the client left."""

    failure: Failure | None = None
    abandoned: bool = False


Entry: TypeAlias = Sent | Begun | bytes | Over


@dataclass(eq=False)  # hashed by identity
class WireRecording:
    """The folder of one answer.  The proxy sets ``is_cut``; all else belongs to the writer's thread.

    ``written`` is called with the number of bytes that need not be kept any more.  ``source_of`` returns where a model
    is, if that is known at the end of the answer.
    """

    path: Path
    header: Header
    generation: Generation
    started: float
    keeps_texts: bool
    written: Callable[[int], None]
    source_of: Callable[[str], str | None]
    is_cut: bool = False
    _tokens: Tokens | None = None
    _lines: list[bytes] = field(default_factory=list)
    _frames: int = 0
    _has_ended: bool = False

    @property
    def folder(self) -> WireRecording:
        """The recording itself, which is one file beside the request."""
        return self

    def add(self, at: float, entry: Entry) -> None:
        """Handle an entry of the queue.  Raise `Unrecordable` if the recording has to be cut."""
        try:
            if not self.is_cut:
                self._add(at - self.started, entry)
        finally:
            self.written(len(entry) if isinstance(entry, bytes) else len(entry.body) if isinstance(entry, Sent) else 0)

    def _add(self, at: float, entry: Entry) -> None:
        match entry:
            case Sent(body, coding):
                self._begin(body, coding)
            case Begun(status, content_type, coding):
                is_stream = content_type.partition(";")[0].strip().lower() == EVENT_STREAM
                self._decoder, self._reader = Decoder(coding), EventReader() if is_stream else BodyReader()
                self._write(at, AnswerBegun(status, content_type))
            case bytes():
                for piece in self._decoder.feed(entry):
                    for frame in self._reader.feed(piece):
                        self._take(at, frame)
            case Over(failure, abandoned):
                if isinstance(self._reader, BodyReader):
                    self._take(at, self._reader.whole())
                end = End(self._frames, failure, abandoned, "client_left" if abandoned else "")
                self._lines.append(line(end))
                self._has_ended = True
                self.save()
                self._write_tokens(at, end)

    def _begin(self, body: bytes, coding: str) -> None:
        """Create the folder, with the request."""
        plain = b"".join(Decoder(coding).feed(body))
        try:
            sent = msgspec.json.decode(plain)
        except NO_JSON as error:
            raise Unrecordable("its request is not JSON") from error
        if not isinstance(sent, dict):
            raise Unrecordable("its request is no JSON object")
        kept = self.generation.request(sent)
        model = sent.get("model")
        left_out = tuple(name for name in sent if name not in kept)
        self.header = replace(self.header, model=model if isinstance(model, str) else "", left_out=left_out)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.keeps_texts:
            write_json(self.path / REQUEST, kept)
            if self.generation.dialect in WITH_TOKENS:
                self._tokens, self._asked = Tokens(), Asked.of(sent, kept)
        append(self.path / WIRE, line(self.header), os.O_CREAT | os.O_TRUNC)

    def _take(self, at: float, frame: WireEvent | WireBody) -> None:
        if self._tokens:
            self._tokens.read(at, frame)
        self._write(at, self._redacted(frame))

    def _write_tokens(self, at: float, end: End) -> None:
        """Write the tokens of the answer, if the server has sent them."""
        tokens, self._tokens = self._tokens, None
        if tokens is None or not tokens.are_partly_known:
            return
        header = replace(self.header, source=self.source_of(self.header.model))
        try:
            write_tokens(self.path, header, self._asked, tokens, at, end)
        except NoTokens as error:
            logger.warning("The recording of %s has no tokens: %s", self.path.name, error)

    def _write(self, at: float, frame: Any) -> None:
        self._lines.append(line(frame, at))
        self._frames += 1

    def _redacted(self, frame: WireEvent | WireBody) -> WireEvent | WireBody:
        data, text = frame.data, frame.text
        if data is not msgspec.UNSET:
            data = redacted_answer(data)
            return replace(frame, data=data if self.keeps_texts else mask_json(data))
        return frame if self.keeps_texts or text in (msgspec.UNSET, DONE) else replace(frame, text=mask(str(text)))

    def save(self) -> None:
        """Append the new lines to the file."""
        if self._lines and not self.is_cut:
            lines, self._lines = self._lines, []
            append(self.path / WIRE, b"".join(lines), os.O_APPEND)

    def lose(self, error: Exception) -> None:
        """Stop recording after an error, leaving the file without an `End`."""
        if self.is_cut:
            return
        if isinstance(error, Unrecordable) and not self._has_ended and self._frames:
            self._keep_lines()
        self.is_cut = True
        metrics.RECORDINGS_CUT.inc()
        bug = None if isinstance(error, (OSError, Unrecordable)) else error
        logger.warning("The recording of %s is cut: %s", self.path.name, named_error(error), exc_info=bug)

    def _keep_lines(self) -> None:
        """Write what was read before something that cannot be read."""
        with suppress(OSError):  # the disk may be full, and the recording is cut in any case
            self.save()


DONE = "[DONE]"
"""The last event of OpenAI's streams, which is no JSON."""

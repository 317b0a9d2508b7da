"""The tap of the proxy: it notes the bytes that pass, and never waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from penstock.extensions.workbench.wiretap.recording import Begun, Entry, Over, Sent, WireRecording
from penstock.extensions.workbench.wiretap.sources import Sources
from penstock.extensions.workbench.wiretap.spoken import Generation, generation_at
from penstock.extensions.workbench.wiretap.tokens import WITH_TOKENS
from penstock.pipeline import metrics
from penstock.pipeline.distribution import own_version
from penstock.pipeline.frames import Origin
from penstock.pipeline.recordings.format import FORMAT, Failure, Header
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.pipeline.recordings.writer import PAUSE_SECONDS, Writer
from penstock.pipeline.urls import shown_url

logger = logging.getLogger(__name__)

LONGEST_REQUEST = 32 * 2**20
"""Bytes of the body of a request from which on it passes without a recording."""

MOST_NOTED = 256 * 2**20
"""The most bytes that wait for the disk, for all recordings together."""

NAMED = b"token_ids"
"""Part of the names of the fields that ask for the ids of tokens."""

REPEATED = ("anthropic-version", "anthropic-beta", "openai-beta")
"""The headers of a request that are recorded: those that change an answer, and are no secrets."""


@dataclass
class Tap:
    """Records the answers of the server ``upstream`` to ``generations`` that the ``condition`` chooses."""

    folder: Path
    upstream: str
    generations: Mapping[str, Generation]
    condition: Condition = ALWAYS
    keeps_texts: bool = True
    most_noted: int = MOST_NOTED
    pause: float = PAUSE_SECONDS
    clock: Callable[[], float] = time.monotonic
    noted: int = 0
    """Bytes that were put into the queue."""
    written: int = field(default=0, init=False)
    """Bytes that have left the queue; counted by the thread alone."""

    def __post_init__(self) -> None:
        self.sources = Sources()
        self.writer = Writer[WireRecording](self.folder, self.pause)

    async def close(self) -> None:
        """Write what was noted."""
        await self.writer.close()

    def listener(self, path: str, headers: Mapping[str, str]) -> Listener:
        """Return what notes an exchange, if that is to be recorded."""
        generation = generation_at(path, self.generations)
        now = datetime.now(UTC)
        if generation is None:
            return Listener()
        name = f"{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}-{generation.dialect}-{token_hex(4)}"
        if not self._chooses(name, headers):
            return Listener()
        header = Header(
            FORMAT,
            versions={"penstock": own_version()},
            recorded_at=now.isoformat(timespec="microseconds"),
            upstream=shown_url(self.upstream),
            dialect=generation.dialect,
            path=path,
            headers={name: headers[name] for name in REPEATED if name in headers},
        )
        recording = WireRecording(
            self.folder / name,
            header=header,
            generation=generation,
            started=self.clock(),
            keeps_texts=self.keeps_texts,
            written=self._count_written,
            source_of=self.sources.of,
        )
        return Recorded(self, recording, headers.get("Content-Encoding", ""))

    def _chooses(self, name: str, headers: Mapping[str, str]) -> bool:
        return self.condition.chooses(name, Origin(recorded=self.condition.is_met_by(headers)))

    def _count_written(self, size: int) -> None:
        self.written += size

    def has_room(self, size: int) -> bool:
        """True if as many bytes more may wait for the disk."""
        return self.noted - self.written + size <= self.most_noted


class Listener:
    """Hears what one exchange consists of; this base class notes nothing.

    ``names_token_ids`` is True if the request may ask for the ids of tokens.
    """

    is_recording = False
    names_token_ids = False

    @property
    def may_get_tokens(self) -> bool:
        """True if the tokens of the answer are recorded if the server sends them."""
        return False

    def sent(self, data: bytes) -> None:
        """Hear a piece of the body of the request."""

    def begun(self, status: int, headers: Mapping[str, str]) -> None:
        """Hear the headers of the answer."""

    def came(self, data: bytes) -> None:
        """Hear a piece of the answer."""

    def over(self, problem: str = "", *, abandoned: bool = False) -> None:
        """Hear the end, and the ``problem`` if the server broke the answer off; later calls change nothing."""


@dataclass
class Recorded(Listener):
    """Notes one exchange; an answer that is no success leaves no recording."""

    tap: Tap
    recording: WireRecording
    coding: str
    _sent: list[bytes] = field(default_factory=list)
    _size: int = 0
    _has_begun: bool = False
    _last: bytes = b""  # of the request so far, as the name may be cut
    names_token_ids: bool = False
    is_recording = True

    @property
    def may_get_tokens(self) -> bool:
        """True if the tokens of the answer are recorded if the server sends them."""
        return self.recording.keeps_texts and self.recording.generation.dialect in WITH_TOKENS

    def sent(self, data: bytes) -> None:
        """Note a piece of the body of the request."""
        self._size += len(data)
        if self._size > LONGEST_REQUEST:
            self._cut("its request is too long")
        elif self._takes(len(data)):
            self.names_token_ids |= NAMED in self._last + data
            self._last = (self._last + data[-len(NAMED) :])[-len(NAMED) :]
            self._sent.append(data)

    def begun(self, status: int, headers: Mapping[str, str]) -> None:
        """Note the headers of the answer."""
        body, self._sent = b"".join(self._sent), []
        if self.recording.is_cut or not 200 <= status < 300:
            self.tap.noted -= len(body)
            return
        self._has_begun = True
        self._note(Sent(body, self.coding))
        self._note(Begun(status, headers.get("Content-Type", ""), headers.get("Content-Encoding", "")))

    def came(self, data: bytes) -> None:
        """Note a piece of the answer."""
        if self._has_begun and self._takes(len(data)):
            self._note(data)

    def over(self, problem: str = "", *, abandoned: bool = False) -> None:
        """Note the end of the answer, and the ``problem`` if the server broke it off."""
        if self._has_begun:
            over, now = Over(Failure("EngineFailed", problem) if problem else None, abandoned), self.tap.clock()
            self.tap.sources.when_known(lambda: self.tap.writer.waiting.append((self.recording, now, over)))
            self._has_begun = False
        self.tap.noted -= sum(map(len, self._sent))
        self._sent = []

    def _takes(self, size: int) -> bool:
        """Count bytes that will be noted; False if the recording is cut."""
        if not self.recording.is_cut and not self.tap.has_room(size):
            self._cut("the disk is too slow")
        if self.recording.is_cut:
            return False
        self.tap.noted += size
        return True

    def _cut(self, reason: str) -> None:
        if not self.recording.is_cut:
            self.recording.is_cut = True
            metrics.RECORDINGS_CUT.inc()
            logger.warning("The recording of %s is cut: %s", self.recording.path.name, reason)

    def _note(self, entry: Entry) -> None:
        self.tap.writer.waiting.append((self.recording, self.tap.clock(), entry))

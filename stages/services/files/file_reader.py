"""Reading the files of a conversation: the model reads the text of each in the place of its part.

The texts are cached by the SHA-256 of the files, so that the turns of a conversation do not read the same file again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from binascii import a2b_base64
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec
from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import InputFile
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.stages.services.files.names import plain_name
from penstock.stages.services.foreign import Unreadable, read_whole
from penstock.stages.services.lru_cache import LruCache
from penstock.stages.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from aiohttp.abc import AbstractResolver

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Given = TypeVarTuple("Given")

MOST_AT_ONCE = 4
"""Files that are read at once, each in a process."""
KEPT_CHARACTERS = 64 << 20
"""Characters of the texts that are cached."""

_KEPT_SECONDS = 300.0
_PROGRAM = "penstock.stages.services.files.extraction"
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; penstock)", "Accept": "*/*"}
_PIECE = 1 << 16  # a multiple of four characters, so that each piece of base64 can be decoded alone
_HEAD = re.compile(r"data:(?P<type>[^,]{0,200}?)(?P<base64>;base64)?,", re.IGNORECASE)
_MARKS = re.compile(r'[<>"]')

_threads = ThreadPoolExecutor(MOST_AT_ONCE, "files")
"""Other threads must stay free for requests without files."""


@dataclass(frozen=True)
class FileLimits:
    """The limits of reading one file; ``characters`` also limits the texts of all files of a conversation."""

    bytes: int = 32 << 20
    seconds: float = 20.0
    memory: int = 1 << 30
    pages: int = 2_000
    inflated: int = 256 << 20
    """Bytes to which an archive may inflate."""
    characters: int = 4_000_000


class NotRead(Exception):
    """The file cannot be read; the message is written for the client."""

    def __init__(self, message: str, *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.is_unsupported = is_unsupported
        """True if no file of its kind is read here."""


class _Head(msgspec.Struct):
    """The first line of what the program writes: ``memory`` is the most that it took."""

    problem: str
    memory: int
    is_unsupported: bool = False


@dataclass(frozen=True)
class _Content:
    """A file with the type that its sender declares."""

    data: bytes
    media_type: str
    digest: str

    @classmethod
    def of(cls, data: bytes, media_type: str) -> _Content:
        """Return the file with its SHA-256, which takes long to compute."""
        return cls(data, media_type, sha256(data).hexdigest())

    @property
    def charset(self) -> str:
        """The declared encoding, or an empty string."""
        found = re.search(r"charset=[\"']?([\w.:-]{1,40})", self.media_type, re.IGNORECASE)
        return found[1] if found else ""


class FileReader:
    """Reads files in processes of their own, fetching those with a URL, and caches their texts."""

    def __init__(
        self,
        limits: FileLimits = FileLimits(),
        allowed: AllowedNetworks = NOTHING_ALLOWED,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._limits = limits
        self._allowed = allowed
        self._resolver = resolver
        self._clock = clock
        self._texts: LruCache[str] = LruCache(KEPT_CHARACTERS)
        """The texts, by the SHA-256 of the file and what is declared of it."""
        self._fetched: LruCache[tuple[float, str]] = LruCache(KEPT_CHARACTERS)
        """The time of the fetch and the name of the text, by URL."""

    @property
    def limits(self) -> FileLimits:
        """The limits of one file."""
        return self._limits

    async def text_of(self, data: bytes, name: str, media_type: str) -> str:
        """Return the text of a file; raises `NotRead`."""
        content = await self._in_thread(_Content.of, data, media_type)
        return (await self._read(content, name))[1]

    async def read_all(self, files: Sequence[tuple[InputFile, str]]) -> list[str]:
        """Return what the model reads for each file; the second value of each is its path in the request.

        Raises `InvalidRequest` with that path if a file cannot be read, or is too much beside those before it.  They
        are read one after another, so that one conversation takes no more than one place of `MOST_AT_ONCE`.
        """
        texts, size = list[str](), 0
        for file, path in files:
            name = name_of(file)
            try:
                text = await self._text(file, name)
            except NotRead as error:
                raise InvalidRequest(f"The file {name!r} cannot be read. {error}", param=path) from error
            size += len(text)
            if size > self._limits.characters:
                message = f"The files of a conversation may have {self._limits.characters:,} characters together."
                raise InvalidRequest(message, param=path)
            texts.append(f'<file name="{name}">\n{text}\n</file>\n')
        return texts

    async def _text(self, file: InputFile, name: str) -> str:
        if isinstance(url := file.file_url, str):
            return await self._text_at(url, name)
        data = file.file_data if isinstance(file.file_data, str) else ""
        return (await self._read(await self._in_thread(self._content, data), name))[1]

    async def _text_at(self, url: str, name: str) -> str:
        fetched_at, key = self._fetched.get(url) or (0.0, "")
        if key and fetched_at + _KEPT_SECONDS >= self._clock() and (text := self._texts.get(key)) is not None:
            return text
        content = await self._fetch(url)
        key, text = await self._read(content, name)
        self._fetched.put(url, (self._clock(), key), len(url))
        return text

    async def _read(self, content: _Content, name: str) -> tuple[str, str]:
        """Return the name of the text in the cache, and the text."""
        is_html = "html" in content.media_type.lower() or name.lower().endswith((".html", ".htm"))
        key = f"{content.digest} {content.charset} {is_html}"
        if (known := self._texts.get(key)) is not None:
            return key, known
        order = {"charset": content.charset, "is_html": is_html, "limits": asdict(self._limits)}
        text = await self._in_thread(self._extracted, msgspec.json.encode(order) + b"\n", content.data)
        self._texts.put(key, text, len(text))
        return key, text

    async def _in_thread(self, work: Callable[[Unpack[Given]], Result], *given: *Given) -> Result:
        return await asyncio.get_running_loop().run_in_executor(_threads, work, *given)

    async def _fetch(self, url: str) -> _Content:
        from penstock.stages.services.web import fetch  # noqa: PLC0415 - a replay, which fetches nothing, starts sooner

        async def read(answer: ClientResponse) -> _Content:
            try:
                data = await read_whole(answer.content.iter_any(), self._limits.bytes)
            except Unreadable:
                raise self._too_large() from None
            return await self._in_thread(_Content.of, data, answer.headers.get("Content-Type", "")[:200])

        fetcher = fetch.Fetcher(_HEADERS, self._allowed, self._resolver)
        try:
            return await fetcher.fetch(url, read)
        except fetch.NotFetched as error:
            raise NotRead(f"{shortened(url)} could not be fetched. {error}") from error
        finally:
            await fetcher.close()

    def _content(self, text: str) -> _Content:
        """Return the file in a data URL, or in base64 alone."""
        head = _HEAD.match(text)
        if head is None and text[:5].lower() == "data:":
            raise NotRead("Its data URL has no data.")
        media_type, start = (head["type"], head.end()) if head else ("", 0)
        if (len(text) - start) // 4 * 3 > self._limits.bytes:
            raise self._too_large()
        if head and not head["base64"]:
            return _Content.of(unquote_to_bytes(text[start:]), media_type)
        return _Content.of(b"".join(_decoded(text, start)), media_type)

    def _extracted(self, order: bytes, data: bytes) -> str:
        try:
            ended = subprocess.run(  # noqa: S603 - this project's own command line
                (sys.executable, "-I", "-m", _PROGRAM),
                input=order + data,
                capture_output=True,
                timeout=self._limits.seconds,
                env={},
                cwd="/",
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotRead(f"Reading it takes longer than {self._limits.seconds:g} seconds.") from None
        line, _, text = ended.stdout.partition(b"\n")
        if ended.returncode != 0:
            logger.warning("Reading a file ended with %s: %s", ended.returncode, shortened(_last_line(ended.stderr)))
            raise NotRead("Reading it takes too much memory or time, or it is damaged.")
        head = msgspec.json.decode(line, type=_Head)
        if head.problem:
            raise NotRead(head.problem, is_unsupported=head.is_unsupported)
        return text.decode()

    def _too_large(self) -> NotRead:
        return NotRead(f"It is larger than {self._limits.bytes:,} bytes.")


def _last_line(errors: bytes) -> str:
    return errors.decode(errors="replace").strip().rpartition("\n")[2]


def name_of(file: InputFile) -> str:
    """Return the name of a file without its folders and without what could forge a mark of a file."""
    given = file.filename if file.filename is not UNSET else ""
    if not given and isinstance(file.file_url, str):
        given = unquote(urlsplit(file.file_url).path)
    return safe_name(given)


def safe_name(given: str) -> str:
    """Return a name without its folders and without what could forge a mark of a file."""
    return _MARKS.sub("_", plain_name(given))


def _decoded(text: str, start: int) -> Iterator[bytes]:
    """Decode base64 in pieces, because decoding holds the GIL; lines may be broken, and padding may be missing."""
    for space in "\n\r\t ":  # a regular expression would hold the GIL ten times as long
        if text.find(space, start) >= 0:
            text, start = text[start:].replace(space, ""), 0
    for at in range(start, len(text), _PIECE):
        piece = text[at : at + _PIECE]
        if at + _PIECE >= len(text):
            piece += "=" * (-len(piece) % 4)
        try:
            yield a2b_base64(piece, strict_mode=True)
        except ValueError:
            raise NotRead("It is not valid base64.") from None

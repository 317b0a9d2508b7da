"""Reading the files of a conversation: the model reads the text of each in the place of its part.

A model that sees images is also shown pages of PDFs.  All is cached by the SHA-256 of the files, so that the turns of a
conversation do not read the same file again.
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
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias, TypeVar, TypeVarTuple, Unpack
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec
from msgspec import UNSET

from penstock.extensions.tools.files.stored_files import StoredFile, StoredFiles
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.items import FileReading, InputFile, InputImage
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.readings import TEXT_ONLY
from penstock.pipeline.urls import shown_url
from penstock.services.file_marks import between_marks, marks, safe_name
from penstock.services.file_reading import PlacedFile
from penstock.services.foreign import Unreadable, read_whole
from penstock.services.lru_cache import LruCache
from penstock.services.slots import Slots
from penstock.services.store.store import Store
from penstock.services.tools import USUAL_LIMITS, FileLimits, HostSettings
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.stages.models.images import MOST_IMAGE_BYTES, NoImage, as_data_url

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from aiohttp.abc import AbstractResolver

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Given = TypeVarTuple("Given")

MOST_AT_ONCE = 4
"""Files that are read at once, each in a process; those of one API key have half of the places."""
KEPT_CHARACTERS = 64 << 20
"""Characters of the texts and data URLs that are cached."""

_KEPT_SECONDS = 300.0
_PROGRAM = "penstock.extensions.tools.files.extraction"
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; penstock)", "Accept": "*/*"}
_PIECE = 1 << 16  # a multiple of four characters, so that each piece of base64 can be decoded alone
_HEAD = re.compile(r"data:(?P<type>[^,]{0,200}?)(?P<base64>;base64)?,", re.IGNORECASE)
_GONE = "It was deleted, or there never was such a file."
_Parts: TypeAlias = tuple[str | InputImage, ...]

_SHOWS = {"low": "none", "auto": "scans", "high": "all"}
"""The pages that a detail shows as images to a model that sees some: scans are those without text."""

_threads = ThreadPoolExecutor(2 * MOST_AT_ONCE, "files")
"""Threads for processes and for what comes before them; others must stay free for requests without files."""


class NotRead(Exception):
    """The file cannot be read; the message is written for the client."""

    def __init__(self, message: str, *, is_unsupported: bool = False) -> None:
        super().__init__(message)
        self.is_unsupported = is_unsupported
        """True if no file of its kind is read here."""


class _Head(msgspec.Struct):
    """The first line of what the program writes: ``memory`` is the most that it took.

    ``parts`` are the sizes of the texts and images after this line, in bytes, those of images as negative numbers.
    """

    problem: str
    memory: int
    parts: tuple[int, ...]
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


@dataclass
class _Sums:
    """The sums of what was read of the files of one conversation."""

    limits: FileLimits
    characters: int = 0
    shown: int = 0

    def add(self, parts: _Parts) -> None:
        """Count a file; raise `NotRead`, and count nothing, if it is too much beside those before it."""
        characters = self.characters + sum(len(each) for each in parts if isinstance(each, str))
        if characters > (most := self.limits.characters):
            raise NotRead(f"The files of a conversation may have {most:,} characters together.")
        shown = self.shown + sum(isinstance(each, InputImage) for each in parts)
        if shown > (most := self.limits.shown):
            raise NotRead(f"The files of a conversation may show {most:,} pages as images together.")
        self.characters, self.shown = characters, shown


class FileReader:
    """Reads files in processes of their own, fetching those with a URL, and caches their texts."""

    def __init__(
        self,
        limits: FileLimits = USUAL_LIMITS,
        allowed: AllowedNetworks = NOTHING_ALLOWED,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._limits = limits
        self._allowed = allowed
        self._resolver = resolver
        self._clock = clock
        self.places = Slots(MOST_AT_ONCE, per_owner=MOST_AT_ONCE // 2)
        self._known: LruCache[_Parts] = LruCache(KEPT_CHARACTERS)
        """The texts and images, by the SHA-256 of the file, what is declared of it, and what is shown of it."""
        self._fetched: LruCache[tuple[float, str]] = LruCache(KEPT_CHARACTERS)
        """The time of the fetch and the name of what was read, by what is shown of it and its URL."""

    @property
    def limits(self) -> FileLimits:
        """The limits of one file."""
        return self._limits

    async def text_of(self, data: bytes, name: str, media_type: str, owner: str) -> str:
        """Return the text of a file; raises `NotRead`."""
        content = await self._in_thread(_Content.of, data, media_type)
        _, parts = await self._read(content, name, "none", owner)
        return "".join(part for part in parts if isinstance(part, str))

    async def read_all(
        self,
        files: Sequence[PlacedFile],
        owner: str = "",
        store: Store | None = None,
        *,
        sees_images: bool = False,
    ) -> list[FileReading]:
        """Return what the model reads for each file of an owner.

        A file that is too much beside those before it cannot be read.  They are read one after another, so that one
        conversation takes no more than one place of `MOST_AT_ONCE`.
        """
        kept = store.part(StoredFiles) if store else None
        readings, sums = list[FileReading](), _Sums(self._limits)
        for placed in files:
            part, path = placed.part, placed.path
            stored = await kept.get(placed.file_id, owner) if kept and placed.file_id is not None else None
            name = name_of(part, stored)
            if kept and stored is None and placed.file_id is not None:
                if path is not None:
                    raise placed.not_found()
                readings.append(placed.instead(name, _GONE))
                continue
            try:
                if isinstance(part, InputImage):
                    readings.append((await self._image(part, stored, kept, sees_images=sees_images),))
                    continue
                shows = _SHOWS[part.detail or "auto"] if sees_images else "none"
                parts = await self._parts(part, name, shows, owner, stored, kept)
                sums.add(parts)
                readings.append(_reading(name, parts))
            except NotRead as error:
                if path is not None:
                    raise InvalidRequest(f"The file {name!r} cannot be read. {error}", param=path) from error
                readings.append(placed.instead(name, str(error)))
        return readings

    async def _parts(
        self, file: InputFile, name: str, shows: str, owner: str, stored: StoredFile | None, kept: StoredFiles | None
    ) -> _Parts:
        if stored is not None and kept is not None:
            declared = _Content(b"", stored.media_type, stored.sha256)
            if (known := self._known.get(_key(declared, name, shows))) is not None:
                return known
            return (await self._read(replace(declared, data=await self._whole(stored, kept)), name, shows, owner))[1]
        if isinstance(url := file.file_url, str):
            return await self._parts_at(url, name, shows, owner)
        data = file.file_data if isinstance(file.file_data, str) else ""
        return (await self._read(await self._in_thread(self._content, data), name, shows, owner))[1]

    async def _image(
        self, image: InputImage, stored: StoredFile | None, kept: StoredFiles | None, *, sees_images: bool
    ) -> InputImage:
        """Return an image that is a stored file with its data."""
        if not sees_images:
            raise NotRead(TEXT_ONLY)
        if stored is None or kept is None or stored.bytes > MOST_IMAGE_BYTES:
            raise NotRead(f"An image may have {MOST_IMAGE_BYTES:,} bytes.")
        content = await kept.content(stored)
        try:
            return InputImage(await self._in_thread(as_data_url, content), image.detail)
        except NoImage as error:
            raise NotRead(str(error)) from error

    async def _whole(self, stored: StoredFile, kept: StoredFiles) -> bytes:
        if stored.bytes > self._limits.bytes:
            raise self._too_large()
        return await kept.content(stored)

    async def _parts_at(self, url: str, name: str, shows: str, owner: str) -> _Parts:
        place = f"{shows} {url}"
        fetched_at, key = self._fetched.get(place) or (0.0, "")
        if key and fetched_at + _KEPT_SECONDS >= self._clock() and (known := self._known.get(key)) is not None:
            return known
        content = await self._fetch(url)
        key, parts = await self._read(content, name, shows, owner)
        self._fetched.put(place, (self._clock(), key), len(url))
        return parts

    async def _read(self, content: _Content, name: str, shows: str, owner: str) -> tuple[str, _Parts]:
        """Return the name of what is read in the cache, and what is read, once the owner has a place for a process."""
        key = _key(content, name, shows)
        if (known := self._known.get(key)) is not None:
            return key, known
        order = {
            "charset": content.charset,
            "is_html": _is_html(content, name),
            "shows": shows,
            "limits": asdict(self._limits),
        }
        child = _Child(msgspec.json.encode(order) + b"\n", content.data, self._limits.seconds)
        async with self.places.slot(owner):
            try:
                parts = await self._in_thread(child.run)
            except asyncio.CancelledError:  # the client has left, and its thread would go on reading
                child.kill()
                raise
        self._known.put(key, parts, sum(len(each if isinstance(each, str) else each.url) for each in parts))
        return key, parts

    async def _in_thread(self, work: Callable[[Unpack[Given]], Result], *given: *Given) -> Result:
        return await asyncio.get_running_loop().run_in_executor(_threads, work, *given)

    async def _fetch(self, url: str) -> _Content:
        from penstock.services.web import fetch  # noqa: PLC0415 - a replay, which fetches nothing, starts sooner

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
            raise NotRead(
                f"{shortened(shown_url(url, with_path=True))} could not be fetched. {named_error(error)}"
            ) from error
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

    def _too_large(self) -> NotRead:
        return NotRead(f"It is larger than {self._limits.bytes:,} bytes.")


def reader(settings: HostSettings) -> FileReader:
    """Return a reader of files."""
    return FileReader(settings.file_limits, settings.allowed)


class _Child:
    """One run of the program, which ends with the request that wants it."""

    def __init__(self, order: bytes, data: bytes, seconds: float) -> None:
        self._input = order + data
        self._seconds = seconds
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_unwanted = False

    def run(self) -> _Parts:
        """Return what the program reads; raises `NotRead`."""
        with self._lock:
            if self._is_unwanted:
                raise NotRead("It is not wanted any more.")
            self._process = process = subprocess.Popen(  # noqa: S603 - this project's own command line
                (sys.executable, "-I", "-m", _PROGRAM),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
            )
        with process:
            try:
                written, errors = process.communicate(self._input, self._seconds)
            except subprocess.TimeoutExpired:
                raise NotRead(f"Reading it takes longer than {self._seconds:g} seconds.") from None
            finally:
                process.kill()
        line, _, content = written.partition(b"\n")
        if process.returncode != 0:
            if not self._is_unwanted:
                last = errors.decode(errors="replace").strip().rpartition("\n")[2]
                logger.warning("Reading a file ended with %s: %s", process.returncode, shortened(last))
            raise NotRead("Reading it takes too much memory or time, or it is damaged.")
        head = msgspec.json.decode(line, type=_Head)
        if head.problem:
            raise NotRead(head.problem, is_unsupported=head.is_unsupported)
        return tuple(_split(content, head.parts))

    def kill(self) -> None:
        """End the program, or keep it from being started."""
        with self._lock:
            self._is_unwanted = True
            if self._process is not None:
                self._process.kill()


def _split(content: bytes, sizes: Sequence[int]) -> Iterator[str | InputImage]:
    """Yield the texts and images of these sizes, those of images below zero."""
    start = 0
    for size in sizes:
        part = content[start : start + abs(size)]
        yield part.decode() if size >= 0 else InputImage(as_data_url(part))
        start += abs(size)


def _reading(name: str, parts: _Parts) -> FileReading:
    match parts:
        case (str(text),):
            first, last = marks(name, [text])
            return f"{first}{text}{last}"
        case _:
            return tuple(between_marks(name, parts))


def _is_html(content: _Content, name: str) -> bool:
    return "html" in content.media_type.lower() or name.lower().endswith((".html", ".htm"))


def _key(content: _Content, name: str, shows: str) -> str:
    return f"{content.digest} {content.charset} {_is_html(content, name)} {shows}"


def name_of(part: InputFile | InputImage, stored: StoredFile | None = None) -> str:
    """Return the name of a file without its folders and without what could forge a mark of a file."""
    given = part.filename if isinstance(part, InputFile) and part.filename is not UNSET else ""
    if not given and stored is not None:
        given = stored.filename
    if not given and isinstance(part, InputFile) and isinstance(part.file_url, str):
        given = unquote(urlsplit(part.file_url).path)
    return safe_name(given)


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

"""The form of an upload, received part by part: the file in it is passed on as it arrives, and never held whole."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import (
    BadContentDispositionHeader,
    BadContentDispositionParam,
    BodyPartReader,
    MultipartReader,
    StreamReader,
    hdrs,
    web,
)
from aiohttp.http_exceptions import HttpProcessingError

from penstock.api.http.request_body import SECONDS
from penstock.pipeline.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMediaType
from penstock.pipeline.protocol.params.json_body import shortened

SLOWEST = 16 << 10
"""Bytes that an upload must bring each second, on average, after the first `SECONDS`."""

MOST_PARTS = 20
"""The most parts of a form."""

MOST_LINES = 200
"""The most lines of a form outside of its fields: boundaries, headers of parts, and what stands before them."""

LONGEST_LINE = 8_190
"""Bytes of such a line."""

LONGEST_FIELD = 4_096
"""The most bytes of a field that is no file."""

AROUND = 1 << 20
"""Bytes that a form may have besides its file, as far as its declared length tells."""

FILE = "file"
"""The name of the field with the file."""

ANY_TYPE = "application/octet-stream"

_PIECE = 1 << 16
_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}(; ?charset=[\w.:-]{1,40})?", re.ASCII)
_NESTED = re.compile(r"(\w{1,64})\[(\w{1,64})\]")

Result = TypeVar("Result")

for _warning in BadContentDispositionHeader, BadContentDispositionParam:
    warnings.filterwarnings("error", category=_warning)  # a warning would keep the header of each wrong form for ever


class UploadForm:
    """The form of a request with a file of at most ``most`` bytes, in the field ``file``.

    Raises `UnsupportedMediaType` or `InvalidRequest` if it is no form, and `BodyTooLarge` for a declared length.
    """

    def __init__(self, request: web.Request, most: int, file: str = FILE) -> None:
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
        if encoding != "identity":
            raise UnsupportedMediaType(f"Send the form without Content-Encoding: {shortened(encoding)}.")
        if request.content_type != "multipart/form-data":
            raise UnsupportedMediaType("Send the file with the header 'Content-Type: multipart/form-data'.")
        if (request.content_length or 0) > most + AROUND:
            raise _too_large(most)
        self.fields: dict[str, Any] = {}
        """The fields, those in brackets within the field before these; that of the file has its declared name."""
        self.media_type = ANY_TYPE
        """The declared type of the file."""
        self._request = request
        self._file = file
        self._most = most
        self._received = 0
        self._began = asyncio.get_running_loop().time()

    async def receive(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Receive the form, and pass its file on.

        Raises `InvalidRequest` if the form breaks off or cannot be read, `BodyTooLarge`, or `RequestTimeout`.
        """
        reader = self._reader()
        for _ in range(MOST_PARTS):
            part = await self._step(reader.next)
            if part is None:
                return
            if not isinstance(part, BodyPartReader):
                raise InvalidRequest("A part of the form is a form itself.")
            if part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "binary").lower() not in ("binary", "8bit", "7bit"):
                raise InvalidRequest("A part of the form has a Content-Transfer-Encoding: send its bytes as they are.")
            name, filename = _declared(part)
            if not name:
                raise InvalidRequest("Each part of the form needs a name.")
            is_file = name == self._file
            value = filename if is_file else await self._text(part, name)
            self._add(name, value)
            if is_file:
                self.media_type = media_type_of(part.headers.get(hdrs.CONTENT_TYPE, ""))
                async for piece in self._pieces(part, self._most):
                    await write(piece)
        raise InvalidRequest(f"The form has more than {MOST_PARTS} parts.")

    def _reader(self) -> MultipartReader:
        content: Any = _Lines(self._request.content)
        try:
            return MultipartReader(self._request.headers, content, max_field_size=LONGEST_LINE)
        except (AssertionError, ValueError) as error:
            raise InvalidRequest("The Content-Type of the form needs a boundary of 1 to 70 characters.") from error

    def _add(self, name: str, value: str) -> None:
        fields: Any = self.fields
        key = name
        if nested := _NESTED.fullmatch(name):
            fields, key = self.fields.setdefault(nested[1], {}), nested[2]
        if not isinstance(fields, dict) or key in fields:
            raise InvalidRequest(f"The form has {shortened(name)!r} twice.", param=shortened(name))
        fields[key] = value

    async def _text(self, part: BodyPartReader, name: str) -> str:
        try:
            return b"".join([piece async for piece in self._pieces(part, LONGEST_FIELD)]).decode()
        except UnicodeDecodeError:
            name = shortened(name)
            raise InvalidRequest(f"The field {name!r} of the form is not UTF-8.", param=name) from None

    async def _pieces(self, part: BodyPartReader, most: int) -> AsyncIterator[bytes]:
        size = 0
        while not part.at_eof():
            piece = await self._step(part.read_chunk, _PIECE)
            size += len(piece)
            self._received += len(piece)
            if size > most:
                raise _too_large(most)
            yield piece

    async def _step(self, read: Callable[..., Awaitable[Result]], *arguments: int) -> Result:
        """Read on in the form; the errors of aiohttp for what is no form have no class of their own."""
        try:
            async with asyncio.timeout_at(self._began + SECONDS + self._received / SLOWEST):
                return await read(*arguments)
        except TimeoutError:
            raise RequestTimeout("The form arrives too slowly.") from None
        except web.RequestPayloadError as error:
            raise InvalidRequest("The form breaks off, or its transfer coding is wrong.") from error
        except HttpProcessingError as error:
            why = f"a header of a part is wrong, or a line is longer than {LONGEST_LINE} bytes"
            raise InvalidRequest(f"The form cannot be read: {why}.") from error
        except (AssertionError, RuntimeError, ValueError, RuntimeWarning) as error:
            why = "it does not have the parts and boundaries that its Content-Type declares"
            raise InvalidRequest(f"The form cannot be read: {why}.") from error


def media_type_of(declared: str) -> str:
    """Return the declared type of a file, or that of any bytes if it is none."""
    return declared if _TYPE.fullmatch(declared) else ANY_TYPE


class _Lines:
    """The content of a form, of which aiohttp's reader gets at most `MOST_LINES` lines.

    The reader looks for the first boundary line by line, and never yields while lines are buffered: a form of line
    breaks would hold the event loop for seconds.  What is in the fields is read in pieces, which `UploadForm` counts.
    """

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._lines = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        """Return the next line; raises `InvalidRequest` if there were too many."""
        self._lines += 1
        if self._lines > MOST_LINES:
            raise InvalidRequest(f"The form has more than {MOST_LINES} lines outside of its fields.")
        return await self._content.readline(max_line_length=max_line_length or LONGEST_LINE)


_QUOTED = re.compile(r'^(?!.*;\s*filename\*).*;\s*filename\s*=\s*"((?:\\.|[^"\\])*)"', re.IGNORECASE | re.DOTALL)
"""The name of a file in quotes, unless there is one of RFC 5987, too, which comes first."""

_ESCAPED = re.compile(r'\\(["\\])|%(22|0A|0D)', re.IGNORECASE)
"""An escaped character: curl escapes quotes and backslashes, and browsers write quotes and ends of lines with percents.

Any other backslash is one of the name, as in that of a file on Windows.
"""

_PERCENT = {"22": '"', "0A": "\n", "0D": "\r"}


def _declared(part: BodyPartReader) -> tuple[str, str]:
    """Return the names of a field and of its file; what is no UTF-8 in them becomes question marks."""
    written = _QUOTED.search(part.headers.get(hdrs.CONTENT_DISPOSITION, ""))
    filename = part.filename if written is None else _ESCAPED.sub(_unescaped, written[1])
    name, filename = ((each or "").encode(errors="replace").decode() for each in (part.name, filename))
    return name, filename


def _unescaped(found: re.Match[str]) -> str:
    return found[1] or _PERCENT[found[2].upper()]


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The file, or another part of the form, is over this server's limit of {most} bytes.")

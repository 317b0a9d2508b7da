"""Bodies that go on as they came, of which only the name of the model is read: JSON, or a form.

Another server reads the same bytes after this one.  So a form that two programs could read in two ways is refused: it
would be allowed for one model, and answered by another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any, Protocol

import msgspec

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import NO_JSON, read_json

MODEL = "model"
"""The name of the field with the model."""

FORM = "multipart/form-data"

MOST_PARTS = 200
"""The most parts of a form."""

LONGEST_HEADERS = 8_192
"""Bytes of the headers of a part."""

LONGEST_NAME = 1_024
"""Bytes of the name of a model in a form."""

DISPOSITION = "Content-Disposition"

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(rb"[!#-'*+.^`|~\w-]+:[^\r\n\0]*")
_FIELD = re.compile(r"[^\"\\%\r\n\0]+")


class NamedBody(Protocol):
    """A body, and the name of the ``model`` in it, if it has one."""

    @property
    def body(self) -> bytes:
        """The bytes of the body."""
        ...

    @property
    def model(self) -> str | None:
        """The name that the client gave."""
        ...

    def with_model(self, name: str) -> bytes:
        """Return the body with another name of the model."""
        ...


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class JsonBody:
    """A JSON object; raises `InvalidRequest` for anything else."""

    body: bytes = field(repr=False)
    model: str | None = None

    @classmethod
    def read(cls, body: bytes) -> JsonBody:
        """Read a body, and make no values of what is not the name of the model."""
        try:
            return cls(body, _named.decode(body).model)
        except NO_JSON:
            pass
        given = read_json(body)  # it also reads what JavaScript writes, and says what is wrong
        if not isinstance(given, dict):
            raise InvalidRequest("The body is no JSON object.")
        model = given.get(MODEL)
        if not isinstance(model, str | None):
            raise InvalidRequest("The model is no text.", param=MODEL)
        return cls(body, model)

    def with_model(self, name: str) -> bytes:
        """Return the body with another name of the model, and each other value as it came."""
        try:
            given: dict[str, Any] = dict(_fields.decode(self.body))
        except NO_JSON:
            given = read_json(self.body)
        return msgspec.json.encode(given | {MODEL: name})


@dataclass(frozen=True)
class FormBody:
    """A form with a ``boundary``, in which the name of the model stands at ``place``; raises `InvalidRequest`."""

    body: bytes = field(repr=False)
    boundary: bytes
    model: str | None = None
    place: slice | None = None

    @classmethod
    def read(cls, body: bytes, content_type: str) -> FormBody:
        """Read a body, and copy nothing of what is not the name of the model."""
        boundary = _boundary_of(content_type)
        places = [place for name, place in _parts(body, b"--" + boundary) if name == MODEL]
        if not places:
            return cls(body, boundary)
        if len(places) > 1:
            raise InvalidRequest("The form has the model twice.", param=MODEL)
        (place,) = places
        if place.stop - place.start > LONGEST_NAME:
            raise InvalidRequest(f"The name of the model has more than {LONGEST_NAME} bytes.", param=MODEL)
        try:
            return cls(body, boundary, body[place].decode(), place)
        except UnicodeDecodeError:
            raise InvalidRequest("The name of the model is not UTF-8.", param=MODEL) from None

    def with_model(self, name: str) -> bytes:
        """Return the body with another name of the model, and each other part as it came."""
        if self.place is not None:
            return b"".join((self.body[: self.place.start], name.encode(), self.body[self.place.stop :]))
        part = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        return part % (self.boundary, MODEL.encode(), name.encode()) + self.body


def read_named(body: bytes, content_type: str) -> NamedBody:
    """Read a body, which is JSON unless it is declared as a form; raises `InvalidRequest`."""
    is_form = content_type.partition(";")[0].strip().lower() == FORM
    return FormBody.read(body, content_type) if is_form else JsonBody.read(body)


def _boundary_of(content_type: str) -> bytes:
    declared = Message()
    declared["Content-Type"] = content_type
    given = [value for name, value in declared.get_params([]) if name.lower() == "boundary"]
    if len(given) != 1 or not _BOUNDARY.fullmatch(given[0]):
        raise InvalidRequest("The Content-Type of the form needs a boundary of 1 to 70 characters.")
    return given[0].encode()


def _parts(body: bytes, mark: bytes) -> Iterator[tuple[str, slice]]:
    """Yield the name of each part, and the place of its content, between lines that begin with ``mark``."""
    at = 0 if body.startswith(mark) else -1
    for _ in range(MOST_PARTS):
        if at < 0:
            raise _wrong("it does not have the boundaries that its Content-Type declares")
        at += len(mark)
        if body.startswith(b"--", at):
            return
        if not body.startswith(b"\r\n", at):
            raise _wrong("a line begins with its boundary, and goes on")
        begin = body.find(b"\r\n\r\n", at, at + LONGEST_HEADERS)
        if begin < 0:
            raise _wrong(f"the headers of a part do not end within {LONGEST_HEADERS} bytes")
        name = _name_in(body[at + 2 : begin + 2])
        begin += 4
        at = body.find(b"\r\n" + mark, begin)
        yield name, slice(begin, at)
        at += 2 if at >= 0 else 0
    raise _wrong(f"it has more than {MOST_PARTS} parts")


def _name_in(lines: bytes) -> str:
    """Return the name in the headers of a part."""
    if not all(map(_HEADER.fullmatch, lines.split(b"\r\n")[:-1])):
        raise _wrong("a header of a part is wrong")
    headers = BytesHeaderParser().parsebytes(lines)
    name, params = headers.get_param("name", header=DISPOSITION), headers.get_params([], DISPOSITION)
    names = [each for each, _ in params if each.partition("*")[0] == "name"]
    if len(headers.get_all(DISPOSITION, [])) != 1 or len(names) != 1:
        raise _wrong("each part needs one name")
    if not isinstance(name, str) or not _FIELD.fullmatch(name):
        raise _wrong("the name of a part is not plain")
    if headers.get("Content-Transfer-Encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise _wrong("a part has a Content-Transfer-Encoding: send its bytes as they are")
    return name


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"The form cannot be read: {why}.")

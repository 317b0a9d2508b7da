"""Forms of the Files API: the fields of an upload, as openai-python 3.57 and anthropic-python write them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from penstock.pipeline.protocol.params.common import Body

MOST_PARTS = 1_000
"""The most parts of an upload."""

UploadedFile: TypeAlias = Annotated[str, Field(json_schema_extra={"format": "binary"})]
"""The name of a file, whose bytes are received apart from the fields."""


class ExpiresAfter(Body):
    """The time after which a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000, strict=False)


class _ToStore(Body):
    """A file to store, with its purpose."""

    purpose: Literal["assistants", "batch", "evals", "user_data", "vision"]
    """The use of the file: a batch reads one of ``batch``, and the others change nothing here."""
    expires_after: ExpiresAfter | None = None
    """The seconds after which the file is deleted."""

    @property
    def lasts(self) -> int | None:
        """Seconds after which the file is deleted; None if it stays."""
        return self.expires_after.seconds if self.expires_after else None


class UploadFile(_ToStore):
    """A file to store."""

    file: UploadedFile
    """The file, as a part of the form."""


class CreateUpload(_ToStore):
    """A file to store that is sent in parts."""

    bytes: int = Field(ge=1)
    """The bytes of the whole file."""
    filename: str = Field(min_length=1, max_length=1_024)
    """The name of the file."""
    mime_type: str = Field(max_length=200)
    """The type of the file, as its sender declares it."""


class UploadPart(Body):
    """A part of a file."""

    data: UploadedFile
    """The bytes of the part, as a part of the form."""


class CompleteUpload(Body):
    """The parts of a file."""

    part_ids: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_PARTS)]
    """The ids of the parts, in their order in the file."""
    md5: Annotated[str, Field(pattern="^[0-9a-fA-F]{32}$")] | None = None
    """The MD5 of the file, by which the server checks what has arrived."""


class UploadFileToAnthropic(Body):
    """A file to store, in the form of Anthropic's API, which has no purposes."""

    file: UploadedFile
    expires_in_seconds: int | None = Field(None, ge=3_600, le=7_776_000, strict=False)

    @property
    def purpose(self) -> str:
        """OpenAI's purpose of files that are for any use."""
        return "user_data"

    @property
    def lasts(self) -> int | None:
        """Seconds after which the file is deleted; None if it stays."""
        return self.expires_in_seconds

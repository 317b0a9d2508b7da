"""Forms of the Files API: the fields of an upload, as openai-python 3.57 and anthropic-python write them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from penstock.pipeline.protocol.params.common import Body

UploadedFile: TypeAlias = Annotated[str, Field(json_schema_extra={"format": "binary"})]
"""The name of a file, whose bytes are received apart from the fields."""


class ExpiresAfter(Body):
    """The time after which a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3_600, le=2_592_000, strict=False)


class UploadFile(Body):
    """A file to store, with its purpose, which changes nothing here."""

    file: UploadedFile
    """The file, as a part of the form."""
    purpose: Literal["assistants", "batch", "evals", "user_data", "vision"]
    """The use of the file, which changes nothing here."""
    expires_after: ExpiresAfter | None = None
    """The seconds after which the file is deleted."""

    @property
    def lasts(self) -> int | None:
        """Seconds after which the file is deleted; None if it stays."""
        return self.expires_after.seconds if self.expires_after else None


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

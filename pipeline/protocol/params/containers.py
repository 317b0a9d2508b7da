"""Forms of the Containers API, as openai-python writes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.pipeline.protocol.params.common import Body, Name, Refused
from penstock.pipeline.protocol.params.files import UploadedFile
from penstock.pipeline.protocol.params.tools import MOST_FILE_IDS, NetworkPolicy


class ExpiresAfterUse(Body):
    """The time without use after which a container ends."""

    anchor: Literal["last_active_at"]
    minutes: Annotated[int, Field(ge=1)]


class CreateContainer(Body):
    """A container to make."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """A name for people."""
    expires_after: ExpiresAfterUse | None = None
    """The minutes without use after which the container ends."""
    file_ids: Annotated[list[Name], Field(fail_fast=True, max_length=MOST_FILE_IDS)] | None = None
    """Stored files to put into its folder."""
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    """The memory of its programs, up to the operator's limit."""
    network_policy: NetworkPolicy | None = None
    """Only ``disabled``: a container has no network."""
    skills: Refused = None


class UploadContainerFile(Body):
    """A file for a container."""

    file: UploadedFile
    """The file, as a part of the form."""
    file_id: Refused = None


class AddContainerFile(Body):
    """A stored file for a container."""

    file_id: Name
    """The id of a stored file."""

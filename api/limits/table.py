"""The file of limits: a table for each kind of API key, for all keys together, and for keys without a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic_core import ErrorDetails

from penstock.api.toml_file import message_of, read_toml
from penstock.api.values import Duration, size
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import nearest

DEFAULT, ALL = "default", "all"
"""The table of keys without a table of their own, and that of all keys together."""

Count = Annotated[int, Field(gt=0, le=2**53, strict=True)]


class UnusableLimits(CannotStart):
    """The file of limits cannot be read, or has a mistake."""


class KeyLimits(BaseModel):
    """The limits of one API key, or of all together; None where there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Tokens of input and output."""
    responses: Count | None = None
    """Responses that run at once, or wait for the engine; those in the background do not count."""
    background: Count | None = None
    """Background responses that have not ended."""
    batches: Count | None = None
    """Batches that have not ended."""
    batch_lines: Count | None = None
    """Lines of these batches, together."""
    sandboxes: Count | None = None
    """Sandboxes of tools at work at once; a call that needs one more waits for it."""
    containers: Count | None = None
    """Containers on each server; the oldest idle one ends for one more."""
    container_bytes: Annotated[int | None, BeforeValidator(size), Field(gt=0)] = None
    """Bytes of all files of a container; that of the sandbox if it is lower."""
    sandbox_seconds_per_minute: Count | None = None
    """Seconds for which calls are at work in sandboxes; a call waits if they are used up."""
    stored_bytes: Annotated[int | None, BeforeValidator(size), Field(gt=0)] = None
    """Bytes of stored responses, with their events, of conversations and of files."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Places in a full engine, relative to those of other keys."""
    wait: Annotated[Duration | None, Field(gt=0)] = None
    """Seconds that a new response may wait for a place in a full engine."""


NO_LIMITS = KeyLimits()

_TABLES: TypeAdapter[dict[str, KeyLimits]] = TypeAdapter(dict[str, KeyLimits])


def read_limits(file: Path) -> Mapping[str, KeyLimits]:
    """Return the limits of a file, by the names of their tables.  Raises `UnusableLimits`."""
    return MappingProxyType(read_toml("--limits", file, _TABLES.validate_python, UnusableLimits, _mistake))


def _mistake(error: ErrorDetails) -> str:
    *_, key = path = [str(each) for each in error["loc"]]
    message = message_of(error)
    if error["type"] == "extra_forbidden":
        message = f"there is no such limit{nearest(key, KeyLimits.model_fields)}"
    return f"{'.'.join(path)}: {message}"

"""The settings of batches."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from pydantic_settings import BaseSettings

from penstock.api.values import Duration


class BatchSettings(BaseSettings):
    """Batches, whose lines run where interactive clients leave room."""

    SECTION: ClassVar[str] = "Batches"

    batch_reserve: int | None = Field(
        default=None,
        ge=0,
        title="N",
        description="places of the engine that lines of batches leave free; by default 15 of 16, and an eighth "
        "once nothing else has run for a minute",
        examples=[16],
    )
    batch_beside: int | None = Field(
        default=None,
        ge=0,
        title="N",
        description="lines that run while other responses do: further ones pause; by default as many as there is room "
        "for",
        examples=[32],
    )
    batch_priority: int | None = Field(
        default=None,
        title="N",
        description="priority of lines at the engine, which must schedule by priority; by default 1000000 if vLLM in "
        "this process does, and else none",
        examples=[100],
    )
    batch_at_once: int = Field(
        default=32, gt=0, description="lines that run at once at an engine that does not tell how many places it has"
    )
    batch_ttl: Duration = Field(
        default="30d", validate_default=True, description="time for which the results of ended batches are stored"
    )

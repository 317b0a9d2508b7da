"""The settings of rollouts: where the work of sessions goes when they are over."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from penstock.api.values import Duration
from penstock.services.standard_webhooks import checked_url


class RolloutSettings(BaseSettings):
    """The live export of rollouts."""

    SECTION: ClassVar[str] = "Rollouts"

    rollouts_to: str | None = Field(
        default=None,
        title="FOLDER|URL",
        description="a folder or a URL for the rollouts of each recorded session that is over: a file, or a webhook",
        examples=["rollouts"],
    )
    rollouts_after: Duration = Field(
        default="10m",
        validate_default=True,
        description="time without a turn after which a session is over",
    )

    @field_validator("rollouts_to")
    @classmethod
    def _is_place(cls, place: str | None) -> str | None:
        if place == "":
            raise ValueError("it is empty: give a folder or a URL")
        return checked_url(place) if place and is_url(place) else place

    @property
    def rollouts_folder(self) -> Path | None:
        """The folder that gets rollouts; None if a URL or nothing gets them."""
        return Path(self.rollouts_to) if self.rollouts_to and not is_url(self.rollouts_to) else None


def is_url(place: str) -> bool:
    """True if a place is a URL and no folder."""
    return "://" in place

"""The settings of the accounts: what each key has used."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from pydantic_settings import BaseSettings

from penstock.api.values import Duration


class AccountsSettings(BaseSettings):
    """The accounts of keys and teams."""

    SECTION: ClassVar[str] = "Accounts"

    ledger_ttl: Duration = Field(
        default="400d",
        validate_default=True,
        description="time for which the store keeps what each key has used; 0 keeps nothing",
    )

"""The settings of the accounts: what each key has used."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import BaseSettings

from penstock.api.values import Duration


class AccountsSettings(BaseSettings):
    """The accounts of keys and teams."""

    SECTION: ClassVar[str] = "Accounts"

    accounts: Path | None = Field(
        default=None,
        title="FILE",
        description="a TOML file of the prices of models and the budgets of keys and teams; read again at SIGHUP",
        examples=["/etc/penstock/accounts.toml"],
    )
    ledger_ttl: Duration = Field(
        default="400d",
        validate_default=True,
        description="time for which the store keeps what each key has used; 0 keeps nothing",
    )

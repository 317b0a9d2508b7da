"""The file of accounts: the currency, the prices of models, and the budgets of keys, of teams, and of all together."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import ErrorDetails

from penstock.api.toml_file import message_of, read_toml
from penstock.extensions.accounts.prices import Money, Price, Prices, kebab
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.logs import nearest
from penstock.services.model_names import wrong_name


class UnusableAccounts(CannotStart):
    """The file of accounts cannot be read, or has a mistake."""


_STRICT = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, alias_generator=kebab)

Tokens = Annotated[int, Field(gt=0, le=2**53, strict=True)]
Amount = Annotated[Money, Field(gt=0)]


class Budget(BaseModel):
    """The most that may be used in a day or a month of UTC; None where there is no bound."""

    model_config = _STRICT

    day_tokens: Tokens | None = None
    """Tokens of input and output."""
    month_tokens: Tokens | None = None
    day_money: Amount | None = None
    month_money: Amount | None = None
    warn: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The fraction from which on answers have a warning."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if not self.model_fields_set - {"warn"}:
            raise ValueError("give it day-tokens, month-tokens, day-money or month-money")
        return self

    @property
    def has_money(self) -> bool:
        """True if an amount of money is bounded."""
        return self.day_money is not None or self.month_money is not None


class Budgets(BaseModel):
    """The budgets, by whose they are."""

    model_config = _STRICT

    key: dict[str, Budget] = Field(default_factory=dict)
    """Budgets that keys of the same name share, by that name."""
    team: dict[str, Budget] = Field(default_factory=dict)
    """Budgets that the keys of a team share, by its name."""
    each_key: Budget | None = None
    """The budget that every key has for itself."""
    all: Budget | None = None
    """The budget that all keys share."""

    def of(self, kind: str, name: str) -> Budget | None:
        """Return the budget of a key or a team of a name, of each key, or of all."""
        match kind:
            case "key":
                return self.key.get(name)
            case "team":
                return self.team.get(name)
            case "each-key":
                return self.each_key
            case _:
                return self.all

    @property
    def are_none(self) -> bool:
        """True if there is none."""
        return not self.model_fields_set

    def named(self) -> Iterator[tuple[str, Budget]]:
        """Yield each budget, with its place in the file."""
        for kind, tables in (("key", self.key), ("team", self.team)):
            for name, budget in tables.items():
                yield f"{kind}.{name}", budget
        for kind, one in (("each-key", self.each_key), ("all", self.all)):
            if one is not None:
                yield kind, one


class Accounts(BaseModel):
    """The contents of the file."""

    model_config = _STRICT

    currency: Annotated[str, Field(pattern="^[A-Za-z]{1,16}$")] = "USD"
    prices: dict[str, Price] = Field(default_factory=dict)
    budgets: Budgets = Budgets()

    @field_validator("prices")
    @classmethod
    def _names_models(cls, prices: dict[str, Price]) -> dict[str, Price]:
        for name in prices:
            if reason := wrong_name(name):
                raise ValueError(reason)
        return prices

    @model_validator(mode="after")
    def _can_count_money(self) -> Self:
        for name, budget in self.budgets.named():
            if budget.has_money and not self.prices:
                raise ValueError(f"budgets.{name} bounds money, and no model has a price")
        return self

    @cached_property
    def priced(self) -> Prices:
        """The prices of all models."""
        return Prices(self.prices)


def read_accounts(file: Path) -> Accounts:
    """Return what a file says.  Raises `UnusableAccounts`."""
    return read_toml(
        "--accounts", file, Accounts.model_validate, unusable=UnusableAccounts, mistake=_mistake, parse_float=Decimal
    )


def _mistake(error: ErrorDetails) -> str:
    path = [str(each) for each in error["loc"]]
    message = message_of(error)
    if error["type"] == "extra_forbidden":
        known = [kebab(name) for name in _table_of(path).model_fields]
        message = f"there is no such key{nearest(path[-1], known)}"
    return ": ".join(filter(None, (".".join(path), message)))


def _table_of(path: list[str]) -> type[BaseModel]:
    """Return the table that a key stands in."""
    match path:
        case [_]:
            return Accounts
        case ["prices", *_]:
            return Price
        case ["budgets", _]:
            return Budgets
        case _:
            return Budget

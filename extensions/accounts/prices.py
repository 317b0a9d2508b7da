"""Prices: what an answer costs, by the model that made it and the kinds of what it used.

The cost of one answer is computed in decimals, and rounded to a billionth of the currency, a half to the even
neighbour.  A cost that is stored, and a sum of costs, are doubles: rounding is for who shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from penstock.services.model_names import is_name
from penstock.services.use import Use

MILLION = 1_000_000
"""Tokens that the price of a kind of tokens is for."""

DIGITS = 9
"""Decimals of a cost: a billionth of the currency."""

_EXACT = Context(prec=50, rounding=ROUND_HALF_EVEN)


def kebab(name: str) -> str:
    """Return the key of a field in a TOML file."""
    return name.replace("_", "-")


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise ValueError("Input should be a number")  # noqa: TRY004 - pydantic takes no other
    return Decimal(str(value))


Money = Annotated[Decimal, BeforeValidator(_number), Field(ge=0, le=10**9, allow_inf_nan=False)]


class Price(BaseModel):
    """The prices of a model: of a million tokens of a kind, and of one search, image, or second of a tool.

    Cached tokens are part of the input, and thoughts part of the output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, alias_generator=kebab)

    input: Money = Decimal(0)
    cached: Money | None = None
    """None if tokens from the cache cost as much as others."""
    output: Money = Decimal(0)
    search: Money = Decimal(0)
    image: Money = Decimal(0)
    tool_second: Money = Decimal(0)
    batch: Money = Decimal(1)
    """The factor of the prices of tokens for the lines of batches."""

    def of(self, use: Use) -> float:
        """Return the cost of an answer."""
        cached = min(use.cached_tokens, use.input_tokens)
        of_cached = self.input if self.cached is None else self.cached
        tokens = (use.input_tokens - cached) * self.input + cached * of_cached + use.output_tokens * self.output
        factor = self.batch if use.is_line else Decimal(1)
        beside = use.searches * self.search + use.images * self.image + Decimal(use.tool_seconds) * self.tool_second
        return float((tokens * factor / MILLION + beside).quantize(Decimal(1).scaleb(-DIGITS), context=_EXACT))


class Prices:
    """The prices of all models, by names and patterns of names."""

    def __init__(self, tables: Mapping[str, Price]) -> None:
        self._of_names = {name: price for name, price in tables.items() if is_name(name)}
        patterns = [(pattern, price) for pattern, price in tables.items() if not is_name(pattern)]
        self._of_patterns = sorted(patterns, key=lambda each: -len(each[0]))  # of the same length, the first one counts

    def of(self, model: str) -> Price | None:
        """Return the price of a model: that of its name, or else of the longest pattern that fits; None if unknown."""
        if (price := self._of_names.get(model)) is not None:
            return price
        return next((price for pattern, price in self._of_patterns if fnmatchcase(model, pattern)), None)

    def cost(self, use: Use) -> float | None:
        """Return the cost of an answer; None if its model has no price."""
        price = self.of(use.model)
        return None if price is None else price.of(use)

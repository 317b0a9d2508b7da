"""Prices: a name before a pattern, the longest pattern before others, and costs that add up."""

from __future__ import annotations

from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.accounts.prices import Price, Prices
from penstock.services.use import Use

PRICE = Price.model_validate(
    {"input": 2, "cached": 0.5, "output": 8, "search": 0.01, "image": 0.002, "tool-second": 0.0001, "batch": 0.5}
)

counts = st.integers(0, 10**9)
money = st.decimals(0, 10_000, places=6)


def use(model: str = "m", **fields: Any) -> Use:
    return Use(id="resp_1", model=model, api="chat", **fields)


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({}, 0.0),
        ({"input_tokens": 1_000_000}, 2.0),
        ({"input_tokens": 1_000_000, "cached_tokens": 400_000}, 1.4),
        ({"output_tokens": 500_000, "reasoning_tokens": 400_000}, 4.0),
        ({"input_tokens": 1_000_000, "is_line": True}, 1.0),
        ({"searches": 3, "images": 2, "tool_seconds": 10.0}, 0.035),
        ({"searches": 3, "is_line": True}, 0.03),
        ({"input_tokens": 1}, 0.000002),
    ],
)
def test_each_kind_has_its_price(fields: dict[str, Any], cost: float) -> None:
    assert PRICE.of(use(**fields)) == cost


def test_cached_tokens_cost_as_others_without_a_price_of_their_own() -> None:
    assert Price(input=Decimal(3)).of(use(input_tokens=2_000_000, cached_tokens=2_000_000)) == 6.0


@pytest.mark.parametrize(("tokens", "cost"), [(1, 0.0), (2, 1e-9), (3, 2e-9), (5, 2e-9)])
def test_cost_is_rounded_to_a_billionth_a_half_to_the_even_neighbour(tokens: int, cost: float) -> None:
    assert Price(input=Decimal("0.0005")).of(use(input_tokens=tokens)) == cost


@given(st.data(), counts, counts, counts)
def test_costs_of_parts_add_up_to_that_of_the_whole(data: st.DataObject, tokens: int, output: int, images: int) -> None:
    """Each is rounded once, so that two differ from one by three halves of a billionth."""
    price = Price(input=data.draw(money), cached=data.draw(money), output=data.draw(money), image=data.draw(money))
    cached, first = data.draw(st.integers(0, tokens)), data.draw(st.integers(0, output))
    whole = price.of(use(input_tokens=tokens, cached_tokens=cached, output_tokens=output, images=images))
    parts = (
        price.of(use(input_tokens=tokens - cached, output_tokens=first)),
        price.of(use(input_tokens=cached, cached_tokens=cached, output_tokens=output - first, images=images)),
    )
    assert abs(whole - sum(parts)) <= 1.5e-9 + 1e-15 * whole


@given(counts, counts, money)
def test_more_never_costs_less(tokens: int, more: int, each: Decimal) -> None:
    price = Price(output=each)
    assert price.of(use(output_tokens=tokens + more)) >= price.of(use(output_tokens=tokens))


@given(
    st.lists(st.text("ab*?", min_size=1, max_size=4), unique=True, max_size=8), st.text("ab", min_size=1, max_size=4)
)
def test_name_counts_before_patterns_and_the_longest_pattern_before_others(patterns: list[str], model: str) -> None:
    prices = {pattern: Price(input=Decimal(number)) for number, pattern in enumerate(patterns)}
    found = Prices(prices).of(model)
    fitting = [pattern for pattern in patterns if fnmatchcase(model, pattern)]
    if not fitting:
        assert found is None
    elif model in patterns:
        assert found == prices[model]
    else:
        longest = max(map(len, fitting))
        assert found == prices[next(pattern for pattern in fitting if len(pattern) == longest)]


def test_model_without_a_price_has_no_cost() -> None:
    prices = Prices({"gpt-oss-*": PRICE})
    assert prices.cost(use("qwen", input_tokens=1_000_000)) is None
    assert prices.cost(use("gpt-oss-20b", input_tokens=1_000_000)) == 2.0

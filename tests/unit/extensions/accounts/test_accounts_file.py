"""The file of accounts: what it says, and the words for what is wrong in it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from penstock.extensions.accounts.accounts_file import UnusableAccounts, read_accounts

WHOLE = """
currency = "EUR"

[prices."gpt-oss-*"]
input = 0.1
cached = 0.01
output = 0.4
tool-second = 0.0001
batch = 0.5

[prices.free]

[budgets.key.ci]
day-tokens = 1_000_000
month-money = 100
warn = 0.9

[budgets.team."web+app"]
month-money = 0.5

[budgets.each-key]
day-money = 1

[budgets.all]
month-tokens = 2_000_000_000
"""


def read(folder: Path, text: str) -> object:
    file = folder / "accounts.toml"
    file.write_text(text, "utf-8")
    return read_accounts(file)


def test_file_has_a_currency_prices_and_budgets(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    file.write_text(WHOLE, "utf-8")
    accounts = read_accounts(file)
    assert accounts.currency == "EUR"
    assert accounts.prices["gpt-oss-*"].input == Decimal("0.1")
    assert accounts.prices["free"].output == 0
    named = {name: (budget.day_tokens, budget.month_money, budget.warn) for name, budget in accounts.budgets.named()}
    assert named == {
        "key.ci": (1_000_000, 100, 0.9),
        "team.web+app": (None, Decimal("0.5"), 0.8),
        "each-key": (None, None, 0.8),
        "all": (None, None, 0.8),
    }


def test_empty_file_bounds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    file.touch()
    assert read_accounts(file).budgets.are_none


PRICED = "[prices.m]\ninput = 1\n"

WRONG = {
    "currencies = 'EUR'": "currencies: there is no such key (did you mean currency?)",
    "currency = 'US dollars'": "currency: String should match pattern '^[A-Za-z]{1,16}$'",
    "[prices.m]\ninputs = 1": "prices.m.inputs: there is no such key (did you mean input?)",
    "[prices.m]\ninput = '1'": "prices.m.input: Input should be a number",
    "[prices.m]\ninput = true": "prices.m.input: Input should be a number",
    "[prices.m]\ninput = nan": "prices.m.input: Input should be a finite number",
    "[prices.m]\ninput = -0.1": "prices.m.input: Input should be greater than or equal to 0",
    "[prices.'']": "prices: the name of a model cannot be empty",
    "[budgets.keys.ci]\nday-tokens = 1": "budgets.keys: there is no such key (did you mean key?)",
    "[budgets.key.ci]\ntokens = 1": "budgets.key.ci.tokens: there is no such key (did you mean day-tokens?)",
    "[budgets.key.ci]\nday-tokens = 1.5": "budgets.key.ci.day-tokens: Input should be a valid integer",
    "[budgets.key.ci]\nday-tokens = 0": "budgets.key.ci.day-tokens: Input should be greater than 0",
    "[budgets.all]\nwarn = 0.5": "budgets.all: give it day-tokens, month-tokens, day-money or month-money",
    "[budgets.all]\nday-tokens = 1\nwarn = 1.5": "budgets.all.warn: Input should be less than or equal to 1",
    "[budgets.all]\nday-money = 3": "budgets.all bounds money, and no model has a price",
    f"{PRICED}[budgets.all]\nday-money = 0": "budgets.all.day-money: Input should be greater than 0",
    "budgets": "Expected '=' after a key in a key/value pair (at end of document)",
}


@pytest.mark.parametrize("text", WRONG)
def test_mistake_is_named_by_its_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnusableAccounts) as wrong:
        read(tmp_path, text)
    assert str(wrong.value) == f"--accounts {tmp_path / 'accounts.toml'}: {WRONG[text]}"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableAccounts, match=r"accounts\.toml: No such file"):
        read_accounts(tmp_path / "accounts.toml")

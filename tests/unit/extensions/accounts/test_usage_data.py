"""The data of the page: days in a row, the largest groups by name, and the rest as one."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.auth import Keys
from penstock.extensions.accounts.books import Books
from penstock.extensions.accounts.budgets import MOST_KEYS
from penstock.extensions.accounts.ledger import DAY, Ledger, Sum
from penstock.extensions.accounts.page.usage_data import MOST_GROUPS, budgets_now, grouped
from penstock.services.use import Use

NOW = 20_787.5 * DAY

Amounts = st.dictionaries(
    st.tuples(st.integers(0, 4), st.sampled_from([f"key-{number}" for number in range(40)])),
    st.tuples(st.integers(1, 9), st.integers(0, 1000), st.none() | st.integers(1, 9).map(float)),
    max_size=80,
)


@given(Amounts)
def test_groups_have_all_that_was_used(amounts: dict[tuple[int, str], tuple[int, int, float | None]]) -> None:
    days = range(100, 105)
    sums = [
        Sum(at=(100 + day) * DAY, key_name=name, requests=requests, input_tokens=tokens, cost=cost)
        for (day, name), (requests, tokens, cost) in amounts.items()
    ]
    groups = grouped(sums, days, "key_name")
    names = {name for _, name in amounts}
    assert len(groups) == min(len(names), MOST_GROUPS) + (len(names) > MOST_GROUPS)
    assert [group.is_rest for group in groups] == [False] * min(len(names), MOST_GROUPS) + [True] * (
        len(names) > MOST_GROUPS
    )
    sizes = [sum(group.input_tokens) for group in groups if not group.is_rest]
    assert sizes == sorted(sizes, reverse=True)
    for day in range(5):
        of_day = [each for (at, _), each in amounts.items() if at == day]
        assert sum(group.requests[day] for group in groups) == sum(requests for requests, _, _ in of_day)
        assert sum(group.input_tokens[day] for group in groups) == sum(tokens for _, tokens, _ in of_day)
        costs = [cost for _, _, cost in of_day if cost is not None]
        assert sum(group.cost[day] or 0 for group in groups) == sum(costs)
    for group in groups:
        if not group.is_rest:
            for day in range(5):
                known = amounts.get((day, group.name))
                assert group.cost[day] == (known[2] if known else None)


def test_budget_of_each_key_is_shown_for_the_fullest(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    file.write_text("[budgets.each-key]\nday-tokens = 100\n[budgets.all]\nmonth-tokens = 1_000\nwarn = 0.5\n")
    keys = Keys(given=[f"the-key-number-{number:04} name=n{number}" for number in range(MOST_KEYS + 5)])
    ledger = Ledger.__new__(Ledger)
    books = Books(file, keys, ledger, lambda: NOW)
    for number, key in enumerate(keys.all):
        books.cost(
            Use(id=key.name, owner=key.digest, key_name=key.name, model="m", api="x", at=NOW, output_tokens=number)
        )
    everybody, *fullest = budgets_now(books, NOW)
    count = MOST_KEYS + 5
    assert (everybody.whose, everybody.spent, everybody.warn) == ("all keys", count * (count - 1) / 2, 0.5)
    assert (everybody.period, everybody.unit, everybody.most, everybody.until) == (
        "month",
        "tokens",
        1000.0,
        "2026-12-01T00:00:00+00:00",
    )
    assert [each.whose for each in fullest] == [f"key n{number}" for number in range(count - 1, 4, -1)]
    assert fullest[0].spent == count - 1

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.extensions.tools.search.queries import MOST_QUERIES, MOST_QUERY_CHARACTERS, all_queries_in, queries_in

TEXTS = st.text(st.characters(codec=None))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(("queries", "query")) | TEXTS, inner),
)
ARGUMENTS = TEXTS | VALUES.map(json.dumps) | st.lists(TEXTS).map(lambda queries: json.dumps({"queries": queries}))


@given(ARGUMENTS)
@example("[" * 100_000)
@example('{"queries": ["\\ud800"]}')
@example('{"queries": ' + "9" * 5_000 + "}")
@example(json.dumps({"queries": [str(number) for number in range(10_000)]}))
@example(json.dumps({"queries": ["a" * 100_000, " "]}))
def test_any_arguments_give_few_short_queries(text: str) -> None:
    queries = queries_in(text)
    assert len(queries) == min(MOST_QUERIES, len(all_queries_in(text)))
    assert all(0 < len(query) <= MOST_QUERY_CHARACTERS for query in queries)
    msgspec.json.encode(queries)


@given(st.lists(st.text().filter(str.strip), min_size=1, max_size=MOST_QUERIES, unique_by=str.strip))
def test_queries_are_read_as_they_are_written(queries: list[str]) -> None:
    assert queries_in(json.dumps({"queries": queries})) == tuple(query.strip() for query in queries)


@pytest.mark.parametrize(
    ("text", "queries"),
    [
        ('{"query": "tea"}', ("tea",)),
        ('{"queries": "tea"}', ("tea",)),
        ('["tea", 5, " tea "]', ("tea",)),
        ("green tea", ("green tea",)),
        ('{"queries": ["\\ud800 tea"]}', ("\ufffd tea",)),
        ('{"queries": [["tea"], {"query": "tea"}, null]}', ()),
        ("{}", ()),
        ("5", ()),
        ("", ()),
    ],
)
def test_clear_meaning_is_read(text: str, queries: tuple[str, ...]) -> None:
    assert queries_in(text) == queries

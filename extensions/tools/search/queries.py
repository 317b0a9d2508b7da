"""The model's searches in files; arguments are read leniently if their meaning is clear."""

from __future__ import annotations

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.json_body import read_json

MOST_QUERIES = 5
"""Queries of one call."""

MOST_QUERY_CHARACTERS = 2_000
"""Characters of a query."""


def queries_in(text: str) -> tuple[str, ...]:
    """Return the queries in the arguments of a call that are searched for."""
    return bounded(all_queries_in(text))


def bounded(queries: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the queries of a call that are searched for, each as far as it is."""
    return tuple(query[:MOST_QUERY_CHARACTERS] for query in queries[:MOST_QUERIES])


def all_queries_in(text: str) -> tuple[str, ...]:
    """Return all queries in the arguments of a call, valid or not; a text that is no object is a query itself."""
    written = text.encode(errors="replace")
    try:
        found = read_json(written)
    except InvalidRequest:
        found = written.decode()
    if isinstance(found, dict):
        found = found.get("queries") or found.get("query")
    listed = found if isinstance(found, list) else [found]
    queries = (query.strip() for query in listed if isinstance(query, str))
    return tuple(dict.fromkeys(filter(None, queries)))

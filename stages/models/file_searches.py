"""The model's searches in files; arguments are read leniently if their meaning is clear."""

from __future__ import annotations

import json

MOST_QUERIES = 5
"""Queries of one call."""

LONGEST = 2_000
"""Characters of a query."""


def queries_in(text: str) -> tuple[str, ...]:
    """Return the queries in the arguments of a call, valid or not; a text that is no object is a query itself."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = text
    found = arguments
    if isinstance(arguments, dict):
        found = arguments.get("queries") or arguments.get("query") or ()
    listed = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    queries = (query.strip()[:LONGEST] for query in listed if isinstance(query, str))
    return tuple(dict.fromkeys(filter(None, queries)))[:MOST_QUERIES]

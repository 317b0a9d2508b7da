"""The page of clients: what each of them does over each dialect, as `make matrix` has seen it."""

from __future__ import annotations

from tests.support.matrix import SHOWN, Row, kept

HEAD = """# Clients and what they do

On {date}, `make matrix` ran each client against this release with a tiny gpt-oss. A dash is what no test tries.
[Clients](CLIENTS.md) has their settings.

| client | version | dialect | {columns} |
|---|---|---|{lines}
"""
TITLES = {"tool": "tools", "structured": "structured output", "error": "errors"}


def clients_page() -> str:
    """Return the page."""
    date, rows = kept()
    columns = " | ".join(TITLES.get(shown, shown) for shown in SHOWN)
    return HEAD.format(date=date, columns=columns, lines="---|" * len(SHOWN)) + "".join(map(_line, rows))


def _line(row: Row) -> str:
    cells = " | ".join({True: "yes", False: "**no**", None: "-"}[row.works.get(shown)] for shown in SHOWN)
    return f"| {row.name} | {row.version} | {row.dialect} | {cells} |\n"

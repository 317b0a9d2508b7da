"""Usage: print who used what, by the ledger in the store of the servers.

A server may run meanwhile.  Days, months and hours are of UTC.  Costs are those of the prices when the answers ended.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.api.cli.arguments import Parser
from penstock.api.cli.command_line import parsed_settings
from penstock.api.runs.store_settings import NO_STORE, is_missing, store_place, without_password
from penstock.api.start.assembly import open_store
from penstock.api.values import seconds
from penstock.extensions.accounts.ledger import COUNTED, Ledger, Sum
from penstock.pipeline.errors import CannotRun, CannotStart, StageError
from penstock.pipeline.logs import nearest

GROUPS = {
    "hour": "hour",
    "day": "day",
    "month": "month",
    "team": "team",
    "key": "key_name",
    "owner": "owner",
    "model": "model",
    "api": "api",
    "batch": "is_line",
}
"""The words of ``--by``, with those of the ledger."""

TIMES = {"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}
"""The forms of times, by the words of ``--by``."""

FILTERS = ("team", "key", "model", "api")
"""The words by which uses are left out."""

HEADS = {
    "requests": "requests",
    "input_tokens": "input",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "reasoning_tokens": "thoughts",
    "tool_seconds": "tool s",
    "searches": "searches",
    "images": "images",
    "cost": "cost",
}
"""The heads of the columns of numbers."""

DIGITS = {"tool_seconds": 1, "cost": 4}
"""The digits behind the point of numbers that are not whole."""

ALWAYS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
"""The columns that a table has also if they have zeros alone."""


def main(arguments: Sequence[str]) -> None:
    """Print who used what: requests, tokens, tools and costs, by key, team, model, API and time."""
    chosen = _parser().parse_args(arguments)
    try:
        by = _words(chosen.by)
        sums = asyncio.run(_sums(chosen, by))
    except (OSError, StageError, CannotStart, ValueError) as error:
        raise CannotRun(str(error)) from error
    rows = [dict(_row(one, by)) for one in sums]
    if chosen.json:
        sys.stdout.write(f"{msgspec.json.format(msgspec.json.encode(rows).decode())}\n")
    elif chosen.csv:
        writer = csv.DictWriter(sys.stdout, (*by, *HEADS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _print_table(rows, by)


def _parser() -> Parser:
    parser = Parser(prog="penstock usage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="the store; by default that of the settings")
    parser.add_argument(
        "--by", default="key,model", metavar="WORDS", help=f"the groups, with commas: {', '.join(GROUPS)} (key,model)"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="a date (2026-11-01) or a time until now (7d); by default, the first of the month",
    )
    parser.add_argument("--until", metavar="TIME", help="a date, before which it ends; by default, now")
    for word in FILTERS:
        named = f"a {word} that counts; repeat it for more"
        parser.add_argument(f"--{word}", action="append", metavar="NAME", help=named)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    return parser


async def _sums(chosen: argparse.Namespace, by: Sequence[str]) -> Sequence[Sum]:
    now = time.time()
    first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    since = first.timestamp() if chosen.since is None else _moment(chosen.since, now)
    until = now + 1 if chosen.until is None else _moment(chosen.until, now)
    where = {GROUPS[word]: getattr(chosen, word) for word in FILTERS if getattr(chosen, word)}
    place = store_place(chosen.store or parsed_settings([]).store)
    if place == NO_STORE:
        raise CannotRun(f"--store {NO_STORE} keeps no accounts")
    if is_missing(place):
        raise CannotRun(f"--store {place}: there is no such store; a server makes it at its first start")
    async with open_store(place) as store:
        try:
            return await store.part(Ledger).sums(since, until, [GROUPS[word] for word in by], where)
        except StageError as error:
            raise CannotRun(f"--store {without_password(place)}: {error}") from error


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in GROUPS:
            raise ValueError(f"--by {word}: there is no such group{nearest(word, GROUPS)}")
    if len({*words} & {*TIMES}) > 1:
        raise ValueError(f"--by {text}: give one of {', '.join(TIMES)}")
    return list(dict.fromkeys(words))


def _moment(text: str, now: float) -> float:
    """Return the time of a date, or of a duration until now."""
    try:
        return now - float(seconds(text))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"expected a date (2026-11-01) or a time until now (7d), not {text!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _row(one: Sum, by: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for word in by:
        in_time = datetime.fromtimestamp(one.at, UTC).strftime(TIMES[word]) if word in TIMES else None
        yield word, getattr(one, GROUPS[word]) if in_time is None else in_time
    for name in COUNTED:
        yield name, getattr(one, name)
    yield "cost", one.cost


def _print_table(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    """Print a table with a line for the sum, and without the columns in which nothing was used."""
    if not rows:
        print("Nothing was used in this time.")
        return
    total = {name: sum(row[name] or 0 for row in rows) for name in HEADS}
    numbers = [name for name in HEADS if name in ALWAYS or total[name]]
    lines = [[*by, *(HEADS[name] for name in numbers)]]
    lines += [[_text(row[word]) for word in by] + [_number(name, row[name]) for name in numbers] for row in rows]
    if len(rows) > 1:
        lines.append(
            [*("all" if word == by[0] else "" for word in by), *(_number(name, total[name]) for name in numbers)]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.ljust(width) if place < len(by) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def _text(value: Any) -> str:
    """Return a word of a group as it is shown: on one line, also if a client has named it."""
    text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "-"


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.{DIGITS.get(name, 0)}f}"

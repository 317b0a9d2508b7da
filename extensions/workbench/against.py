"""The requests of recordings, sent to another server: what its answers would change for the clients."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.api.settings.sources import CLIENT_KEY
from penstock.extensions.workbench.wiretap.comparing import Difference, count, differences
from penstock.extensions.workbench.wiretap.sending import Exchange, NotAnswered, Other, folders, read_exchange
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import counted
from penstock.pipeline.recordings.format import UnreadableRecording
from penstock.pipeline.recordings.wire import WireFrame

NO_CHOICE = "temperature 0"
"""The reason for which texts are compared."""


@dataclass(frozen=True)
class Compared:
    """A recording beside the answer of another server, or the ``problem`` that kept them from being compared."""

    name: str
    dialect: str = ""
    recorded: int = 0
    answered: int = 0
    with_texts: bool = False
    found: tuple[Difference, ...] = ()
    problem: str = ""

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return not self.found and not self.problem

    @property
    def columns(self) -> tuple[str, ...]:
        """The row of the table."""
        if self.problem:
            return self.name, self.dialect, self.problem
        texts = str(count(self.found, "text")) if self.with_texts else "-"
        events = f"{self.recorded}:{self.answered}"
        return self.name, self.dialect, events, str(count(self.found, "order")), str(count(self.found, "field")), texts


HEAD = ("recording", "dialect", "events", "order", "fields", "texts")


async def compared(path: Path, url: str, model: str) -> list[Compared]:
    """Send the requests of the recordings at a path to another server, one after the other.

    Raise `UnreadableRecording` if there are no recordings.
    """
    async with Other(url, os.environ.get(CLIENT_KEY, ""), model).connected() as other:
        return [await _compared(folder, other) for folder in folders(path)]


async def _compared(folder: Path, other: Other) -> Compared:
    try:
        exchange = read_exchange(folder)
    except UnreadableRecording as error:
        return Compared(folder.name, problem=f"not sent: {str(error).rpartition(f'{folder}')[2].lstrip(':/ ')}")
    dialect = exchange.recording.header.dialect or ""
    try:
        answer = await other.answer(exchange)
    except NotAnswered as error:
        return Compared(folder.name, dialect, problem=f"refused: {error}")
    return _beside(exchange, dialect, answer)


def _beside(exchange: Exchange, dialect: str, answer: Sequence[WireFrame]) -> Compared:
    recorded = exchange.recording.frames[1:]
    with_texts = exchange.leaves_no_choice
    found = differences(recorded, answer[1:], with_texts=with_texts)
    return Compared(
        exchange.folder.name, dialect, len(recorded), len(answer) - 1, with_texts=with_texts, found=tuple(found)
    )


def table(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield the lines of the report: a row for each recording, and each difference with how often it was found."""
    shown = [HEAD, *(row.columns for row in rows)]
    whole = [columns for columns in shown if len(columns) == len(HEAD)]
    widths = [max(len(columns[at]) for columns in (HEAD, *whole)) for at in range(len(HEAD))]
    for columns in shown:
        yield "  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=False)).rstrip()
    seen = Counter(difference for row in rows for difference in row.found)
    for difference, times in seen.most_common():
        first = next(row.name for row in rows if difference in row.found)
        where = f"in {times}, first in {first}" if times > 1 else f"in {first}"
        yield f"{difference.what}: {difference.kind}: {difference.problem} ({where})"
    same = sum(row.is_same for row in rows)
    yield f"{counted(len(rows), 'recording')}: {same} the same, {len(rows) - same} not"


def check_alone(options: dict[str, object]) -> None:
    """Raise `CannotRun` for an option of the comparison of files."""
    for name, value in options.items():
        if value:
            raise CannotRun(f"{name} has no meaning with --against: requests are sent, and answers compared as events")

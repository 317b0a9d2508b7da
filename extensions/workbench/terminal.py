"""A timeline in the terminal: facts, prompts, and then line by line what happened at which time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import median
from typing import Any, TypeAlias

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.extensions.workbench.timeline.attribution import AttributedToken, Channel
from penstock.extensions.workbench.timeline.facts import facts_of, request_of
from penstock.extensions.workbench.timeline.rows import Row, rows_of, words
from penstock.extensions.workbench.timeline.timeline import Timeline, is_served
from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ResponseStarted,
    TurnFinished,
)
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.events import DELTAS, Event
from penstock.pipeline.recordings.comparison import common_prefix

ALARM = "bold red"
STYLES: dict[Channel, str] = {
    "markup": "dim",
    "analysis": "cyan",
    "commentary": "magenta",
    "final": "green",
    "call": "yellow",
}
"""The style of the text in each channel."""

ENDS = {
    "response.completed": "bold",
    "response.incomplete": ALARM,
    "response.failed": ALARM,
    "response.mcp_call.failed": ALARM,
    "response.mcp_list_tools.failed": ALARM,
}
"""The styles of events that end something; all others are dim."""

WIDE = 110
"""The width in columns at which events are shown beside their line instead of below it."""

HEAD, TAIL = 150, 250
"""Characters shown at the beginning and at the end of a long prompt; the model continues from the end."""
LONGEST_RESULT = 400
"""Characters shown of the result of a tool."""

LONG = 5
"""A gap is highlighted if it is at least this many times as long as the median gap,"""
FELT = 0.05
"""and at least this many seconds."""

Paced: TypeAlias = Callable[[Iterable[tuple[float | None, RenderableType]], float | None], Iterator[RenderableType]]


def show(paced: Paced, timeline: Timeline, speed: float | None, *, full: bool) -> None:
    """Print a timeline, part by part at the given speed, in colour if stdout is a terminal."""
    console = Console(highlight=False, markup=False, emoji=False)
    for part in paced(Drawing(timeline, full=full, width=console.width).parts(), speed):
        with console.capture() as captured:
            console.print(part)
        for line in captured.get().splitlines():
            print(line.rstrip(), flush=True)


@dataclass
class TextLine:
    """A line with a glyph, from ``at`` to ``until`` in seconds, and the events that its ``frames`` caused."""

    glyph: Text
    text: Text
    frames: Sequence[int]
    at: float | None = None
    until: float | None = None
    events: list[Event] = field(default_factory=list)


class Drawing:
    """The output for one timeline; with ``full``, prompts and tool results are not shortened."""

    def __init__(self, timeline: Timeline, *, full: bool, width: int) -> None:
        self._timeline = timeline
        self._full = full
        self._is_wide = width >= WIDE
        self._long_gap = long_gap(timeline)
        self._has_times = any(each.at is not None for each in (*timeline.items, *timeline.events, *timeline.tokens))
        self._item = -1
        """The index of the latest item that the model wrote."""

    def parts(self) -> Iterator[tuple[float | None, RenderableType]]:
        """Yield the parts to print, each with its time in seconds, or None if it has none."""
        timeline, latest = self._timeline, None
        yield None, Rule(Text(str(timeline.path), "bold"), align="left", style="dim")
        yield from ((None, part) for part in self._head())
        for row in rows_of(timeline):
            lines = list(self._lines(row))
            if row.kind == "turn":
                at = lines[0].at if lines else None
                yield from ((at, part) for part in self._prompt(row.turn))
            for line in lines:
                yield line.at, self._columns(line, latest)
                latest = next((at for at in (line.until, line.at, latest) if at is not None), None)
        for failure in timeline.failures:
            yield latest, self._columns(TextLine(Text(), Text(visible(failure), ALARM), []), latest)

    # Facts and prompts

    def _head(self) -> Iterator[Text]:
        facts = [Text(f"{name.lower()} ", "dim") + _fact(name, value) for name, value in facts_of(self._timeline)]
        yield Text(" · ").join(facts)
        if params := request_of(self._timeline):
            shown = (f"{key} {value if isinstance(value, str) else as_json(value)}" for key, value in params.items())
            yield Text("request ", "dim").append(visible(" · ".join(shown)), "not dim")
        for note in filter(None, (*self._timeline.notes, self._timeline.difference)):
            yield Text("note ", "dim").append(visible(note), "not dim italic")

    def _prompt(self, turn: int) -> Iterator[RenderableType]:
        spelling, prompts = self._timeline.model.spelling, self._timeline.prompts[:turn]
        if not spelling or len(prompts) < turn:
            return
        texts = [b"".join(map(spelling, prompt.token_ids)).decode(errors="replace") for prompt in prompts[-2:]]
        known = common_prefix(*texts) if len(texts) > 1 else 0
        new = texts[-1][known:]
        if not self._full and len(new) > HEAD + TAIL:
            new = f"{new[:HEAD]} … {counted(len(new) - HEAD - TAIL, 'character')} more: --full … {new[-TAIL:]}"
        text = Text("… " if known else "").append(visible(new) if self._full else visible(new).replace("\n", " "))
        text.highlight_regex(r"<\|[^|<>]{1,40}\|>", "dim")
        yield Text("the new part of the next turn's prompt" if known else "prompt", "dim")
        yield Padding(text, (0, 0, 1, 2))

    # Rows

    def _lines(self, row: Row) -> list[TextLine]:
        tokens = [self._timeline.attributed[index] for index in row.tokens] if self._timeline.attributed else []
        lines = self._item_lines(row, tokens) if row.opened else [self._other(index, row) for index in row.frames]
        if tokens and not row.opened:
            lines.append(self._line(Text(), _written(tokens), [], tokens))
        of_frame = {index: line for line in lines for index in line.frames}
        loose = TextLine(Text(), Text(), [])
        for event in (self._timeline.events[index] for index in row.events):
            line = loose if event.cause is None else of_frame.get(event.cause, loose)
            line.events.append(event.frame)
            loose.at = event.at
        return [*lines, loose] if loose.events else lines

    def _item_lines(self, row: Row, tokens: Sequence[AttributedToken]) -> list[TextLine]:
        style = STYLES[row.channel]
        self._item += bool(row.turn) and not is_served(row.opened)
        is_rewritten = self._item in self._timeline.rewritten
        head, body, tail = _parts_of(tokens)
        body = [] if is_rewritten else body
        groups = self._groups(row)
        last_text = max((group[-1] for group in groups if self._is_text(group[0])), default=-1)
        lines = []
        for group in groups:
            frame = self._timeline.items[group[0]].frame
            if frame is row.opened:
                title = Text(visible(row.title), f"bold {style}")
                lines.append(self._line(Text("╭", style), _spaced(title, _written(head)), group, head))
            elif self._is_text(group[0]):
                taken = body if group[-1] == last_text else [each for each in body if self._is_until(each, group[-1])]
                body = body[len(taken) :]
                text = Text(visible("".join(self._timeline.items[index].frame.text for index in group)), style)
                lines.append(self._line(Text("│", style), _written(taken) if taken else text, group, taken))
            elif isinstance(frame, ItemClosed):
                if body:
                    lines.append(self._line(Text("│", style), _written(body), [], body))
                cut_off = Text("" if frame.complete else "cut off", ALARM)
                lines.append(self._line(Text("╰", style), _spaced(_written(tail), cut_off), group, tail))
                body, tail = [], []
            else:
                lines.append(self._other(group[0], row))
        if rest := [*body, *tail]:
            lines.append(self._line(Text("│", style), _written(rest), [], rest))
        return lines

    def _groups(self, row: Row) -> list[list[int]]:
        groups: list[list[int]] = []
        for index in row.frames:
            if groups and self._is_text(index) and self._is_text(groups[-1][0]) and not self._stands_out(index):
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _is_text(self, index: int) -> bool:
        return isinstance(self._timeline.items[index].frame, ItemDelta)

    def _stands_out(self, index: int) -> bool:
        before, at = (self._timeline.items[each].at for each in (index - 1, index))
        return before is not None and at is not None and at - before >= self._long_gap

    def _is_until(self, token: AttributedToken, index: int) -> bool:
        cause = self._timeline.items[index].cause
        return cause is None or token.frame <= cause

    def _line(self, glyph: Text, text: Text, group: Sequence[int], tokens: Sequence[AttributedToken] = ()) -> TextLine:
        times = [self._timeline.tokens[token.frame].at for token in tokens]
        times += [self._timeline.items[index].at for index in group]
        known = [at for at in times if at is not None]
        return TextLine(glyph, text=text, frames=group, at=min(known, default=None), until=max(known, default=None))

    def _other(self, index: int, row: Row) -> TextLine:
        frame = self._timeline.items[index].frame
        match frame:
            case GenerationStarted():
                prompt = counted(frame.prompt_tokens, "token")
                return self._border(f"turn {row.turn} begins after {prompt} of prompt", index)
            case ResponseStarted():
                return self._border("response begins", index)
            case TurnFinished():
                thought = f", {frame.reasoning_tokens} of them reasoning" if frame.reasoning_tokens else ""
                text = f"turn {row.turn} ends: {frame.reason}, {counted(frame.output_tokens, 'token')}{thought}"
                return self._border(text, index)
            case CallStarted():
                body = Text(f"runs {as_json(frame.action)}" if frame.action else "runs", "bold")
            case CallFinished():
                result = frame.result if self._full else short(frame.result, LONGEST_RESULT)
                body = Text("returned ", "bold").append(visible(result), "not bold")
                if frame.error is not None:
                    body.append(f" failed: {visible(frame.error)}", ALARM)
            case _:
                body = Text(visible(short(f"{words(type(frame).__name__)} {as_json(frame)}", LONGEST_RESULT)))
        return self._line(Text("│", STYLES["call"]), body, [index])

    def _border(self, text: str, index: int) -> TextLine:
        return self._line(Text("●", "dim"), Text(text), [index])

    # Columns

    def _columns(self, line: TextLine, latest: float | None) -> RenderableType:
        table = Table.grid(padding=(0, 1, 0, 0), expand=True)
        cells: list[RenderableType] = []
        if self._has_times:
            table.add_column(width=8, justify="right")
            table.add_column(width=8, justify="right")
            gap = 0.0 if line.at is None or latest is None else line.at - latest
            shown = f"+{gap:.3f}" if gap >= 0.0005 else ""
            cells += [
                "" if line.at is None else f"{line.at:.3f}",
                Text(shown, ALARM if gap >= self._long_gap else "dim"),
            ]
        table.add_column(width=1)
        table.add_column(ratio=3, overflow="fold")
        if self._is_wide:
            table.add_column(ratio=2, overflow="fold")
            table.add_row(*cells, line.glyph, line.text, _Events(line.events))
        else:
            below = [Padding(_Events(line.events), (0, 0, 0, 2))] if line.events else []
            table.add_row(*cells, line.glyph, Group(*([line.text] if line.text or not below else []), *below))
        return table


def long_gap(timeline: Timeline) -> float:
    """Return the minimum length in seconds of a highlighted gap."""
    times = [crossing.at for crossing in timeline.tokens if crossing.at is not None]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return max(FELT, LONG * median(gaps)) if gaps else FELT


def _parts_of(tokens: Sequence[AttributedToken]) -> tuple[Sequence[AttributedToken], ...]:
    texts = [at for at, token in enumerate(tokens) if token.is_text]
    start = texts[0] if texts else next((at + 1 for at, token in enumerate(tokens) if token.borders), len(tokens))
    end = texts[-1] + 1 if texts else start
    return tokens[:start], tokens[start:end], tokens[end:]


def _written(tokens: Iterable[AttributedToken]) -> Text:
    runs: list[tuple[str, str]] = []
    for (style, repairs), run in groupby(tokens, lambda token: (_token_style(token), token.repairs)):
        runs.append((b"".join(token.written for token in run).decode(errors="replace"), style))
        if repairs:
            runs.append((f" ⚠ {', '.join(repairs)} ", ALARM))
    text = Text()
    for place, (written, style) in enumerate(runs, start=1):
        shown = visible(written)
        text.append(shown if place == len(runs) or not written.endswith("\n") else f"{shown}\n", style)
    return text


def _token_style(token: AttributedToken) -> str:
    return "dim bold" if token.is_mark else STYLES[token.channel]


def _fact(name: str, value: str) -> Text:
    is_bad = name == "Repairs" or (name == "Status" and value != "completed")
    return Text(visible(value), ALARM if is_bad else "")


def _spaced(*texts: Text) -> Text:
    return Text("  ").join(text for text in texts if text)


@dataclass(frozen=True)
class _Events:
    """The sequence numbers and names of events, as many on a line as fit; consecutive deltas are counted."""

    events: Sequence[Event]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text()
        for fold in folded(self.events):
            name = str(fold[0].__struct_config__.tag)
            first, last = fold[0].sequence_number, fold[-1].sequence_number
            label = f"#{first} " if len(fold) == 1 else f"#{first}–{last} {len(fold)} × "
            label += name.removeprefix("response.")
            if text and len(text) + len(label) + 3 > options.max_width:
                yield text
                text = Text()
            text.append(" · " if text else "", "dim")
            text.append(label, ENDS.get(name, "dim"))
        yield text


def folded(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Group consecutive deltas of one type; any other event is a group of its own."""
    for kind, group in groupby(events, type):
        run = list(group)
        yield from [run] if kind in DELTAS else [[event] for event in run]


# Text that is safe to show in a terminal


def visible(text: str) -> str:
    """Escape all characters that are not printable, so that text cannot control the terminal, and mark line ends."""
    parts = (part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)
    return "".join("⏎\n" if part == r"\n" else part for part in parts).removesuffix("\n")


def short(text: str, limit: int) -> str:
    """Return the first ``limit`` characters of a text, and the number of characters left out."""
    return text if len(text) <= limit else f"{text[:limit]} … {counted(len(text) - limit, 'character')} more"


def as_json(value: Any) -> str:
    """Return a value as JSON on one line."""
    return msgspec.json.encode(value).decode()

"""The timeline of a story: facts, the prompt, and then row by row what happened at which time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.api.cli.story import Story
from penstock.api.cli.timeline.facts import facts_of
from penstock.api.cli.timeline.rows import Row, folded, long_gap, rows_of
from penstock.api.cli.timeline.shown import ALARM, as_json, short, visible
from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    GenerationStarted,
    ItemClosed,
    ResponseStarted,
    TurnFinished,
)
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.difference import common
from penstock.pipeline.recordings.format import Failure
from penstock.pipeline.recordings.token_places import Channel, Token

STYLES: dict[Channel, str] = {
    "markup": "dim",
    "analysis": "cyan",
    "commentary": "magenta",
    "final": "green",
    "call": "yellow",
}

ENDS = {
    "response.completed": "bold",
    "response.incomplete": ALARM,
    "response.failed": ALARM,
    "response.mcp_call.failed": ALARM,
    "response.mcp_list_tools.failed": ALARM,
}

WIDE = 110
"""The width in columns at which events are shown beside their row instead of below it."""

HEAD, TAIL = 150, 250
"""Characters shown at the beginning and at the end of a long prompt; the model continues from the end."""
LONGEST_RESULT = 400
"""Characters shown of the result of a tool."""

MARK = re.compile(r"<\|[^|<>]{1,40}\|>")


Paced: TypeAlias = Callable[[Iterable[tuple[float | None, RenderableType]], float | None], Iterator[RenderableType]]


class Timeline:
    """The output for one story; with ``full``, prompts and tool results are not shortened."""

    def __init__(self, story: Story, *, full: bool, width: int) -> None:
        self._story = story
        self._full = full
        self._is_wide = width >= WIDE
        self._rows = rows_of(story)
        self._gap = long_gap(story)
        self._turns = 0

    def parts(self) -> Iterator[tuple[float | None, RenderableType]]:
        """Yield the parts to print, each with its time in seconds, or None if it has none."""
        yield None, Rule(Text(str(self._story.path), "bold"), align="left", style="dim")
        yield None, self._head()
        yield from ((None, part) for part in self._prompts(self._story.prompts[:1]))
        before: float | None = None
        for row in self._rows:
            if isinstance(row.frame, GenerationStarted):
                self._turns += 1
                if self._turns > 1:
                    yield from ((row.at, part) for part in self._prompts(self._story.prompts[: self._turns]))
            yield row.at, self._line(row, before)
            before = row.until if row.until is not None else row.at if row.at is not None else before
        yield from ((before, self._cell("", "", "", last)) for last in self._last())

    # Facts and prompts

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 2))
        head.add_column(style="dim")
        head.add_column(overflow="fold")
        closed = [row.frame for row in self._rows if isinstance(row.frame, ItemClosed)]
        for name, value in facts_of(self._story, (repair for frame in closed for repair in frame.repairs)):
            head.add_row(name, value)
        return head

    def _prompts(self, prompts: Sequence[str]) -> Iterator[RenderableType]:
        """Yield the last of ``prompts``, without the beginning that it shares with the one before it."""
        if not prompts:
            return
        known = common(*prompts[-2:]) if len(prompts) > 1 else 0
        new = prompts[-1][known:]
        text = Text("… " if known else "")
        text.append(visible(new) if self._full else _at_a_glance(new))
        text.highlight_regex(MARK, "dim")
        yield Text("prompt of the next turn, as far as it is new" if known else "prompt", "dim")
        yield Padding(text, (0, 0, 1, 2))

    # Rows

    def _line(self, row: Row, before: float | None) -> RenderableType:
        at = "" if row.at is None else f"{row.at:.3f}"
        gap = None if row.at is None or before is None else row.at - before
        shown = "" if not gap or gap < 0.0005 else f"+{gap:.3f}"
        return self._cell(at, Text(shown, ALARM if gap and gap >= self._gap else "dim"), *self._body(row), row.events)

    def _cell(
        self, at: str, gap: Text | str, glyph: Text | str, body: Text, events: Sequence[Event] = ()
    ) -> RenderableType:
        line = Table.grid(padding=(0, 1, 0, 0), expand=True)
        if any(row.at is not None for row in self._rows):
            line.add_column(width=8, justify="right")
            line.add_column(width=8, justify="right")
        line.add_column(width=1)
        line.add_column(ratio=3, overflow="fold")
        columns: list[RenderableType] = [glyph, body]
        if self._is_wide:
            line.add_column(ratio=2, overflow="fold")
            columns.append(_Events(events))
        elif events:
            padded = Padding(_Events(events), (0, 0, 0, 2))
            columns[1] = Group(body, padded) if body else padded
        line.add_row(*([at, gap] if len(line.columns) > len(columns) else []), *columns)
        return line

    def _body(self, row: Row) -> tuple[Text, Text]:
        """Return the glyph and the text of a row."""
        style = STYLES[row.channel]
        match row.kind:
            case "open":
                label = Text(_name(row.frame), f"bold {style}")
                return Text("╭", style), _spaced(label, _written(row.tokens))
            case "text":
                text = _written(row.tokens) if row.tokens else Text(visible(row.text), style)
                return Text("│", style), text
            case "close":
                return Text("╰", style), _spaced(_written(row.tokens), _closed(row.frame))
            case "tool":
                return Text("│", STYLES["call"]), self._tool(row.frame)
            case "markup":
                return Text(" "), _written(row.tokens)
            case "begin" | "finish" | "more":
                return Text("●" if row.frame else " ", "dim"), Text(self._told(row.frame))

    def _told(self, frame: Any) -> str:
        match frame:
            case None:
                return ""
            case GenerationStarted():
                return f"turn {self._turns} begins, behind {frame.prompt_tokens} tokens of prompt"
            case ResponseStarted():
                return "response begins"
            case TurnFinished():
                thought = f", {frame.reasoning_tokens} of them thoughts" if frame.reasoning_tokens else ""
                return f"turn {self._turns} ends: {frame.reason}, {frame.output_tokens} tokens{thought}"
            case _:
                return _name(frame)

    def _tool(self, frame: Any) -> Text:
        match frame:
            case CallStarted():
                return Text(f"runs {as_json(frame.action)}" if frame.action else "runs", "bold")
            case CallFinished():
                text = Text("gave ", "bold")
                text.append(visible(frame.result if self._full else short(frame.result, LONGEST_RESULT)), "not bold")
                if frame.error is not None:
                    text.append(f" failed: {visible(frame.error)}", ALARM)
                return text
            case _:
                return Text(_name(frame))

    def _last(self) -> Iterator[Text]:
        """Yield the recorded failure, the early end, or the raised error of the stream; no event shows these."""
        story = self._story
        if story.end.failure and not story.fault:
            yield Text(f"the recorded stream failed here: {_failure(story.end.failure)}", ALARM)
        if story.end.abandoned:
            yield Text("nobody read on from here", ALARM)
        if story.fault:
            stage, error = story.fault
            yield Text(f"stage {stage} raised {type(error).__name__}: {error}", ALARM)


def _at_a_glance(prompt: str) -> str:
    """Return a prompt on one line, without its middle if it is long."""
    if len(prompt) > HEAD + TAIL:
        left_out = len(prompt) - HEAD - TAIL
        prompt = f"{prompt[:HEAD]} … {left_out} characters more: --full … {prompt[-TAIL:]}"
    return visible(prompt).replace("\n", " ")


def _written(tokens: Iterable[Token]) -> Text:
    """Return the text of tokens, with each repair after the token at which it was made."""
    runs: list[tuple[str, str]] = []
    for (style, repairs), run in groupby(tokens, lambda token: (_style(token), token.repairs)):
        runs.append((b"".join(token.written for token in run).decode(errors="replace"), style))
        if repairs:
            runs.append((f" ⚠ {', '.join(repairs)} ", ALARM))
    text = Text()
    for place, (written, style) in enumerate(runs, start=1):
        shown = visible(written)
        text.append(shown if place == len(runs) or not written.endswith("\n") else f"{shown}\n", style)
    return text


def _style(token: Token) -> str:
    return "dim bold" if token.is_mark else STYLES[token.channel]


@dataclass(frozen=True)
class _Events:
    """The sequence numbers and names of events, as many on a line as fit."""

    events: Sequence[Event]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text()
        for fold in folded(self.events):
            label = f"#{fold.first} " if fold.count == 1 else f"#{fold.first}–{fold.last} {fold.count} × "
            label += fold.name.removeprefix("response.")
            if text and len(text) + len(label) + 3 > options.max_width:
                yield text
                text = Text()
            text.append(" · " if text else "", "dim")
            text.append(label, ENDS.get(fold.name, "dim"))
        yield text


def _closed(closed: ItemClosed) -> Text:
    return Text("" if closed.complete else "cut off", ALARM)


def _spaced(*texts: Text) -> Text:
    return Text("  ").join(text for text in texts if text)


def _name(frame: Any) -> str:
    """Return the kind of a frame in words, followed by its values."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(frame).__name__.removesuffix("Opened")).lower()
    values = (
        [f"{value}" for value in msgspec.to_builtins(frame).values()][1:] if isinstance(frame, msgspec.Struct) else []
    )
    return visible(short(" ".join([words, *values]), LONGEST_RESULT))


def _failure(failure: Failure) -> str:
    return f"{failure.error}: {failure.message}"


def show(paced: Paced, story: Story, speed: float | None, *, full: bool) -> None:
    """Print the timeline of a story, part by part at the given speed, in colour if stdout is a terminal."""
    console = Console(highlight=False, markup=False, emoji=False)
    for part in paced(Timeline(story, full=full, width=console.width).parts(), speed):
        with console.capture() as captured:
            console.print(part)
        for line in captured.get().splitlines():
            print(line.rstrip(), flush=True)

"""A comparison as text: a line for each answer, the figures of all, and the worst tokens in their context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from penstock.extensions.workbench.forced.comparison import Compared, ComparedAnswer, Figures, SkippedAnswer
from penstock.extensions.workbench.forced.run_on import VERDICTS, RunOn
from penstock.extensions.workbench.forced.scores import ForcedToken, ForcedTurn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.logs import counted

COLUMNS = ("tokens", "compared", "changed", "share", "surprise", "worst", "shift")
WIDTH, WIDEST = 9, 48
"""Characters of a column, and the most of that with the names; a longer name is shown whole, and moves its columns."""

BEFORE, AFTER = 8, 3
"""Tokens that are shown before a token and after it."""


@dataclass(frozen=True)
class Place:
    """A token of an answer."""

    answer: ComparedAnswer
    turn: ForcedTurn
    at: int

    @property
    def token(self) -> ForcedToken:
        """The token."""
        return self.turn.tokens[self.at]

    @property
    def name(self) -> str:
        """The place in words, counted from 1."""
        turn = f", turn {self.turn.turn.number}" if len(self.answer.turns) > 1 else ""
        return f"{self.answer.name}{turn}, token {self.at + 1}"


@dataclass
class Table:
    """The lines of a comparison, as the answers come."""

    vocabulary: Vocabulary
    names: Sequence[str]
    worst: int = 10
    """The number of tokens that are listed."""
    figures: Figures = field(default_factory=Figures)
    _places: list[Place] = field(default_factory=list)

    @property
    def _width(self) -> int:
        return min(WIDEST, max(map(len, ("answer", *self.names))))

    @property
    def head(self) -> str:
        """The names of the columns."""
        return f"{'answer':{self._width}}" + "".join(f"{name:>{WIDTH}}" for name in COLUMNS) + "  first change"

    def line(self, compared: Compared) -> str:
        """Return the line of an answer, which then counts."""
        self.figures.add(compared)
        name = compared.name
        if isinstance(compared, SkippedAnswer):
            return f"{name:{self._width}}  skipped: {compared.reason}"
        self._keep(compared)
        cells = "".join(f"{cell:>{WIDTH}}" for cell in cells_of(compared.figures))
        return f"{name:{self._width}}{cells}  {self._change(compared)}".rstrip()

    def _keep(self, answer: ComparedAnswer) -> None:
        """Keep the tokens that may be among the worst."""
        places = (
            Place(answer, turn, at)
            for turn in answer.turns
            for at, token in enumerate(turn.tokens)
            if token.has_changed
        )
        self._places = nlargest(self.worst, (*self._places, *places), key=lambda place: place.token.surprise)

    def _change(self, answer: ComparedAnswer) -> str:
        if not answer.first_change:
            return "; ".join(dict.fromkeys(f"left out: {turn.left_out}" for turn in answer.turns if turn.left_out))
        turn, at = answer.first_change
        token = turn.tokens[at]
        change = f"{self._place(answer, turn, at)}: {self._shown(token.id)} -> {self._shown(token.first[0])}"
        return f"{change}; {_ran_on(answer.run_on)}" if answer.run_on else change

    def _place(self, answer: ComparedAnswer, turn: ForcedTurn, at: int) -> str:
        return Place(answer, turn, at).name.removeprefix(f"{answer.name}, ")

    def _shown(self, token: int) -> str:
        return repr(self.vocabulary.text([token]))

    def end(self) -> Iterator[str]:
        """Yield the lines after the answers."""
        figures = self.figures
        yield ""
        yield (
            f"{figures.changed_answers} of {counted(figures.answers, 'answer')} changed, at {figures.changed} of "
            f"{counted(figures.compared, 'token')}{_share(figures)}"
        )
        if figures.mean_surprise is not None:
            yield f"surprise: {figures.mean_surprise:.4f} on average, {figures.worst_surprise:.3f} at worst"
        if figures.mean_shift is not None:
            yield f"shift: {figures.mean_shift:+.4f} on average, {figures.worst_shift:.3f} at worst"
        if figures.verdicts:
            yield "run on: " + ", ".join(
                f"{figures.verdicts[verdict]} {verdict}" for verdict in reversed(VERDICTS) if figures.verdicts[verdict]
            )
        for reason, count in figures.left_out.most_common():
            yield f"left out: {counted(count, 'token')} {reason}"
        for reason, count in figures.skipped.most_common():
            yield f"skipped: {counted(count, 'recording')}: {reason}"
        for reason, count in figures.notes.most_common():
            yield f"vocabulary not checked: {counted(count, 'answer')}: {reason}"
        if self._places:
            yield ""
            yield "The tokens that surprise most:"
            yield from map(self._worst, self._places)

    def _worst(self, place: Place) -> str:
        token, tokens = place.token, place.turn.turn.tokens
        before = self.vocabulary.text(tokens[max(0, place.at - BEFORE) : place.at])
        after = self.vocabulary.text(tokens[place.at + 1 : place.at + 1 + AFTER])
        rank = f"rank {token.rank}" if token.rank else f"rank above {len(token.top)}"
        context = repr(f"{before}[{self.vocabulary.text([token.id])}]{after}")
        return f"{token.surprise:8.3f}  {place.name}: {context} -> {self._shown(token.first[0])} ({rank})"


def cells_of(figures: Figures) -> list[str]:
    """Return the cells of the columns."""
    share, surprise, shift = figures.share, figures.mean_surprise, figures.mean_shift
    return [
        str(figures.tokens),
        str(figures.compared),
        str(figures.changed),
        "-" if share is None else f"{share:.1%}",
        "-" if surprise is None else f"{surprise:.3f}",
        "-" if surprise is None else f"{figures.worst_surprise:.3f}",
        "-" if shift is None else f"{shift:+.3f}",
    ]


def _share(figures: Figures) -> str:
    return "" if figures.share is None else f" ({figures.share:.2%})"


def _ran_on(run: RunOn) -> str:
    return f"{run.verdict}: {run.difference}" if run.difference else run.verdict

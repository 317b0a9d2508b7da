"""A proof as text: a line for each path, and the verdict on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.extensions.rollouts.proof import Figures, ProvedPath
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.logs import counted

COLUMNS = ("path", "tokens", "written", "proved", "off", "mean", "worst")
WIDTH, NAME = 9, 36
"""Characters of a column, and of that with the sessions; a longer one is shown whole, and moves its columns."""

BEFORE, AFTER = 8, 3
"""Tokens that are shown before a token and after it."""


@dataclass
class ProofTable:
    """The lines of a proof, as the paths come; a difference above the ``tolerance``, in nats, is off."""

    vocabulary: Vocabulary
    tolerance: float
    figures: Figures = field(default_factory=Figures)
    paths: int = 0
    first_off: ProvedPath | None = None

    @property
    def head(self) -> str:
        """The names of the columns."""
        return f"{'session':{NAME}}" + "".join(f"{name:>{WIDTH}}" for name in COLUMNS)

    def line(self, proved: ProvedPath) -> str:
        """Return the line of a path, which then counts."""
        path, figures = proved.path, proved.figures
        self.paths += 1
        self.figures.add(figures)
        if proved.first_off and not self.first_off:
            self.first_off = proved
        cells = (path.number, len(path.token_ids), path.mask.count(1), figures.proved, figures.off, *_means(figures))
        return f"{path.session:{NAME}}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)

    def end(self) -> Iterator[str]:
        """Yield the lines after the paths."""
        figures = self.figures
        yield ""
        if self.first_off:
            yield f"off: {figures.off} of {self._counted} by more than {self.tolerance:g} nats"
            yield f"the first: {self._place(self.first_off)}"
        elif figures.proved:
            yield f"exact: {self._counted} within {self.tolerance:g} nats"
        if figures.mean is not None:
            yield f"difference: {figures.mean:.6f} nats on average, {figures.worst:.4f} at worst"
        for reason, number in figures.left_out.most_common():
            yield f"left out: {counted(number, 'token')}: {reason}"
        for (version, now), number in figures.versions.most_common():
            yield f"weights: the version {version} wrote {counted(number, 'token')}, and the engine has {now} now"

    @property
    def _counted(self) -> str:
        return f"{counted(self.figures.proved, 'token')} of {counted(self.paths, 'path')}"

    def _text(self, tokens: Iterable[int]) -> str:
        return self.vocabulary.text(tokens)

    def _place(self, proved: ProvedPath) -> str:
        """Return the first token that is off, in its context."""
        off, path = proved.first_off, proved.path
        assert off
        turn, tokens = off.turn, path.token_ids
        before, after = tokens[max(0, off.at - BEFORE) : off.at], tokens[off.at + 1 : off.at + 1 + AFTER]
        context = f"{self._text(before)}[{self._text(tokens[off.at : off.at + 1])}]{self._text(after)}"
        was = "the first choice" if off.recorded is None else f"{off.recorded:.4f}"
        return (
            f"session {path.session}, path {path.number}, {turn.response}, turn {turn.number}, "
            f"token {off.at - turn.begin + 1} (index {off.at}): {context!r} was {was}, and is {off.now:.4f} now; "
            f"the likeliest is {self._text([off.first[0]])!r} at {off.first[1]:.4f}"
        )


def _means(figures: Figures) -> tuple[str, str]:
    """Return the cells of the differences."""
    return ("-", "-") if figures.mean is None else (f"{figures.mean:.5f}", f"{figures.worst:.4f}")

"""The comparison of recorded answers with another engine: which would it have changed, and at which token.

A program calls `compared`; ``penstock compare`` shows what it yields.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TypeAlias

from penstock.extensions.workbench.forced.grammar import Grammars
from penstock.extensions.workbench.forced.in_order import in_order
from penstock.extensions.workbench.forced.recorded import read_answer
from penstock.extensions.workbench.forced.run_on import RunOn, Verdict, run_on
from penstock.extensions.workbench.forced.scores import (
    ForcedToken,
    ForcedTurn,
    Run,
    alternatives,
    candidates,
    checked,
    forced,
    judged,
)
from penstock.extensions.workbench.forced.turn import Turn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.recordings.format import Header, UnreadableRecording
from penstock.services.engines.engine import Engine
from penstock.stages.parse.parser import ParseStage

AT_ONCE = 8
"""Answers that the engine reads at once."""


@dataclass(frozen=True)
class ComparedAnswer:
    """A recorded answer, as the other engine finds it."""

    name: str
    folder: Path
    header: Header
    turns: tuple[ForcedTurn, ...]
    note: str = ""
    """Why it is not known if its tokens mean the same in the new model."""
    run_on: RunOn | None = None
    """The turn with the first change, as the new engine would have written it, if that was requested."""

    @property
    def tokens(self) -> list[ForcedToken]:
        """The tokens of all turns."""
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def figures(self) -> Figures:
        """The figures of this answer alone."""
        figures = Figures()
        figures.add(self)
        return figures

    @property
    def first_change(self) -> tuple[ForcedTurn, int] | None:
        """The turn with the first token that has changed, and its index; None if none has."""
        return next(
            ((turn, at) for turn in self.turns for at, token in enumerate(turn.tokens) if token.has_changed), None
        )


@dataclass(frozen=True)
class SkippedAnswer:
    """A recording that cannot be compared, with the reason."""

    name: str
    folder: Path
    reason: str


Compared: TypeAlias = ComparedAnswer | SkippedAnswer


@dataclass
class Figures:
    """The figures of answers that were compared.

    The surprise is that of tokens that were their engine's first choice.  The shift is that of tokens with a recorded
    log probability.  ``left_out`` counts the tokens that do not count, and ``skipped`` the recordings, by reason.
    """

    answers: int = 0
    changed_answers: int = 0
    tokens: int = 0
    compared: int = 0
    changed: int = 0
    surprise: float = 0.0
    chosen: int = 0
    worst_surprise: float = 0.0
    shift: float = 0.0
    shifted: int = 0
    worst_shift: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """The answers of which it is not known if their tokens mean the same in the new model, by reason."""
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    """The answers that the engine wrote on, by what that changed for a client."""

    @property
    def share(self) -> float | None:
        """The share of the tokens that count at which the choice has changed; None if none counts."""
        return self.changed / self.compared if self.compared else None

    @property
    def mean_surprise(self) -> float | None:
        """The mean surprise; None if no token was a first choice."""
        return self.surprise / self.chosen if self.chosen else None

    @property
    def mean_shift(self) -> float | None:
        """The mean shift; None if no log probabilities were recorded."""
        return self.shift / self.shifted if self.shifted else None

    @property
    def calls_share(self) -> float:
        """The share of the answers in which a call differs."""
        return self.verdicts["call differs"] / self.answers if self.answers else 0.0

    def add(self, compared: Compared) -> None:
        """Count an answer."""
        if isinstance(compared, SkippedAnswer):
            self.skipped[compared.reason] += 1
            return
        self.answers += 1
        if compared.run_on:
            self.verdicts[compared.run_on.verdict] += 1
        if compared.note:
            self.notes[compared.note] += 1
        self.changed_answers += compared.first_change is not None
        for turn in compared.turns:
            for token in turn.tokens:
                self._count(token, was_chosen=turn.was_chosen)
            if turn.left_out:
                self.left_out[turn.left_out] += len(turn.turn.tokens)
            elif unknown := sum(token.has_changed is None for token in turn.tokens):
                self.left_out["without a known choice"] += unknown

    def _count(self, token: ForcedToken, *, was_chosen: bool) -> None:
        self.tokens += 1
        self.compared += token.has_changed is not None
        self.changed += token.has_changed is True
        if was_chosen and token.has_changed is not None:
            self.chosen += 1
            self.surprise += token.surprise
            self.worst_surprise = max(self.worst_surprise, token.surprise)
        if token.shift is not None:
            self.shifted += 1
            self.shift += token.shift
            self.worst_shift = max(self.worst_shift, abs(token.shift))


@dataclass(frozen=True)
class Comparison:
    """The comparison with an engine, whose model has this vocabulary.

    Choices whose log probabilities differ by at most ``tie`` count as the same.  With ``parse``, the stage of the
    model, the engine writes each answer on from its first change.
    """

    engine: Engine
    vocabulary: Vocabulary
    tie: float = 0.0
    at_once: int = AT_ONCE
    parse: ParseStage | None = None
    _numbers: count[int] = field(default_factory=count)

    @cached_property
    def _run(self) -> Run:
        return checked(self.engine)

    async def compared(self, recordings: Mapping[str, Path]) -> AsyncGenerator[Compared, None]:
        """Yield each recording in order, after its tokens have passed through the engine.

        Raises the error of the engine if it fails.
        """
        grammars = Grammars(self.vocabulary)

        async def compare(recording: tuple[str, Path]) -> Compared:
            return await self._compare(*recording, grammars)

        async with aclosing(in_order(recordings.items(), compare, self.at_once)) as answers:
            async for answer in answers:
                yield answer

    async def _compare(self, name: str, folder: Path, grammars: Grammars) -> Compared:
        try:
            answer = await asyncio.to_thread(read_answer, name, folder)
        except UnreadableRecording as error:
            return SkippedAnswer(name, folder, str(error).removeprefix(f"{folder}: "))
        if difference := await asyncio.to_thread(self.vocabulary.difference, answer):
            return SkippedAnswer(name, folder, f"the tokens mean something else in the new model: {difference}")
        turns = tuple([await self._forced(turn, grammars) for turn in answer.turns if turn.tokens])
        if not any(turn.tokens for turn in turns):
            return SkippedAnswer(name, folder, turns[0].left_out)
        note = self.vocabulary.note(answer.header)
        return await self._run_on(ComparedAnswer(name, folder=folder, header=answer.header, turns=turns, note=note))

    async def _run_on(self, answer: ComparedAnswer) -> ComparedAnswer:
        if self.parse is None or answer.first_change is None:
            return answer
        turn, at = answer.first_change
        return replace(
            answer, run_on=await run_on(self.engine, self.parse, turn.turn, at, self._request_id(), self._run)
        )

    def _request_id(self) -> str:
        return f"resp_compare{next(self._numbers)}"

    async def _forced(self, turn: Turn, grammars: Grammars) -> ForcedTurn:
        tokens = len(turn.prompt.token_ids) + len(turn.tokens)
        if tokens >= self.engine.context_length:
            length = self.engine.context_length
            return ForcedTurn(turn, (), f"too long: {tokens} tokens, where the engine's context holds {length}")
        try:
            reading = await forced(
                self.engine, turn.prompt, turn.tokens, self._request_id(), top=alternatives(turn), run=self._run
            )
        except InvalidRequest as error:
            return ForcedTurn(turn, (), f"refused by the engine: {error.message}")
        scores, grammar, allowed = reading.scores, turn.prompt.grammar, None
        if grammar is not None:
            end = next(iter(turn.prompt.stop_token_ids), 0)
            others = candidates(turn, scores)
            allowed = await asyncio.to_thread(grammars.allowed, grammar, turn.tokens, others, end)
        return judged(turn, scores, allowed, self.tie)

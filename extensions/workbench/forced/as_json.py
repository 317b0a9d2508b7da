"""A comparison as JSON lines: one for each answer, and one with the figures of all."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from penstock.extensions.workbench.forced.comparison import Compared, Figures, SkippedAnswer
from penstock.extensions.workbench.forced.run_on import RunOn
from penstock.extensions.workbench.forced.scores import ForcedToken, ForcedTurn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary

Json = dict[str, Any]


def answer_line(compared: Compared, vocabulary: Vocabulary) -> str:
    """Return the line of an answer, with all its tokens."""
    if isinstance(compared, SkippedAnswer):
        return _encoded({"type": "skipped", "answer": compared.name, "reason": compared.reason})
    turns = [_turn(turn, vocabulary) for turn in compared.turns]
    ran = {"run_on": run_on_of(compared.run_on, vocabulary)} if compared.run_on else {}
    return _encoded({"type": "answer", "answer": compared.name, **figures_of(compared.figures), **ran, "turns": turns})


def summary_line(figures: Figures, exceeded: list[str]) -> str:
    """Return the last line; ``exceeded`` names the limits that do not hold."""
    return _encoded({"type": "summary", **figures_of(figures), "exceeded": exceeded})


def run_on_of(run: RunOn, vocabulary: Vocabulary) -> Json:
    """Return what the new engine would have written, with the items of both."""
    return {
        "verdict": run.verdict,
        "difference": run.difference,
        "turn": run.turn,
        "since": run.since,
        "text": vocabulary.text(run.tokens[run.since :]),
        "recorded": [asdict(item) for item in run.recorded],
        "new": [asdict(item) for item in run.new],
    }


def figures_of(figures: Figures) -> Json:
    """Return figures by name."""
    return {
        "answers": figures.answers,
        "changed_answers": figures.changed_answers,
        "tokens": figures.tokens,
        "compared": figures.compared,
        "changed": figures.changed,
        "share": figures.share,
        "mean_surprise": figures.mean_surprise,
        "worst_surprise": figures.worst_surprise if figures.chosen else None,
        "mean_shift": figures.mean_shift,
        "worst_shift": figures.worst_shift if figures.shifted else None,
        "left_out": dict(figures.left_out),
        "skipped": dict(figures.skipped),
        "vocabulary_not_checked": dict(figures.notes),
        "run_on": dict(figures.verdicts),
    }


def _turn(turn: ForcedTurn, vocabulary: Vocabulary) -> Json:
    tokens = [_token(token, vocabulary) for token in turn.tokens]
    return {"turn": turn.turn.number, "left_out": turn.left_out or None, "tokens": tokens}


def _token(token: ForcedToken, vocabulary: Vocabulary) -> Json:
    return {
        "id": token.id,
        "text": vocabulary.text([token.id]),
        "logprob": token.logprob,
        "rank": token.rank,
        "recorded_logprob": token.recorded,
        "surprise": token.surprise,
        "changed": token.has_changed,
        "first": {"id": token.first[0], "text": vocabulary.text([token.first[0]]), "logprob": token.first[1]},
    }


def _encoded(line: Json) -> str:
    return msgspec.json.encode(line).decode()

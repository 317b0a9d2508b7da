"""A comparison as an HTML page: the recorded tokens, coloured by how much they surprise the new engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.api.http.web_page import WebPage
from penstock.extensions.workbench.forced.as_json import figures_of, run_on_of
from penstock.extensions.workbench.forced.comparison import Compared, Figures, SkippedAnswer
from penstock.extensions.workbench.forced.scores import ForcedToken, ForcedTurn
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.extensions.workbench.page.page import DATA, SELECTION, without_folders
from penstock.extensions.workbench.page.tokens import Texts

Json = dict[str, Any]

LAST = 300
"""The tokens of a prompt that are shown: its end, from which the model continues."""

DIGITS = 4
"""Digits of a log probability after the point."""


def layout_of(answers: Sequence[Compared], figures: Figures, vocabulary: Vocabulary, title: str) -> Json:
    """Return all data of the page."""
    texts = Texts()
    return {
        "name": without_folders(title),
        "figures": _without_folders(figures_of(figures)),
        "answers": [_answer(answer, vocabulary, texts) for answer in answers],
        "texts": texts.entries,
    }


def _without_folders(figures: Json) -> Json:
    """Return figures whose reasons have no absolute paths: the page is sent to others."""
    shown = dict(figures)
    for name, counts in figures.items():
        if isinstance(counts, dict):
            shown[name] = Counter[str]()
            for reason, count in counts.items():
                shown[name][without_folders(reason)] += count
    return shown


def _answer(answer: Compared, vocabulary: Vocabulary, texts: Texts) -> Json:
    if isinstance(answer, SkippedAnswer):
        return {"name": answer.name, "skipped": without_folders(answer.reason)}
    turns = [_turn(turn, vocabulary, texts) for turn in answer.turns]
    run_on = run_on_of(answer.run_on, vocabulary) if answer.run_on else None
    return {"name": answer.name, "figures": figures_of(answer.figures), "run_on": run_on, "turns": turns}


def _turn(turn: ForcedTurn, vocabulary: Vocabulary, texts: Texts) -> Json:
    prompt, tokens = turn.turn.prompt.token_ids, turn.turn.tokens
    return {
        "number": turn.turn.number,
        "prompt": len(prompt),
        "end": _add(prompt[-LAST:], vocabulary, texts),
        "left_out": turn.left_out,
        "texts": _add(tokens, vocabulary, texts),
        "tokens": [_token(token, vocabulary, texts) for token in turn.tokens],
    }


def _add(tokens: Sequence[int], vocabulary: Vocabulary, texts: Texts) -> list[int]:
    return texts.add(tokens, [(vocabulary.spell(token), vocabulary.is_mark(token)) for token in tokens])


def _token(token: ForcedToken, vocabulary: Vocabulary, texts: Texts) -> list[Any]:
    """Return log probability, rank, recorded log probability, 1 for a change and 0 for none, and the choices."""
    top = [[*_add([other], vocabulary, texts), round(value, DIGITS)] for other, value in token.top[:5]]
    recorded = None if token.recorded is None else round(token.recorded, DIGITS)
    changed = None if token.has_changed is None else int(token.has_changed)
    return [round(token.logprob, DIGITS), token.rank, recorded, changed, top]


_PACKAGE = "penstock.extensions.workbench.forced"

PAGE = WebPage(
    body=(_PACKAGE, "page.html"),
    styles=(SELECTION, (_PACKAGE, "page.css")),
    scripts=(DATA, (_PACKAGE, "page.js")),
)


def page_of(layout: Json) -> str:
    """Return the HTML of the page."""
    return PAGE.html_of(layout, layout["name"])

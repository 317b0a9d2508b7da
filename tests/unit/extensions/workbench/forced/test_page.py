"""The page of a comparison as text, without a browser."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.forced.comparison import Compared, Comparison, Figures, SkippedAnswer
from penstock.extensions.workbench.forced.page import layout_of, page_of
from penstock.extensions.workbench.forced.recorded import recordings_in
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from tests.support.processes import RunCommand
from tests.support.table_engine import ENGINES, TableEngine, recorded_turn, write_turns

HARMONY = Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "harmony", None)
TOKENS = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=8)


def page_with(answers: list[Compared]) -> str:
    figures = Figures()
    for answer in answers:
        figures.add(answer)
    return page_of(layout_of(answers, figures, HARMONY, "recorded → new"))


def data_of(page: str) -> Any:
    found = re.search(r'<script id="layout" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return msgspec.json.decode(found[1])


@given(TOKENS, TOKENS, st.floats(0, 2))
async def test_page_has_each_token_with_its_scores(
    tmp_path_factory: Any, prompt: list[int], tokens: list[int], noise: float
) -> None:
    folder = tmp_path_factory.mktemp("r") / "answer"
    write_turns(folder, recorded_turn(prompt, tokens), recorded_turn(tokens, prompt))
    (answer,) = [each async for each in Comparison(TableEngine(0, noise), HARMONY).compared(recordings_in([folder]))]
    assert not isinstance(answer, SkippedAnswer)
    data = data_of(page_with([answer]))
    for turn, forced in zip(data["answers"][0]["turns"], answer.turns, strict=True):
        assert [data["texts"][text][0] for text in turn["texts"]] == list(forced.turn.tokens)
        for (logprob, rank, recorded, changed, top), token in zip(turn["tokens"], forced.tokens, strict=True):
            assert (rank, recorded, changed) == (token.rank, None, int(bool(token.has_changed)))
            assert abs(top[0][1] - logprob - token.surprise) < 0.001
            assert data["texts"][top[0][0]][0] == token.first[0]


def test_recorded_text_stays_text() -> None:
    hostile = "</script><script>alert(1)</script>{{layout}}"
    page = page_with([SkippedAnswer(hostile, Path(), hostile)])
    assert page.count("<script") == 2
    assert data_of(page)["answers"] == [{"name": hostile, "skipped": hostile}]


def test_page_has_no_folders_of_the_machine() -> None:
    figures, answers = Figures(), [SkippedAnswer(name, Path(), f"no /srv/{name}/tokens.jsonl") for name in "ab"]
    for answer in answers:
        figures.add(answer)
    page = page_of(layout_of(answers, figures, HARMONY, "recorded → /srv/plugins/engines.py:noisy"))
    assert "/srv" not in page
    assert data_of(page)["figures"]["skipped"] == {"no tokens.jsonl": 2}
    assert data_of(page)["name"] == "recorded → engines.py:noisy"


def test_command_writes_the_page_for_its_owner(tmp_path: Path, penstock: RunCommand) -> None:
    (tmp_path / "engines.py").write_text(ENGINES)
    folder, page = write_turns(tmp_path / "answer", recorded_turn([1], [1000])), tmp_path / "page.html"
    ended = penstock("compare", folder, "--engine", f"{tmp_path}/engines.py:noisy", "--html", page)
    assert (ended.status, ended.err) == (0, "")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert [answer["name"] for answer in data_of(page.read_text("utf-8"))["answers"]] == ["answer"]
    ended = penstock("compare", folder, "--engine", f"{tmp_path}/engines.py:noisy", "--html", tmp_path / "no" / "page")
    assert (ended.status, "the page cannot be written: No such file or directory" in ended.err) == (2, True)

"""The forms of rollouts: each trainer gets the tokens of a path by its own names, and the mask tells who wrote them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.rollouts.forms import FORMS, NO_LABEL, TRIED, rows
from penstock.extensions.rollouts.paths import Branch, Cut, Reward, TokenPath
from penstock.extensions.rollouts.writing import line
from tests.support.paths import ROOT
from tests.support.token_paths import Turn, token_path

TWO_TURNS: tuple[Turn, ...] = (([1, 2], {3: -0.5, 4: -1.5}), ([5], {6: -0.25}))

TOKENS = st.lists(st.integers(0, 200_000), max_size=4)
TURNS = st.lists(st.tuples(TOKENS, TOKENS.map(lambda ids: dict.fromkeys(ids, -0.5))), min_size=1, max_size=5)
PATHS = st.builds(lambda turns, branch_at: token_path(*turns, branch_at=branch_at), TURNS, st.integers(0, 2))


def shown(form: str, *paths: TokenPath) -> list[dict[str, Any]]:
    """The rows as a reader of JSON has them."""
    return [json.loads(line(row)) for row in rows(form, paths)]


def test_penstock_has_all_that_is_known() -> None:
    cut = Cut("resp_0", 1, "edit", at=4, was=7, read=8)
    path = token_path(*TWO_TURNS, cut=cut, branch=Branch(0, 2), rewards=[Reward(1.5), Reward(2.0, name="style")])
    (row,) = shown("penstock", path)
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["mask"] == [0, 0, 1, 1, 0, 1]
    assert row["logprobs"] == [None, None, -0.5, -1.5, None, -0.25]
    assert [(turn["read_from"], turn["begin"], turn["end"]) for turn in row["turns"]] == [(0, 2, 4), (4, 5, 6)]
    assert row["cut"] == {"response": "resp_0", "turn": 1, "reason": "edit", "at": 4, "was": 7, "read": 8}
    assert row["branch"] == {"path": 0, "tokens": 2}
    assert (row["session"], row["key"], row["path"], row["model"], row["reward"]) == ("s", "k", 0, "tiny", 1.5)
    assert row["rewards"] == [{"reward": 1.5}, {"reward": 2.0, "name": "style"}]


def test_trl_gets_the_columns_of_a_rollout_function_and_of_sft() -> None:
    (row,) = shown("trl", token_path(*TWO_TURNS, rewards=[Reward(1.0)]))
    assert row == {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5, 6],
        "logprobs": [-0.5, -1.5, 0.0, -0.25],
        "env_mask": [1, 1, 0, 1],
        "reward": 1.0,
        "input_ids": [1, 2, 3, 4, 5, 6],
        "labels": [NO_LABEL, NO_LABEL, 3, 4, NO_LABEL, 6],
        "session": "s",
        "path": 0,
    }


def test_verl_gets_the_output_of_an_agent_loop() -> None:
    (row,) = shown("verl", token_path(*TWO_TURNS))
    assert row == {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5, 6],
        "response_mask": [1, 1, 0, 1],
        "response_logprobs": [-0.5, -1.5, 0.0, -0.25],
        "reward_score": None,
        "num_turns": 4,
        "metrics": {"num_preempted": -1},
        "extra_fields": {"session": "s", "path": 0},
    }


def test_skyrl_gets_the_paths_of_a_session_as_the_steps_of_a_trajectory() -> None:
    several = [token_path(*TWO_TURNS, number=number, rewards=[Reward(0.5)]) for number in range(3)]
    first, *_, last = shown("skyrl", *several)
    assert first == {
        "prompt_token_ids": [1, 2],
        "response_ids": [3, 4, 5, 6],
        "rewards": 0.5,
        "loss_masks": [1, 1, 0, 1],
        "stop_reasons": "stop",
        "rollout_logprobs": [-0.5, -1.5, 0.0, -0.25],
        "trajectory_ids": {"instance_id": "k:tiny:s", "repetition_id": 0},
        "is_last_step": False,
    }
    assert last == {**first, "is_last_step": True}


@pytest.mark.parametrize(("form", "name"), [("verl", "response_logprobs"), ("skyrl", "rollout_logprobs")])
def test_log_probabilities_are_all_known_or_none(form: str, name: str) -> None:
    unknown = token_path(([1], {2: -0.5}), ([3], [4]))
    assert shown(form, unknown)[0][name] is None
    assert shown("trl", unknown)[0]["logprobs"] == [-0.5, 0.0, None]


def test_page_names_the_releases_that_were_tried() -> None:
    page = (ROOT / "docs" / "ROLLOUTS.md").read_text()
    assert re.findall(r"^\| `(\w+)` \(([\d.]+)\)", page, re.MULTILINE) == [*TRIED.items()]


def test_turns_of_an_earlier_path_are_read_and_not_trained() -> None:
    (row,) = shown("trl", token_path(*TWO_TURNS, branch_at=1))
    assert (row["prompt_ids"], row["completion_ids"], row["env_mask"]) == ([1, 2, 3, 4, 5], [6], [1])


@pytest.mark.parametrize("form", TRIED)
def test_trainer_gets_no_path_that_the_model_wrote_nothing_of(form: str) -> None:
    empty, whole = token_path(([1, 2], [])), token_path(*TWO_TURNS)
    assert len(shown("penstock", empty)) == 1
    assert shown(form, whole, empty) == shown(form, whole)


def test_rewards_of_one_response_or_with_a_name_are_not_those_of_the_session() -> None:
    rewards = [Reward(1.0), Reward(0.5), Reward(4.0, name="style"), Reward(8.0, response="resp_1")]
    assert shown("verl", token_path(*TWO_TURNS, rewards=rewards))[0]["reward_score"] == 1.5
    assert shown("verl", token_path(*TWO_TURNS, rewards=rewards[2:]))[0]["reward_score"] is None


@given(st.lists(PATHS, min_size=1, max_size=3))
def test_each_form_has_each_token_that_was_written(paths: list[TokenPath]) -> None:
    """The tokens of a path, in order, and for the loss those of the mask alone."""
    written = [
        ([*path.token_ids], [token for token, own in zip(path.token_ids, path.mask, strict=True) if own])
        for path in paths
    ]
    names = {
        "trl": ("prompt_ids", "completion_ids", "env_mask"),
        "verl": ("prompt_ids", "response_ids", "response_mask"),
        "skyrl": ("prompt_token_ids", "response_ids", "loss_masks"),
    }
    assert names.keys() == TRIED.keys() == FORMS.keys() - {"penstock"}
    for form, (prompt, response, mask) in names.items():
        found = [
            (row[prompt] + row[response], [token for token, own in zip(row[response], row[mask], strict=True) if own])
            for row in shown(form, *paths)
        ]
        assert found == [each for each in written if each[1]]
        assert all(row[mask][0] == 1 for row in shown(form, *paths))

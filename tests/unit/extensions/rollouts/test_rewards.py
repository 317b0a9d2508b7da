"""Rewards: lines of one file that several writers append to, of which the last counts."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from penstock.extensions.rollouts.paths import PathTurn, Reward, TokenPath
from penstock.extensions.rollouts.rewards import (
    FILE,
    MOST_LINE,
    RewardLine,
    lines_of,
    rewarded,
    rewards_in,
    write_reward,
)

ODD = ("a/b", "..", "\0", "\n", '"', "é" * 2048, "\u2028", "x" * 4096)
"""Ids of sessions that a client may choose."""


def written(folder: Path, *lines: RewardLine) -> list[RewardLine]:
    return [write_reward(folder, line) for line in lines]


def read(folder: Path) -> list[RewardLine]:
    return [line for _, line in lines_of(folder)]


def of(folder: Path, session: str, key: str = "", *others: str) -> tuple[Reward, ...]:
    with rewards_in([folder]) as rewards:
        return rewards.of(session, key, {key, *others})


def test_what_is_written_is_read_in_its_order(tmp_path: Path) -> None:
    lines = written(tmp_path, *(RewardLine(session, number / 8, done=True) for number, session in enumerate(ODD)))
    assert read(tmp_path) == lines
    assert {session: of(tmp_path, session) for session in ODD} == {
        session: (Reward(number / 8),) for number, session in enumerate(ODD)
    }
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_folder_without_rewards_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    assert of(tmp_path, "s") == ()


def test_last_reward_of_a_name_and_a_response_counts(tmp_path: Path) -> None:
    written(tmp_path, *(RewardLine("s", reward) for reward in (1, 0.5)))
    written(tmp_path, *(RewardLine("s", reward, "style") for reward in (2, 0.25)))
    written(tmp_path, *(RewardLine("s", reward, "", "resp_1") for reward in (3, 0)))
    assert set(of(tmp_path, "s")) == {Reward(0.5), Reward(0.25, "style"), Reward(0, "", "resp_1")}


def test_last_reward_counts_in_whichever_folder_it_stands(tmp_path: Path) -> None:
    one, other = folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    for number, folder in enumerate((one, other, one)):
        write_reward(folder, RewardLine("s", number))
    for order in (folders, folders[::-1]):
        with rewards_in(order) as rewards:
            assert rewards.of("s", "", {""}) == (Reward(2),)


def test_reward_without_a_key_goes_to_the_only_key(tmp_path: Path) -> None:
    written(tmp_path, RewardLine("s", 1))
    assert of(tmp_path, "s", "alice") == (Reward(1),)


def test_reward_without_a_key_goes_to_none_of_several(tmp_path: Path) -> None:
    written(tmp_path, RewardLine("s", 1), RewardLine("s", 2, key="bob"), RewardLine("s", 3, response="resp_1"))
    with rewards_in([tmp_path]) as rewards:
        assert rewards.of("s", "alice", {"alice", "bob"}) == (Reward(3, response="resp_1"),)
        assert set(rewards.of("s", "bob", {"alice", "bob"})) == {Reward(2), Reward(3, response="resp_1")}
        assert rewards.ambiguous == {"s": ("alice", "bob")}


def test_later_reward_of_the_key_counts_before_one_without(tmp_path: Path) -> None:
    written(tmp_path, RewardLine("s", 1), RewardLine("s", 2, key="alice"))
    assert of(tmp_path, "s", "alice") == (Reward(2),)
    written(tmp_path, RewardLine("s", 3))
    assert of(tmp_path, "s", "alice") == (Reward(3),)
    assert of(tmp_path, "s", "bob") == (Reward(3),)


def test_path_gets_the_rewards_of_its_responses_and_of_the_session() -> None:
    def path(number: int, response: str) -> TokenPath:
        turn = PathTurn(response=response, number=1, read_from=0, begin=1, end=2, is_trained=True, at=0.0, model="tiny")
        return TokenPath(
            session="s",
            key="",
            number=number,
            token_ids=array("q", (1, 2)),
            mask=bytearray(b"\0\1"),
            logprobs=array("d", (0.0, -0.5)),
            turns=(turn,),
        )

    given = (Reward(1), Reward(2, "style"), Reward(3, response="resp_1"))
    first, second = rewarded((path(0, "resp_0"), path(1, "resp_1")), given)
    assert first.rewards == given[:2]
    assert second.rewards == given


@pytest.mark.parametrize("torn", [b'{"session":"s","reward":0.', b"{" * (MOST_LINE + 7), b"\xff\xfe"])
def test_line_that_was_cut_is_left_out(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (first,) = written(tmp_path, RewardLine("s", 1))
    with (tmp_path / FILE).open("ab") as file:
        file.write(torn)
    assert read(tmp_path) == [first]
    (second,) = written(tmp_path, RewardLine("s", 2))
    assert read(tmp_path) == [first, second]
    assert "that cannot be read" in caplog.text


def test_lines_are_read_on_from_where_the_last_one_ended(tmp_path: Path) -> None:
    written(tmp_path, RewardLine("s", 1), RewardLine("s", 2))
    (*_, (end, _)) = lines_of(tmp_path)
    assert end == (tmp_path / FILE).stat().st_size
    assert list(lines_of(tmp_path, end)) == []
    (later,) = written(tmp_path, RewardLine("s", 3))
    assert [line for _, line in lines_of(tmp_path, end)] == [later]


@pytest.mark.io
def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.extensions.rollouts.rewards import *\n"
        "for number in range(50): write_reward(Path(sys.argv[1]), RewardLine(sys.argv[2] * 4000, number))"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, tmp_path, name]) for name in "ab"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: write_reward(tmp_path, RewardLine("c" * 4000, number)), range(50)))
    assert [other.wait() for other in others] == [0, 0]
    lines = (tmp_path / FILE).read_bytes().splitlines()
    decoded = [msgspec.json.decode(line, type=RewardLine) for line in lines if line]
    assert len(decoded) == 150
    for name in "ab":
        assert [line.reward for line in decoded if line.session[0] == name] == list(range(50))


def test_write_that_fails_says_so_and_leaves_no_half_line_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        with pytest.raises(OSError, match="No space"):
            write_reward(tmp_path, RewardLine("s", 1))
    (line,) = written(tmp_path, RewardLine("s", 2))
    assert read(tmp_path) == [line]

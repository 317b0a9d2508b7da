"""The index of a folder that grows: it knows the same sessions as an export of the whole folder, step by step."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.rollouts import known as module
from penstock.extensions.rollouts.known import QUIET_SECONDS, KnownSession, KnownSessions
from penstock.extensions.rollouts.rewards import RewardLine, write_reward
from penstock.extensions.rollouts.sessions import Session, rollouts
from penstock.pipeline.recordings.response_folder import RESPONSE
from tests.support.paths import HARMONY

SILENCE = 60.0

PROMPT, TOKENS = "prompt.jsonl", "tokens.jsonl"
STEPS = PROMPT, TOKENS, RESPONSE
"""The files of a recording in the order in which they come."""


class Recordings:
    """A folder of recordings of one fixture, each of a session, a key and a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.count = 0

    def add(self, session: str = "", *, key: str = "", previous: str = "", is_whole: bool = True) -> str:
        """Record a response, the latest so far, and return its id."""
        self.count += 1
        response, at = f"resp_{self.count:032x}", f"2026-01-01T00:{self.count:02}:00.000000+00:00"
        folder = self.folder / response
        folder.mkdir()
        for name in (PROMPT, TOKENS):
            lines = [json.loads(line) for line in (HARMONY / "greeting" / name).read_text().splitlines()]
            lines[0]["recorded_at"] = at
            facts = lines[1].get("facts", {})
            if facts:
                facts["response"] |= {"id": response, "previous_response_id": previous or None}
                facts["origin"] = facts.get("origin", {}) | {"session": session, "key": key}
            kept = lines if is_whole else lines[:-1]
            (folder / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))
        if is_whole:
            (folder / RESPONSE).write_text("{}")
        return response

    def end(self, response: str) -> None:
        """Write the last lines of a recording that is not whole."""
        folder = self.folder / response
        for name in (PROMPT, TOKENS):
            last = (HARMONY / "greeting" / name).read_text().splitlines(keepends=True)[-1]
            with (folder / name).open("a") as file:
                file.write(last)
        (folder / RESPONSE).write_text("{}")


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    return Recordings(tmp_path / "recordings")


@pytest.fixture
def known(recordings: Recordings) -> Iterable[KnownSessions]:
    index = KnownSessions(recordings.folder, SILENCE)
    yield index
    index.close()


Grouped = dict[tuple[str, str, str], set[str]]


def responses(paths: Iterable[Any]) -> set[str]:
    return {turn.response for path in paths for turn in path.turns}


def whole(recordings: Recordings) -> Grouped:
    """Return the responses of each session, as an export has them."""
    found: Iterable[Session] = rollouts([recordings.folder])
    return {(each.id, each.key, each.model): responses(each.paths) for each in found if each.paths}


def indexed(index: KnownSessions) -> Grouped:
    index.refresh()
    sessions: list[KnownSession] = index.page("", 100) or []
    return {(each.session, each.key, each.model): responses(index.rows(each)) for each in sessions}


def test_index_has_the_sessions_of_an_export_after_each_step(recordings: Recordings, known: KnownSessions) -> None:
    first = recordings.add()
    for step in range(12):
        recordings.add(f"s{step % 3}", key="ab"[step % 2])
        recordings.add(previous=first)
        first = recordings.add(previous=first) if step % 4 else recordings.add()
        assert indexed(known) == whole(recordings)
    assert len(indexed(known)) > 6


def test_index_that_begins_late_has_the_same_sessions(
    recordings: Recordings, known: KnownSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 4)
    first = recordings.add("s")
    for step in range(50):
        first = recordings.add("", previous=first if step % 5 else "")
    assert indexed(known) == whole(recordings)
    assert len(indexed(known)) == 11


def test_response_is_known_when_it_has_ended(recordings: Recordings, known: KnownSessions) -> None:
    response = recordings.add("s", is_whole=False)
    assert indexed(known) == {}
    recordings.end(response)
    assert [*indexed(known).values()] == [{response}]


def test_response_waits_for_the_one_that_it_continues(recordings: Recordings, known: KnownSessions) -> None:
    first = recordings.add(is_whole=False)
    second = recordings.add(previous=first)
    apart = recordings.add()
    assert [*indexed(known).values()] == [{apart}]
    recordings.end(first)
    assert {frozenset(each) for each in indexed(known).values()} == {frozenset({first, second}), frozenset({apart})}


def age(recordings: Recordings, response: str, seconds: float) -> None:
    then = time.time() - seconds
    folder = recordings.folder / response
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def test_silent_recording_counts_as_over_and_may_go_on(recordings: Recordings, known: KnownSessions) -> None:
    response = recordings.add("s")
    late = recordings.add("s", is_whole=False)
    age(recordings, response, 2 * SILENCE)
    age(recordings, late, 2 * SILENCE)
    indexed(known)
    (due,) = known.due(0.0, 0.0, 9)
    before = known.digest(due)
    assert known.claim(due, before, 0.0)
    known.sent(before)
    assert known.due(0.0, 0.0, 9) == []
    recordings.end(late)
    indexed(known)
    (due,) = known.due(-9.0, 0.0, 9)
    assert known.digest(due) != before


@pytest.mark.parametrize("silence", [0.0, 2 * QUIET_SECONDS, 2 * SILENCE])
@pytest.mark.parametrize("steps", range(len(STEPS) + 1))
def test_recording_is_known_in_the_end_whenever_it_was_looked_at(
    recordings: Recordings, known: KnownSessions, steps: int, silence: float
) -> None:
    response = recordings.add("s")
    folder = recordings.folder / response
    later = {name: (folder / name).read_bytes() for name in STEPS[steps:]}
    for name in later:
        (folder / name).unlink()
    age(recordings, response, silence)
    known.refresh()
    for name, data in later.items():
        (folder / name).write_bytes(data)
    assert [*indexed(known).values()] == [{response}]


def test_recording_without_a_response_is_whole_by_its_ends_after_a_while(
    recordings: Recordings, known: KnownSessions
) -> None:
    response = recordings.add("s")
    (recordings.folder / response / RESPONSE).unlink()
    assert indexed(known) == {}
    age(recordings, response, 2 * QUIET_SECONDS)
    assert [*indexed(known).values()] == [{response}]


def test_session_is_due_by_a_reward_or_by_time(recordings: Recordings, known: KnownSessions) -> None:
    recordings.add("done", key="a")
    recordings.add("idle", key="a")
    write_reward(recordings.folder, RewardLine("done", 1.0, done=True))
    indexed(known)
    assert [each.session for each in known.due(3600.0, 0.0, 9)] == ["done"]
    assert known.due(3600.0, 3600.0, 9) == []
    assert {each.session for each in known.due(-9.0, 0.0, 9)} == {"done", "idle"}


def test_reward_without_a_key_ends_no_session_of_two_keys(recordings: Recordings, known: KnownSessions) -> None:
    for key in "ab":
        recordings.add("s", key=key)
    indexed(known)
    write_reward(recordings.folder, RewardLine("s", 1.0, done=True))
    indexed(known)
    assert known.due(3600.0, 0.0, 9) == []
    write_reward(recordings.folder, RewardLine("s", 1.0, key="b", done=True))
    indexed(known)
    assert [each.key for each in known.due(3600.0, 0.0, 9)] == ["b"]


def test_two_servers_share_an_index_and_export_a_session_once(recordings: Recordings, known: KnownSessions) -> None:
    other = KnownSessions(recordings.folder, SILENCE)
    for step in range(6):
        recordings.add(f"s{step}")
        assert indexed((known, other)[step % 2]) == whole(recordings)
    assert indexed(known) == indexed(other)
    found = known.due(-9.0, 0.0, 99)
    assert len(found) == 6
    for each in found:
        digest = known.digest(each)
        assert digest == other.digest(each)
        assert [index.claim(each, digest, 60.0) for index in (known, other)] == [True, False]
        known.sent(digest)
    assert other.due(-9.0, 0.0, 99) == []
    other.close()


def test_sessions_whose_recordings_are_gone_are_forgotten_at_the_next_start(recordings: Recordings) -> None:
    made = [recordings.add("kept"), recordings.add("kept"), recordings.add("gone")]
    index = KnownSessions(recordings.folder, SILENCE)
    assert len(indexed(index)) == 2
    index.close()
    for response in (made[0], made[2]):
        shutil.rmtree(recordings.folder / response)
    index = KnownSessions(recordings.folder, SILENCE)
    assert [*indexed(index).values()] == [{made[1]}]
    made.append(recordings.add("kept"))
    assert [*indexed(index).values()] == [{made[1], made[3]}]
    index.close()


def test_folder_that_has_moved_keeps_its_sessions(recordings: Recordings, tmp_path: Path) -> None:
    response = recordings.add("s")
    index = KnownSessions(recordings.folder, SILENCE)
    before = indexed(index)
    index.close()
    recordings.folder.rename(tmp_path / "moved")
    index = KnownSessions(tmp_path / "moved", SILENCE)
    assert indexed(index) == before
    assert [*before.values()] == [{response}]
    index.close()

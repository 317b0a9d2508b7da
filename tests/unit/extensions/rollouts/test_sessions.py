"""Sessions: each written token is trained once, and each path is exact or says where it is cut."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.rollouts.index import Skipped
from penstock.extensions.rollouts.paths import NO_LOGPROB, Branch, Cut, TokenPath
from penstock.extensions.rollouts.reading import RecordedTurn, read_turns, recordings_in
from penstock.extensions.rollouts.sessions import Session, rollouts
from penstock.pipeline.recordings.format import FORMAT, End, Header, line
from penstock.pipeline.recordings.response_folder import RESPONSE
from tests.support.examples import examples
from tests.support.paths import FIXTURES, HARMONY

Json = dict[str, Any]
Tokens = tuple[int, ...]

BEGAN = datetime(2026, 11, 30, tzinfo=UTC).timestamp()


@dataclass
class Call:
    """A turn of the model, as it is recorded."""

    prompt: Tokens
    output: Tokens
    key: str = "alice"
    model: str = "tiny"
    session: str = ""
    conversation: str = ""
    previous: str = ""
    items: Sequence[Json] = ({"type": "message", "id": "msg_0", "status": "completed", "role": "user", "content": []},)
    options: Mapping[str, Any] = field(default_factory=dict)
    has_logprobs: bool = True

    def facts(self, name: str) -> Json:
        conversation = {"conversation": {"id": self.conversation}} if self.conversation else {}
        return {
            "response": {"id": name, "previous_response_id": self.previous or None, **conversation},
            "input": self.items,
            "sampling": {"temperature": 1.0, "top_p": 1.0},
            "date": "",
            "origin": {"key": self.key, "session": self.session},
            **self.options,
        }


def record(folder: Path, name: str, at: float, *turns: Call, is_whole: bool = True) -> Path:
    """Write the tokens of a response; without an end, its last turn has none either."""
    header = Header(
        FORMAT,
        model=turns[0].model,
        encoding="chat",
        source="/models/tiny",
        recorded_at=datetime.fromtimestamp(BEGAN + at, UTC).isoformat(),
    )
    frames: list[Json] = []
    for turn in turns:
        frames.append(
            {
                "type": "GenerationStarted",
                "facts": turn.facts(name),
                "prompt_tokens": len(turn.prompt),
                "prompt": turn.prompt,
            }
        )
        for part in (turn.output[:1], turn.output[1:]):
            if part:
                known = {"logprobs": [{"logprob": -float(token)} for token in part]} if turn.has_logprobs else {}
                frames.append({"type": "TokenChunk", "token_ids": part, **known})
        frames.append({"type": "GenerationFinished", "reason": "stop", "cached_tokens": 0, "duration": 0.0})
    kept = frames if is_whole else frames[:-1]
    (folder / name).mkdir(parents=True)
    lines = [line(header), *(line(frame, 0.0) for frame in kept), *([line(End(len(frames)))] if is_whole else [])]
    (folder / name / "tokens.jsonl").write_bytes(b"".join(lines))
    return folder / name


def sessions_of(*folders: Path, session: str = "") -> list[Session]:
    return list(rollouts(folders, session=session))


def name_of(number: int) -> str:
    return f"resp_{number:032x}"


# Properties


@dataclass(frozen=True)
class Step:
    """A choice of a generated session: which turn goes on, and how."""

    of: int
    how: str
    read: Tokens
    wrote: Tokens
    key: str


_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)
_steps = st.lists(
    st.builds(
        Step,
        of=st.integers(0, 10),
        how=st.sampled_from(["extends", "extends", "drops", "begins", "repeats"]),
        read=_tokens,
        wrote=_tokens,
        key=st.sampled_from(["alice", "alice", "bob"]),
    ),
    min_size=1,
    max_size=12,
)
_links = st.sampled_from(["session", "conversation", "previous", "items", "none"])


def calls_of(steps: Sequence[Step], link: str) -> Iterator[Call]:
    """The turns of an agent that goes on, forks, leaves out tokens, begins anew, or asks the same again."""
    made: list[tuple[Call, int]] = []
    for number, step in enumerate(steps):
        own = [each for each in made if each[0].key == step.key]
        before, at = own[step.of % len(own)] if own else (None, 0)
        prompt, asked = step.read, before is not None and step.how != "begins"
        if before and step.how == "extends":
            prompt = (*before.prompt, *before.output, *step.read)
        elif before and step.how == "drops":
            prompt = (*before.prompt, *before.output[1:], 9, *step.read)
        elif before and step.how == "repeats":
            prompt, asked = before.prompt, len(before.items) > 1
        call_id = f"call_{at:032x}0000"
        result: Json = {
            "type": "function_call_output",
            "id": "",
            "call_id": call_id,
            "output": "",
            "status": "completed",
        }
        call = Call(
            prompt,
            step.wrote,
            key=step.key,
            session="one" if link == "session" else "",
            conversation="conv_one" if link == "conversation" else "",
            previous=name_of(at) if link == "previous" and asked else "",
            items=[*Call((), ()).items, *([result] if asked and link == "items" else [])],
        )
        made.append((call, number))
        yield call


def tokens_before(path: TokenPath, at: int) -> Tokens:
    return tuple(path.token_ids[:at])


def check(sessions: Sequence[Session], turns: Mapping[tuple[str, int], RecordedTurn]) -> None:
    """Check that the paths have all turns, each trained once, and that each is exact or cut where it must be."""
    trained: list[tuple[str, int]] = []
    for session in sessions:
        for number, path in enumerate(session.paths):
            assert path.number == number
            assert path.key == session.key
            assert len(path.token_ids) == len(path.mask) == len(path.logprobs)
            check_path(session, path, turns)
            trained += [(turn.response, turn.number) for turn in path.turns if turn.is_trained]
        assert sum(sum(path.mask) for path in session.paths) == sum(
            turn.end - turn.begin for path in session.paths for turn in path.turns if turn.is_trained
        )
    assert sorted(trained) == sorted(turns)


def check_path(session: Session, path: TokenPath, turns: Mapping[tuple[str, int], RecordedTurn]) -> None:
    before = 0
    for turn in path.turns:
        recorded = turns[turn.response, turn.number]
        assert turn.read_from == before
        assert tokens_before(path, turn.begin) == tuple(recorded.prompt)
        assert tokens_before(path, turn.end) == (*recorded.prompt, *recorded.output)
        assert set(path.mask[turn.read_from : turn.begin]) <= {0}
        assert set(path.mask[turn.begin : turn.end]) == {int(turn.is_trained)}
        written = path.logprobs[turn.begin : turn.end]
        expected = recorded.logprobs if turn.is_trained else [NO_LOGPROB] * len(written)
        assert [_known(value) for value in written] == [_known(value) for value in expected]
        before = turn.end
    assert before == len(path.token_ids)
    if path.branch:
        other = session.paths[path.branch.path]
        assert tokens_before(path, path.branch.tokens) == tokens_before(other, path.branch.tokens)
        assert any(turn.end == path.branch.tokens for turn in path.turns)
    if path.cut:
        first = next(turn for turn in path.turns if turn.is_trained)
        was, now = turns[path.cut.response, path.cut.turn], turns[first.response, first.number]
        check_cut(path.cut, (*was.prompt, *was.output), tuple(now.prompt))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def check_cut(cut: Cut, was: Tokens, now: Tokens) -> None:
    at = cut.at
    assert was[:at] == now[:at]
    assert (was[at : at + 1], now[at : at + 1]) == tuple(
        () if each is None else (each,) for each in (cut.was, cut.read)
    )
    assert cut.was != cut.read


@pytest.mark.slow
@given(_steps, _links, st.randoms(use_true_random=False))
@examples(150)
def test_each_token_is_trained_once_and_each_path_is_exact(steps: list[Step], link: str, chance: random.Random) -> None:
    with TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in "ab"]
        for number, call in enumerate(calls_of(steps, link)):
            record(folders[chance.randrange(2)], name_of(number), number, call)
        folders = [folder for folder in folders if folder.exists()]
        turns = {(t.response, t.number): t for folder in recordings_in(folders) for t in read_turns(folder)}
        sessions = sessions_of(*folders)
        check(sessions, turns)
        owner = {name_of(number): step.key for number, step in enumerate(steps)}
        for session in sessions:
            assert {owner[turn.response] for path in session.paths for turn in path.turns} == {session.key}
        parents_are_longest(sessions, turns)
        assert repr(sessions_of(*reversed(folders))) == repr(sessions)  # NaN is not equal to itself


def parents_are_longest(sessions: Sequence[Session], turns: Mapping[tuple[str, int], RecordedTurn]) -> None:
    """Check that each turn extends the turn of its session with the longest prompt and output that it begins with."""
    for session in sessions:
        own = [(path, turn) for path in session.paths for turn in path.turns if turn.is_trained]
        for path, turn in own:
            prompt = tuple(turns[turn.response, turn.number].prompt)
            earlier = [
                (*turns[each.response, each.number].prompt, *turns[each.response, each.number].output)
                for _, each in own
                if each.at < turn.at
            ]
            longest = max((len(each) for each in earlier if prompt[: len(each)] == each), default=0)
            assert turn.read_from == longest, (path.number, turn)


EMPTY = HARMONY / "empty_output"
FOLDERS = sorted({file.parent for file in FIXTURES.rglob("tokens.jsonl")} - {EMPTY})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_fixture_is_exact(folder: Path) -> None:
    recorded = read_turns(folder)
    sessions = sessions_of(folder)
    check(sessions, {(turn.response, turn.number): turn for turn in recorded})
    response = msgspec.json.decode((folder / RESPONSE).read_bytes())
    if response["usage"]:
        paths = [path for session in sessions for path in session.paths]
        assert sum(sum(path.mask) for path in paths) == response["usage"]["output_tokens"]


def test_recording_of_an_empty_output_is_skipped() -> None:
    assert sessions_of(EMPTY) == [
        Session("", "", "", paths=(), skipped=(Skipped(str(EMPTY), "the engine gave no tokens"),))
    ]


# Single rules


def test_keys_with_the_same_session_and_texts_are_apart(tmp_path: Path) -> None:
    for number, key in enumerate(("alice", "bob", "alice", "bob")):
        prompt = (1, 2) if number < 2 else (1, 2, 3, 4)
        record(tmp_path, name_of(number), number, Call(prompt, (3,), key=key, session="same"))
    sessions = sessions_of(tmp_path)
    assert [(each.id, each.key, [len(path.turns) for path in each.paths]) for each in sessions] == [
        ("same", "alice", [2]),
        ("same", "bob", [2]),
    ]


def test_models_of_a_session_are_apart(tmp_path: Path) -> None:
    for number, model in enumerate(("large", "small")):
        record(tmp_path, name_of(number), number, Call((1,), (2,), model=model, session="same"))
    assert [each.model for each in sessions_of(tmp_path)] == ["large", "small"]


def test_fork_shares_a_beginning_that_is_trained_once(tmp_path: Path) -> None:
    record(tmp_path, name_of(0), 0, Call((1,), (2, 3)))
    record(tmp_path, name_of(1), 1, Call((1, 2, 3, 4), (5,)))
    record(tmp_path, name_of(2), 2, Call((1, 2, 3, 6), (7,)))
    (session,) = sessions_of(tmp_path)
    one, other = session.paths
    assert (list(one.mask), one.branch) == ([0, 1, 1, 0, 1], None)
    assert (list(other.mask), other.branch, other.cut) == ([0, 0, 0, 0, 1], Branch(0, 3), None)


def test_choices_of_one_prompt_are_sessions_of_their_own(tmp_path: Path) -> None:
    """Without an id, two samples of a task are two sessions, even if both go on."""
    for sample in range(2):
        record(tmp_path, name_of(sample), sample, Call((1, 2), (3 + sample,)))
    for sample in range(2):
        record(tmp_path, name_of(2 + sample), 2 + sample, Call((1, 2, 3 + sample, 9), (8,)))
    assert [[list(path.token_ids) for path in each.paths] for each in sessions_of(tmp_path)] == [
        [[1, 2, 3, 9, 8]],
        [[1, 2, 4, 9, 8]],
    ]


def test_equal_samples_are_extended_once_each(tmp_path: Path) -> None:
    for number, prompt in enumerate([(1,), (1,), (1, 2, 3), (1, 2, 4)]):
        record(tmp_path, name_of(number), number, Call(prompt, (2,), session="same"))
    (session,) = sessions_of(tmp_path)
    assert [(list(path.token_ids), path.branch) for path in session.paths] == [
        ([1, 2, 4, 2], None),
        ([1, 2, 3, 2], None),
    ]


def test_killed_server_leaves_whole_turns(tmp_path: Path) -> None:
    record(tmp_path, name_of(0), 0, Call((1,), (2,)), Call((1, 2, 3), (4, 5)), is_whole=False)
    record(tmp_path, name_of(1), 1, Call((7,), (8,)), is_whole=False)
    whole, homeless = sessions_of(tmp_path)
    assert [list(path.token_ids) for path in whole.paths] == [[1, 2]]
    assert homeless.skipped == (Skipped(str(tmp_path / name_of(1)), "the engine gave no tokens"),)


def test_turn_without_an_end_is_kept_if_the_file_has_one(tmp_path: Path) -> None:
    folder = record(tmp_path, name_of(0), 0, Call((1,), (2,)))
    lines = (folder / "tokens.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "tokens.jsonl").write_bytes(b"".join([*lines[:-2], line(End(2, abandoned=True, cause="client_left"))]))
    (session,) = sessions_of(tmp_path)
    assert [(turn.stop, turn.end) for turn in session.paths[0].turns] == [("", 2)]


def test_prepared_response_has_no_turn(tmp_path: Path) -> None:
    record(tmp_path, name_of(0), 0, Call((1,), (2,), options={"purpose": {"generates": False}}, session="one"))
    record(tmp_path, name_of(1), 1, Call((1, 3), (4,), session="one"))
    (session,) = sessions_of(tmp_path)
    assert [list(path.token_ids) for path in session.paths] == [[1, 3, 4]]
    assert session.skipped == (Skipped(str(tmp_path / name_of(0)), "the engine gave no tokens"),)


def test_copy_of_a_recording_counts_once(tmp_path: Path) -> None:
    for root in "ab":
        record(tmp_path / root, name_of(0), 0, Call((1,), (2,)))
    session, homeless = sessions_of(tmp_path / "b", tmp_path / "a")
    assert [list(path.mask) for path in session.paths] == [[0, 1]]
    assert homeless.skipped == (
        Skipped(str(tmp_path / "b" / name_of(0)), "there is another recording of the same response"),
    )
    assert len(sessions_of(tmp_path, tmp_path / "a")[0].paths) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"masked": True}, "no texts were recorded (--no-record-texts)"),
        ({"answered_from": "/recordings"}, "answered from a recording"),
    ],
)
def test_recording_without_exact_tokens_is_skipped(tmp_path: Path, change: Json, reason: str) -> None:
    folder = record(tmp_path, name_of(0), 0, Call((1,), (2,)))
    first, _, rest = (folder / "tokens.jsonl").read_bytes().partition(b"\n")
    header = msgspec.structs.replace(msgspec.json.decode(first, type=Header), **change)
    (folder / "tokens.jsonl").write_bytes(line(header) + rest)
    (homeless,) = sessions_of(tmp_path)
    assert homeless.skipped == (Skipped(str(folder), reason),)


def test_broken_recording_names_its_line_and_leaves_the_others(tmp_path: Path) -> None:
    folder = record(tmp_path, name_of(0), 0, Call((1,), (2,), session="one"))
    record(tmp_path, name_of(1), 1, Call((1, 2, 3), (4,), session="one"))
    data = (folder / "tokens.jsonl").read_bytes()
    (folder / "tokens.jsonl").write_bytes(data.replace(b'"token_ids"', b'"tokens"'))
    (session,) = sessions_of(tmp_path)
    assert [list(path.token_ids) for path in session.paths] == [[1, 2, 3, 4]]
    (skipped,) = session.skipped
    assert f"{folder}/tokens.jsonl:3: " in skipped.reason


def test_only_a_session_is_read(tmp_path: Path) -> None:
    for number, session in enumerate(("one", "two", "one")):
        record(tmp_path, name_of(number), number, Call((number,), (9,), session=session))
    assert [each.id for each in sessions_of(tmp_path)] == ["one", "two"]
    (one,) = sessions_of(tmp_path, session="one")
    assert len(one.paths) == 2


def test_title_of_a_session_is_no_cut(tmp_path: Path) -> None:
    record(tmp_path, name_of(0), 0, Call((1, 2), (3,), session="one"))
    record(tmp_path, name_of(1), 1, Call((1, 5), (6,), session="one"))
    (session,) = sessions_of(tmp_path)
    assert [path.cut for path in session.paths] == [None, None]


@pytest.mark.slow
def test_long_session_is_linked_by_its_tokens(tmp_path: Path) -> None:
    """Longer than the first filter of beginnings, so that it grows."""
    tokens, count = tuple(itertools.islice(itertools.cycle(range(1, 100)), 50)), 1100
    for number in range(count):
        record(tmp_path, name_of(number), number, Call(tokens, (number + 1,), has_logprobs=False))
        tokens = (*tokens, number + 1)
    (session,) = sessions_of(tmp_path)
    assert [len(path.turns) for path in session.paths] == [count]
    assert all(math.isnan(value) for value in session.paths[0].logprobs)


def _of_older_format(data: bytes, version: int) -> bytes:
    """Return a file with its facts in an older layout."""
    header, *frames = [msgspec.json.decode(each) for each in data.splitlines()]
    for frame in frames:
        facts = frame.get("facts", {})
        if version == 1 and facts:
            facts = frame.pop("facts")
            frame.update((name, facts[name]) for name in ("response", "input", "origin"))
        elif purpose := facts.pop("purpose", {}):
            facts.update(purpose)
    return b"".join(line(each) for each in (header | {"format": version}, *frames))


@pytest.mark.parametrize("version", [1, 2])
def test_recordings_of_older_formats_are_read(tmp_path: Path, version: int) -> None:
    turns = Call((1,), (2,), session="one"), Call((1, 2, 3), (4,), options={"purpose": {"summarizes": True}})
    folder = record(tmp_path, name_of(0), 0, *turns)
    (before,) = sessions_of(tmp_path)
    path = folder / "tokens.jsonl"
    path.write_bytes(_of_older_format(path.read_bytes(), version))
    (after,) = sessions_of(tmp_path)
    assert (after.id, after.key, after.skipped) == ("one", "alice", ())
    assert [path.token_ids for path in after.paths] == [path.token_ids for path in before.paths]
    assert [turn.summarizes for turn in read_turns(folder)] == [False, version == 2]


@given(st.integers(0, 2_000))
@examples(60)
def test_file_that_ends_anywhere_has_its_whole_turns(size: int) -> None:
    """A server that was killed leaves a file that ends within a line."""
    with TemporaryDirectory() as temporary:
        turns = Call((1,), (2,)), Call((1, 2, 3), (4, 5)), Call((1, 2, 3, 4, 5), (6,))
        path = record(Path(temporary), name_of(0), 0, *turns) / "tokens.jsonl"
        data = path.read_bytes()
        path.write_bytes(data[:size])
        ends = [
            at for at in range(len(data)) if data[:at].endswith(b"\n") and b"GenerationFinished" in _last(data[:at])
        ]
        whole = sum(end <= size for end in ends)
        (session,) = sessions_of(Path(temporary))
        written = [turn.number for path in session.paths for turn in path.turns]
        assert written == list(range(1, whole + 1))
        assert bool(session.skipped) == (whole == 0)


def _last(data: bytes) -> bytes:
    return data.splitlines()[-1]

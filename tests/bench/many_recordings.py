"""Recordings of any number of turns, as agents make them: each request of a session has all that was said before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.support.paths import HARMONY

TURNS = 25
"""Turns of a session."""

BEGUN, READ, WROTE = 500, 60, 40
"""Tokens of the first prompt, those that a turn reads beside what was there, and those that it writes."""

HIGHEST = 199_997
"""The highest token that is no markup."""

BEGAN = 1_800_000_000
"""The time of the first turn, in seconds since 1970; the others follow, one a second."""


def write_recordings(folder: Path, turns: int) -> Iterator[list[int]]:
    """Write recordings of turns, and yield all tokens of each session when it has ended.

    Of two sessions, one has an id of the client's, and the other is a chain of responses.
    """
    for first in range(0, turns, TURNS):
        yield _write_session(folder, range(first, min(first + TURNS, turns)))


def _write_session(folder: Path, numbers: range) -> list[int]:
    """Write the recordings of turns with these numbers, which are one session, and return its tokens."""
    header, started = (
        json.loads(line) for line in (HARMONY / "logprobs" / "tokens.jsonl").read_text().splitlines()[:2]
    )
    random, facts, previous = Random(numbers[0]), started["facts"], None
    session = f"session-{numbers[0]}" if numbers[0] // TURNS % 2 else ""
    facts["origin"] = {"opening": f"opening-{numbers[0]}", "session": session}
    tokens = _tokens(random, BEGUN)
    for number in numbers:
        response = f"resp_{number:032x}"
        facts["response"] |= {"id": response, "created_at": BEGAN + number, "previous_response_id": previous}
        tokens += _tokens(random, READ)
        wrote = _tokens(random, WROTE)
        place = folder / response
        place.mkdir(parents=True)
        _write(place / "prompt.jsonl", header, {"at": 0.01, "type": "Prompt", "facts": facts, "token_ids": tokens})
        begun = {**started, "at": 0.02, "facts": facts, "prompt_tokens": len(tokens)}
        finished = {"at": 1.0, "type": "GenerationFinished", "reason": "stop", "cached_tokens": 0, "duration": 1.0}
        chunks = [_chunk(at, token, -random.random()) for at, token in enumerate(wrote)]
        _write(place / "tokens.jsonl", header, begun, *chunks, finished)
        tokens += wrote
        previous = response
    return tokens


def _chunk(at: int, token: int, logprob: float) -> Any:
    logprobs = [{"logprob": logprob, "top": []}]
    return {"at": 0.02 + at / 50, "type": "TokenChunk", "token_ids": [token], "logprobs": logprobs}


def _tokens(random: Random, number: int) -> list[int]:
    return random.choices(range(HIGHEST), k=number)


def _write(path: Path, header: Any, *frames: Any) -> None:
    lines = (header, *frames, {"type": "End", "frames": len(frames)})
    path.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))

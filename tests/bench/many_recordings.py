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
    header, started = (json.loads(line) for line in _lines(HARMONY / "logprobs" / "tokens.jsonl")[:2])
    tokens, previous = list[int](), ""
    for number in range(turns):
        if number % TURNS == 0:
            if tokens:
                yield tokens
            random, session = Random(number), number // TURNS
            tokens, previous = _tokens(random, BEGUN), ""
        facts, response = started["facts"], f"resp_{number:032x}"
        facts["response"] |= {"id": response, "created_at": BEGAN + number, "previous_response_id": previous or None}
        facts["scheduling"]["session"] = f"session-{session}" if session % 2 else ""
        facts["origin"] = {"opening": f"opening-{session}"}
        previous = response
        tokens += _tokens(random, READ)
        place = folder / response
        place.mkdir(parents=True)
        prompt = {"at": 0.01, "type": "Prompt", "facts": facts, "token_ids": tokens}
        _write(place / "prompt.jsonl", header, prompt)
        wrote = _tokens(random, WROTE)
        chunks = [
            {
                "at": 0.02 + index / 50,
                "type": "TokenChunk",
                "token_ids": [token],
                "logprobs": [{"logprob": -random.random(), "top": []}],
            }
            for index, token in enumerate(wrote)
        ]
        finished = {"at": 1.0, "type": "GenerationFinished", "reason": "stop", "cached_tokens": 0, "duration": 1.0}
        begun = {**started, "at": 0.02, "facts": facts, "prompt_tokens": len(tokens)}
        _write(place / "tokens.jsonl", header, begun, *chunks, finished)
        tokens += wrote
    if tokens:
        yield tokens


def _tokens(random: Random, number: int) -> list[int]:
    return random.choices(range(HIGHEST), k=number)


def _write(path: Path, header: Any, *frames: Any) -> None:
    lines = (header, *frames, {"type": "End", "frames": len(frames)})
    path.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()

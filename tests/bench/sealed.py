"""The time to seal a thought with its tokens, and to open it, beside encoding its text again.

Figures are the least CPU time of the rounds, in milliseconds.  The thought is English prose that does not repeat within
the window of the compression.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from penstock.services.sealing import SealedReasoning, Sealer
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.paths import ROOT

LENGTHS = (1_000, 10_000, 100_000)
PAGES = ("docs/STAGES.md", "docs/PARAMETERS.md", "docs/SETTINGS.md", "docs/AFFINITY.md")
ROUNDS = 25
OWNER = "owner"


@dataclass(frozen=True)
class Cost:
    """The cost of a thought: milliseconds, and the characters of its text and of the sealed text."""

    seal: float
    open: float
    encode: float
    characters: int
    sealed: int

    @property
    def both(self) -> float:
        return self.seal + self.open


def costs(lengths: Sequence[int] = LENGTHS, rounds: int = ROUNDS) -> dict[int, Cost]:
    """Return the cost of a thought of each number of tokens."""
    prose = load_encoding().encode("".join((ROOT / page).read_text() for page in PAGES))
    return {length: _cost(tuple(islice(cycle(prose), length)), rounds) for length in lengths}


def _cost(token_ids: tuple[int, ...], rounds: int) -> Cost:
    text, sealer = load_encoding().decode(token_ids), Sealer()
    thought = SealedReasoning(text, token_ids)
    sealed = sealer.seal(thought, OWNER)
    return Cost(
        _least(lambda: sealer.seal(thought, OWNER), rounds),
        _least(lambda: sealer.open(sealed, OWNER, SealedReasoning), rounds),
        _least(lambda: load_encoding().encode(text), rounds),
        len(text),
        len(sealed),
    )


def _least(work: Callable[[], object], rounds: int) -> float:
    return min(_elapsed(work) for _ in range(rounds))


def _elapsed(work: Callable[[], object]) -> float:
    started = time.process_time_ns()
    work()
    return (time.process_time_ns() - started) / 1e6


def sealed_table(found: dict[int, Cost]) -> str:
    lines = ["tokens   seal, ms   open, ms   both, ms   encode again, ms   characters   sealed"]
    lines += [
        f"{length:6d}{cost.seal:11.3f}{cost.open:11.3f}{cost.both:11.3f}{cost.encode:19.3f}{cost.characters:13d}{cost.sealed:9d}"
        for length, cost in found.items()
    ]
    return "\n".join(lines)

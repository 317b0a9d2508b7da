"""The proof of rollouts: each path passes through an engine in one prefill, which has to find it as likely as it was.

The log probabilities that vLLM reports of what it writes are those of the whole vocabulary, before temperature and
penalties, and so are those of a prefill.  Only a grammar changes them: it gives the share of the tokens that it forbids
to the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import isnan

from penstock.extensions.rollouts.paths import PathTurn, TokenPath
from penstock.extensions.workbench.forced.comparison import AT_ONCE
from penstock.extensions.workbench.forced.in_order import in_order
from penstock.extensions.workbench.forced.scores import FLOOR, SHAPING, Reading, Run, checked, forced
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import Prompt, RequestFacts, Sampling
from penstock.pipeline.protocol.response import ECHOED, Response
from penstock.services.engines.engine import Engine

TOLERANCE = 0.5
"""The default of the difference in nats from which a token is off.

An engine adds numbers in another order when it reads many tokens than when it writes one, so a logit may fall on the
next number of its type.  bfloat16 has 8 binary digits: between 32 and 64, where the largest logits are, its numbers are
0.25 apart.  A log probability is the difference of two logits, nearly: 0.5 if both fall on the next number.
"""

SAMPLED = "sampled, and recorded without log probabilities"
HELD = "held to a grammar, which makes its tokens likelier"
BEYOND = "beyond the engine's context"
"""The reasons for which a token proves nothing."""


@dataclass(frozen=True)
class OffToken:
    """A token that is less or more likely than it was."""

    turn: PathTurn
    at: int
    """Its index in the path."""
    recorded: float | None
    """The recorded log probability; None if it is only known to have been the first choice."""
    now: float
    first: tuple[int, float]
    """The engine's own first choice, with its log probability."""


@dataclass
class Figures:
    """The figures of tokens that a model wrote."""

    proved: int = 0
    """The tokens that could be compared."""
    off: int = 0
    scored: int = 0
    """The compared tokens that have a recorded log probability."""
    total: float = 0.0
    """The sum of their differences."""
    worst: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    """The tokens that prove nothing, by reason."""
    versions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The tokens that other weights wrote than those that prove them, by the versions of both."""

    @property
    def mean(self) -> float | None:
        """The mean difference; None if no log probabilities were recorded."""
        return self.total / self.scored if self.scored else None

    def add(self, other: Figures) -> None:
        """Add the figures of other tokens."""
        self.proved += other.proved
        self.off += other.off
        self.scored += other.scored
        self.total += other.total
        self.worst = max(self.worst, other.worst)
        self.left_out += other.left_out
        self.versions += other.versions


@dataclass(frozen=True)
class ProvedPath:
    """A path, as the engine finds it."""

    path: TokenPath
    figures: Figures
    first_off: OffToken | None = None


@dataclass(frozen=True)
class Proof:
    """The proof by an engine; a token is off if it differs by more than the ``tolerance``, in nats."""

    engine: Engine
    vocabulary: Vocabulary
    tolerance: float = TOLERANCE
    at_once: int = AT_ONCE
    _numbers: count[int] = field(default_factory=count)

    @cached_property
    def _run(self) -> Run:
        return checked(self.engine)

    async def proved(self, paths: Iterable[TokenPath]) -> AsyncGenerator[ProvedPath, None]:
        """Yield each path in order, after its tokens have passed through the engine.

        Raises the error of the engine if it fails.
        """
        async with aclosing(in_order(paths, self._prove, self.at_once)) as proved:
            async for path in proved:
                yield path

    async def _prove(self, path: TokenPath) -> ProvedPath:
        begin, end = path.prompt_tokens, min(len(path.token_ids), self.engine.context_length - 1)
        if (highest := max(path.token_ids)) >= self.vocabulary.size:
            return _unread(path, f"the engine has no token {highest}")
        try:
            reading = await self._reading(path, begin, end) if begin < end else Reading((), "")
        except InvalidRequest as error:
            return _unread(path, f"refused by the engine: {error.message}")
        return await asyncio.to_thread(judged, path, reading, self.tolerance)

    async def _reading(self, path: TokenPath, begin: int, end: int) -> Reading:
        prompt, tokens, name = _prompt(path, begin), path.token_ids[begin:end], f"resp_proof{next(self._numbers)}"
        return await forced(self.engine, prompt, tokens, name, top=1, run=self._run)


def _unread(path: TokenPath, reason: str) -> ProvedPath:
    return ProvedPath(path, Figures(left_out=Counter({reason: path.mask.count(1)})))


def _prompt(path: TokenPath, end: int) -> Prompt:
    """Return the beginning of a path as a prompt for its model."""
    turn = path.turns[0]
    response = Response(**ECHOED, id=turn.response, created_at=0, status="in_progress", model=turn.model, store=False)
    facts = RequestFacts(response, input=(), sampling=Sampling(0.0, 1.0), date="")
    return Prompt(facts, tuple(path.token_ids[:end]), stop_token_ids=())


def judged(path: TokenPath, reading: Reading, tolerance: float) -> ProvedPath:
    """Compare a path with the reading of its tokens, from the first one on that the mask has."""
    figures, first, begin, scores = Figures(), None, path.prompt_tokens, reading.scores
    for turn, at in _written(path):
        if (version := _version(turn, at)) != reading.weights and version and reading.weights:
            figures.versions[version, reading.weights] += 1
        if at - begin >= len(scores):
            figures.left_out[BEYOND] += 1
            continue
        score, recorded = scores[at - begin], path.logprobs[at]
        has_score, now = not isnan(recorded), max(score.logprob, FLOOR)
        likeliest = score.top[0] if score.top else (path.token_ids[at], now)
        difference = now - (recorded if has_score else likeliest[1])
        if reason := _left_out(turn, has_score=has_score, is_less_likely=difference < -tolerance):
            figures.left_out[reason] += 1
            continue
        figures.proved += 1
        if has_score:
            figures.scored += 1
            figures.total += abs(difference)
            figures.worst = max(figures.worst, abs(difference))
        if abs(difference) > tolerance:
            figures.off += 1
            first = first or OffToken(turn, at=at, recorded=recorded if has_score else None, now=now, first=likeliest)
    return ProvedPath(path, figures, first)


def _written(path: TokenPath) -> Iterator[tuple[PathTurn, int]]:
    """Yield the index of each token that the mask has, with its turn."""
    for turn in path.turns:
        for at in range(turn.begin, turn.end):
            if path.mask[at]:
                yield turn, at


def _version(turn: PathTurn, at: int) -> str:
    """Return the version of the weights that wrote a token; empty if the engine named none."""
    return next((span.version for span in turn.weights if span.start <= at - turn.begin < span.end), "")


def _left_out(turn: PathTurn, *, has_score: bool, is_less_likely: bool) -> str:
    """Return the reason for which a token of a turn proves nothing; empty if it does."""
    if turn.is_held and (is_less_likely or not has_score):
        return HELD
    if has_score or _is_greedy(turn):
        return ""
    return SAMPLED


def _is_greedy(turn: PathTurn) -> bool:
    """Return True if each token of a turn was the engine's first choice."""
    chooses = turn.sampling.get("temperature") == 0 or turn.sampling.get("top_k") == 1
    return chooses and SHAPING.keys().isdisjoint(turn.sampling)

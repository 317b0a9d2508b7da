"""Scores of recorded tokens by another engine: the log probability of each, and whether the choice has changed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import UNSET

from penstock.extensions.workbench.forced.turn import Turn
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    GenerationFinished,
    Origin,
    Prompt,
    Sampling,
    Scheduling,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
    replace,
)
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.custom import guarded_engine
from penstock.services.engines.engine import Engine
from penstock.stages.generate import Generate

Run: TypeAlias = Callable[[Prompt], AbstractAsyncContextManager[AsyncIterator[TokenFrame]]]
"""A function that runs a prompt for the length of a block."""

SAMPLED = "sampled, without top_logprobs"
"""The reason to leave out a turn whose tokens were drawn, as it is not known which was likeliest."""

FLOOR = -9999.0
"""The least log probability: JSON has no infinity."""

FEW, MANY = 5, 20
"""Alternatives that are requested for each token; many where a grammar forbids most of them, as vLLM gives no more."""

LONG = 20_000
"""Tokens of a prompt from which only the first choice is requested, so that the answer does not become too large."""

SHAPING = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": UNSET,
    "bad_words": UNSET,
    "logit_bias": UNSET,
    "allowed_token_ids": UNSET,
    "watermarking": UNSET,
    "extra_args": UNSET,
    "thinking_token_budget": UNSET,
}
"""The sampling parameters that change which token is the first choice, with the values that do not."""


@dataclass(frozen=True)
class ForcedToken:
    """A recorded token, as the other engine finds it.

    ``rank`` is its place among all tokens, 1 for the first choice; None if the engine does not report it.  ``first``
    is the engine's own choice with its log probability, and ``top`` has further ones; under a grammar, those that it
    allows.  ``recorded`` is the recorded log probability, if there is one.  ``has_changed`` is None if the recorded
    engine's choice is not known.
    """

    id: int
    logprob: float
    rank: int | None
    first: tuple[int, float]
    top: tuple[tuple[int, float], ...]
    recorded: float | None
    has_changed: bool | None

    @property
    def surprise(self) -> float:
        """By how much the engine's own choice is more likely, as a difference of log probabilities."""
        return max(0.0, self.first[1] - self.logprob)

    @property
    def shift(self) -> float | None:
        """By how much the token became more likely since it was recorded, as a difference of log probabilities."""
        return None if self.recorded is None else self.logprob - self.recorded


@dataclass(frozen=True)
class ForcedTurn:
    """A turn after its forced replay.

    ``left_out`` is the reason why its tokens do not count; empty if they do.  Without any tokens, the engine did not
    take it.  ``was_chosen`` is True if each token was the recorded engine's first choice.
    """

    turn: Turn
    tokens: tuple[ForcedToken, ...]
    left_out: str = ""
    was_chosen: bool = False


@dataclass(frozen=True)
class Reading:
    """The ``scores`` of given tokens, and the version of the weights that read them, if the engine names it."""

    scores: tuple[TokenLogprob, ...]
    weights: str


async def forced(
    engine: Engine, prompt: Prompt, tokens: Sequence[int], request_id: str, *, top: int, run: Run
) -> Reading:
    """Let the engine read a prompt with the tokens after it, in one prefill; return the scores of these.

    Each has the ``top`` likeliest tokens in its place.  ``run`` is `Engine.open`, or `checked`.  Raise what it raises.
    """
    scores: tuple[TokenLogprob, ...] = ()
    weights: tuple[WeightSpan, ...] = ()
    async with run(_forced_prompt(engine, prompt, tokens, request_id, top)) as frames:
        async for frame in frames:
            if isinstance(frame, TokenChunk):
                scores = scores or frame.prompt_logprobs
            elif isinstance(frame, GenerationFinished):
                weights = frame.weights
    if len(scores) < len(tokens):
        raise EngineFailed("The engine reported no log probabilities of the prompt.")
    return Reading(scores[-len(tokens) :], weights[0].version if weights else "")


def checked(engine: Engine) -> Run:
    """Return what runs a prompt as a server does, whose guard raises `StageFault` for a mistake of the engine's."""
    pipeline = guarded_engine(engine, Pipeline.start("generate", Generate(engine)))

    async def source(prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        yield prompt

    return lambda prompt: pipeline.open(source(prompt))


def _forced_prompt(engine: Engine, prompt: Prompt, tokens: Sequence[int], request_id: str, top: int) -> Prompt:
    sampling = Sampling(temperature=0.0, top_p=1.0, max_tokens=1, prompt_logprobs=top)
    return replace(
        renamed(engine, prompt, request_id, sampling),
        token_ids=(*prompt.token_ids, *tokens),
        grammar=None,
    )


def renamed(engine: Engine, prompt: Prompt, request_id: str, sampling: Sampling) -> Prompt:
    """Return the prompt as a request of its own, for the recorded model or adapter if the engine has that name."""
    facts = prompt.facts
    model = facts.model if facts.model in engine.models else engine.models[0]
    response = replace(facts.response, id=request_id, model=model)
    return replace(
        prompt,
        facts=replace(facts, response=response, sampling=sampling, origin=Origin(), scheduling=Scheduling()),
    )


def alternatives(turn: Turn) -> int:
    """Return the number of alternatives to request for each token of a turn."""
    if len(turn.prompt.token_ids) + len(turn.tokens) > LONG:
        return 1
    return MANY if turn.started.held_to_grammar else FEW


def candidates(turn: Turn, scores: Sequence[TokenLogprob]) -> list[set[int]]:
    """Return the tokens at each position that one of the engines may have chosen."""
    recorded = turn.logprobs or (TokenLogprob(0.0),) * len(turn.tokens)
    return [
        {token, *(other for other, _ in (*score.top, *before.top))}
        for token, score, before in zip(turn.tokens, scores, recorded, strict=True)
    ]


def judged(
    turn: Turn, scores: Sequence[TokenLogprob], allowed: Sequence[Container[int]] | None, tie: float
) -> ForcedTurn:
    """Find the tokens at which the engine's choice has changed.

    ``allowed`` are the tokens that the grammar of the turn allows, at each position; None without a grammar, or if
    they are not known.  Choices whose log probabilities differ by at most ``tie`` count as equally likely.
    """
    left_out, was_chosen = _left_out(turn, knows_allowed=allowed is not None), _was_chosen(turn)
    tokens = tuple(
        _judged(
            token,
            scores[at],
            turn.logprobs[at] if turn.logprobs else None,
            allowed[at] if allowed else None,
            tie,
            was_chosen=was_chosen,
        )
        for at, token in enumerate(turn.tokens)
    )
    if left_out:
        tokens = tuple(_uncounted(token) for token in tokens)
    return ForcedTurn(turn, tokens, left_out, was_chosen)


def reason_left_out(turn: Turn) -> str:
    """Return the reason why nothing of a turn can be compared, whatever the engine; empty if something can."""
    return "" if turn.logprobs else _left_out(turn, knows_allowed=turn.grammar_is_known)


def _was_chosen(turn: Turn) -> bool:
    sampling = turn.prompt.facts.sampling
    return (sampling.temperature == 0 or sampling.top_k == 1) and not _shaping(turn)


def _shaping(turn: Turn) -> list[str]:
    sampling = turn.prompt.facts.sampling
    return [name for name, neutral in SHAPING.items() if getattr(sampling, name) != neutral]


def _left_out(turn: Turn, *, knows_allowed: bool) -> str:
    """Return the reason why the choices of the recorded engine are not known; empty if they are."""
    if turn.started.held_to_grammar and not knows_allowed:
        return "held to a grammar that cannot be followed here"
    if _was_chosen(turn) or any(each.top for each in turn.logprobs):
        return ""
    shaping = _shaping(turn)
    return f"shaped by {', '.join(shaping)}" if shaping else SAMPLED


def _judged(
    token: int,
    score: TokenLogprob,
    recorded: TokenLogprob | None,
    allowed: Container[int] | None,
    tie: float,
    *,
    was_chosen: bool,
) -> ForcedToken:
    logprob = max(score.logprob, FLOOR)
    others = [(other, value) for other, value in score.top if other != token and (allowed is None or other in allowed)]
    candidates = sorted([(token, logprob), *others], key=lambda pair: -pair[1])
    is_in_top = any(other == token for other, _ in score.top) or not score.top or logprob >= score.top[-1][1]
    first = candidates[0]
    chosen = _nearly_first([(token, 0.0)] if was_chosen else recorded.top if recorded else (), allowed, tie)
    has_changed = chosen.isdisjoint(_nearly_first(candidates, None, tie)) if chosen else None
    if first[0] == token and not is_in_top:
        has_changed = None  # all likelier tokens that are known are forbidden: an allowed one may be among the others
    return ForcedToken(
        token,
        logprob=logprob,
        rank=_rank(score, logprob),
        first=first,
        top=tuple(candidates),
        recorded=recorded.logprob if recorded else None,
        has_changed=has_changed,
    )


def _nearly_first(pairs: Iterable[tuple[int, float]], allowed: Container[int] | None, tie: float) -> set[int]:
    possible = [(token, value) for token, value in pairs if allowed is None or token in allowed]
    best = max((value for _, value in possible), default=FLOOR)
    return {token for token, value in possible if value >= best - tie}


def _rank(score: TokenLogprob, logprob: float) -> int | None:
    """Return the place of a token; tokens with the same probability share theirs, which vLLM counts as the last."""
    likelier = sum(value > logprob for _, value in score.top)
    if likelier < len(score.top) or not likelier:
        return likelier + 1
    return None if score.rank is UNSET else score.rank


def _uncounted(token: ForcedToken) -> ForcedToken:
    return ForcedToken(
        token.id,
        logprob=token.logprob,
        rank=token.rank,
        first=token.first,
        top=token.top,
        recorded=token.recorded,
        has_changed=None,
    )

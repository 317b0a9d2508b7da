"""Forms: the paths of a session as rows with the fields that a trainer reads, by the trainer's own names.

A row is one path.  The columns of many rows are what the trainer's own code takes: TRL's ``rollout_func`` returns them,
and they are SkyRL's ``GeneratorOutput``; a row is verl's ``AgentLoopOutput``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import msgspec

from penstock.extensions.rollouts.paths import Branch, Cut, PathTurn, Reward, TokenPath

TRIED: Mapping[str, str] = {"trl": "1.16.0", "verl": "0.9.1", "skyrl": "0.3.0"}
"""The release of each trainer on the package index that reads its form: ``make trainers`` tries them."""

NO_LABEL = -100
"""The label of a token that does not count for the loss, as PyTorch has it."""


class PathRow(msgspec.Struct, frozen=True):
    """All that is known of a path."""

    session: str
    key: str
    path: int
    model: str
    source: str
    token_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    turns: Sequence[PathTurn]
    cut: Cut | None
    branch: Branch | None
    rewards: Sequence[Reward]
    reward: float | None


class TrlRow(msgspec.Struct, frozen=True):
    """A row for TRL: what a ``rollout_func`` of its GRPO returns, then what its SFT reads."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    """0 for what the model has not written, and no number for a log probability that is not known."""
    env_mask: Sequence[int]
    reward: float | None
    input_ids: Sequence[int]
    labels: Sequence[int]
    session: str
    path: int


class VerlMetrics(msgspec.Struct, frozen=True):
    """The measurements of verl's own engine, of which there are none."""

    num_preempted: int = -1
    """-1 says that it is not known."""


class VerlExtras(msgspec.Struct, frozen=True):
    """The fields of a row that verl passes on."""

    session: str
    path: int


class VerlRow(msgspec.Struct, frozen=True):
    """A row for verl: an ``AgentLoopOutput``."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None
    """None if one of what the model wrote is not known."""
    reward_score: float | None
    num_turns: int
    """Turns of the model, and those before each of them."""
    metrics: VerlMetrics
    extra_fields: VerlExtras


class TrajectoryId(msgspec.Struct, frozen=True):
    """SkyRL's name of a session."""

    instance_id: str
    repetition_id: int = 0


class SkyrlRow(msgspec.Struct, frozen=True):
    """A row for SkyRL: its columns are a ``GeneratorOutput`` of step-wise training, in which a path is a step."""

    prompt_token_ids: Sequence[int]
    response_ids: Sequence[int]
    rewards: float | None
    loss_masks: Sequence[int]
    stop_reasons: str
    rollout_logprobs: Sequence[float] | None
    """None if one of what the model wrote is not known."""
    trajectory_ids: TrajectoryId
    is_last_step: bool


def rows(form: str, paths: Sequence[TokenPath]) -> Iterator[msgspec.Struct]:
    """Yield the rows of all paths of one session; a trainer gets no path of which the model wrote nothing."""
    return FORMS[form].rows(paths)


def reward_of(path: TokenPath) -> float | None:
    """Return the sum of what the whole session was worth, without rewards that have a name; None if there is none."""
    given = [each.reward for each in path.rewards if not (each.name or each.response)]
    return sum(given) if given else None


@dataclass(frozen=True)
class Form:
    """A form: the fields of its rows, and how paths become these."""

    row: type[msgspec.Struct]
    rows: Callable[[Sequence[TokenPath]], Iterator[msgspec.Struct]]


def _whole(paths: Sequence[TokenPath]) -> Iterator[PathRow]:
    for path in paths:
        yield PathRow(
            session=path.session,
            key=path.key,
            path=path.number,
            model=_model(path),
            source=path.source,
            token_ids=path.token_ids,
            mask=array("b", path.mask),
            logprobs=path.logprobs,
            turns=path.turns,
            cut=path.cut,
            branch=path.branch,
            rewards=path.rewards,
            reward=reward_of(path),
        )


def _trl(paths: Sequence[TokenPath]) -> Iterator[TrlRow]:
    for path, begin in _trained(paths):
        mask = path.mask
        labels = (token if own else NO_LABEL for token, own in zip(path.token_ids, mask, strict=True))
        yield TrlRow(
            prompt_ids=path.token_ids[:begin],
            completion_ids=path.token_ids[begin:],
            logprobs=_logprobs(path, begin),
            env_mask=array("b", mask[begin:]),
            reward=reward_of(path),
            input_ids=path.token_ids,
            labels=array("q", labels),
            session=path.session,
            path=path.number,
        )


def _verl(paths: Sequence[TokenPath]) -> Iterator[VerlRow]:
    for path, begin in _trained(paths):
        yield VerlRow(
            prompt_ids=path.token_ids[:begin],
            response_ids=path.token_ids[begin:],
            response_mask=array("b", path.mask[begin:]),
            response_logprobs=_known(_logprobs(path, begin)),
            reward_score=reward_of(path),
            num_turns=2 * len(path.turns),
            metrics=VerlMetrics(),
            extra_fields=VerlExtras(path.session, path.number),
        )


def _skyrl(paths: Sequence[TokenPath]) -> Iterator[SkyrlRow]:
    trained = list(_trained(paths))
    for number, (path, begin) in enumerate(trained, 1):
        yield SkyrlRow(
            prompt_token_ids=path.token_ids[:begin],
            response_ids=path.token_ids[begin:],
            rewards=reward_of(path),
            loss_masks=array("b", path.mask[begin:]),
            stop_reasons=path.turns[-1].stop,
            rollout_logprobs=_known(_logprobs(path, begin)),
            trajectory_ids=TrajectoryId(":".join(filter(None, (path.key, _model(path), path.session)))),
            is_last_step=number == len(trained),
        )


FORMS: Mapping[str, Form] = {
    "penstock": Form(PathRow, _whole),
    "trl": Form(TrlRow, _trl),
    "verl": Form(VerlRow, _verl),
    "skyrl": Form(SkyrlRow, _skyrl),
}


def _model(path: TokenPath) -> str:
    return path.turns[-1].model


def _trained(paths: Sequence[TokenPath]) -> Iterator[tuple[TokenPath, int]]:
    """Yield the paths of which the model wrote something, each with the tokens before that."""
    for path in paths:
        if (begin := path.prompt_tokens) < len(path.token_ids):
            yield path, begin


def _logprobs(path: TokenPath, begin: int) -> array[float]:
    """Return the log probabilities from a token on, with 0 for what the model has not written."""
    return array(
        "d", (each if own else 0.0 for each, own in zip(path.logprobs[begin:], path.mask[begin:], strict=True))
    )


def _known(logprobs: array[float]) -> array[float] | None:
    """Return log probabilities if all are known."""
    return None if any(isnan(each) for each in logprobs) else logprobs

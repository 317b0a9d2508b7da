"""Log probabilities of prompts in the answers of vLLM's token endpoints, which do not stream them.

``/inference/v1/generate`` has them beside the choices, and ``/v1/completions`` in each choice.
"""

from __future__ import annotations

from operator import itemgetter

import msgspec
from msgspec import UNSET

from penstock.pipeline.frames import TokenLogprob
from penstock.stages.services.engines.http_endpoints import FLOOR


class _Score(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None = None


class _Scored(msgspec.Struct, frozen=True, gc=False):
    prompt_logprobs: tuple[msgspec.Raw, ...] | None = None


class _Answer(_Scored, frozen=True, gc=False):
    choices: tuple[_Scored, ...] = ()


_decode = msgspec.json.Decoder(_Answer).decode
_decode_position = msgspec.json.Decoder(dict[int, _Score]).decode


def prompt_logprobs(body: bytes, top: int) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of the tokens after the first one, with ``top`` alternatives for each.

    Each position is decoded by itself, so that other threads run meanwhile.
    """
    answer = _decode(body)
    positions = answer.prompt_logprobs or next((each.prompt_logprobs for each in answer.choices), None) or ()
    return tuple(_logprob(_decode_position(position), top) for position in positions[1:])


def _logprob(scores: dict[int, _Score], top: int) -> TokenLogprob:
    """Convert one position, whose first entry is the token of the prompt."""
    own = next(iter(scores.values()))
    likeliest = sorted(((token, score.logprob) for token, score in scores.items()), key=itemgetter(1), reverse=True)
    possible = tuple(pair for pair in likeliest[:top] if pair[1] > FLOOR)
    return TokenLogprob(own.logprob, possible, own.rank or UNSET)

"""Log probabilities of prompts in the answers of vLLM's token endpoints, which do not stream them.

``/inference/v1/generate`` has them beside the choices, and ``/v1/completions`` in each choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from penstock.pipeline.frames import TokenLogprob
from penstock.services.engines.http_endpoints import FLOOR


class _Score(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None = None


class _Scored(msgspec.Struct, frozen=True, gc=False):
    prompt_logprobs: tuple[msgspec.Raw, ...] | None = None


class _Answer(_Scored, frozen=True, gc=False):
    choices: tuple[_Scored, ...] = ()


_decode = msgspec.json.Decoder(_Answer).decode
_decode_position = msgspec.json.Decoder(dict[int, _Score]).decode

_SCORES = b'"prompt_logprobs":'

_BORDER = re.compile(rb'\}\},(?=\s*\{"\d+":)')
"""The end of a position, and the comma before the next one.

A text cannot contain it: there the quote is escaped, or it ends the text.
"""

_WINDOW, _SIGHT = 1 << 18, 64
"""Bytes that are searched at once, and those behind them in which a border may end."""

LARGEST_REST = 4 << 20
"""The most bytes of an answer without its scores: they are decoded at once, which holds the GIL."""


class Scores(NamedTuple):
    """An answer without most of its scores, and these, one for each position."""

    rest: bytes
    """A shorter answer, whose scores are those of the first and the last position."""
    between: list[memoryview]


def separated(body: bytes) -> Scores:
    """Take the scores out of an answer; raise `ValueError` if too much is left.

    They may be many megabytes, and other threads wait while a decoder passes over them.
    """
    borders = list(_borders(body)) or [0]
    view = memoryview(body)
    rest = b"".join((view[: borders[0]], view[borders[-1] :]))
    if len(rest) > LARGEST_REST:
        raise ValueError(f"an answer has more than {LARGEST_REST:,} bytes beside its scores")
    return Scores(rest, [view[start + 1 : end] for start, end in pairwise(borders)])


def _borders(body: bytes) -> Iterator[int]:
    for start in range(max(0, body.find(_SCORES)), len(body), _WINDOW):
        end = start + _WINDOW
        for found in _BORDER.finditer(body, start, end + _SIGHT):
            if found.start() < end:
                yield found.end() - 1


def prompt_logprobs(scores: Scores, top: int) -> tuple[TokenLogprob, ...]:
    """Return the log probabilities of the tokens after the first one, with ``top`` alternatives for each.

    Each position is decoded by itself, so that other threads run meanwhile.
    """
    answer = _decode(scores.rest)
    ends = answer.prompt_logprobs or next((each.prompt_logprobs for each in answer.choices), None) or ()
    positions: tuple[msgspec.Raw | memoryview, ...] = (*ends[1:-1], *scores.between, *ends[1:][-1:])
    return tuple(_logprob(_decode_position(position), top) for position in positions)


def _logprob(scores: dict[int, _Score], top: int) -> TokenLogprob:
    """Convert one position, whose first entry is the token of the prompt."""
    own = next(iter(scores.values()))
    likeliest = sorted(((token, score.logprob) for token, score in scores.items()), key=itemgetter(1), reverse=True)
    possible = tuple(pair for pair in likeliest[:top] if pair[1] > FLOOR)
    return TokenLogprob(own.logprob, possible, own.rank or UNSET)

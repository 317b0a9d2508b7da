"""Completions written by hand: what a model might have generated, as the token frames of an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from operator import itemgetter
from pathlib import Path

from pipeline.frames import (
    FinishReason,
    GenerationFinished,
    GenerationStarted,
    Prompt,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
)
from stages.harmony import RETURN, STOP_TOKENS, HarmonyEncoding


def completions(folder: Path) -> list[Path]:
    """The files of a case with one completion per turn; none where it was recorded."""
    return sorted(folder.glob("completion*.txt"), key=lambda path: int(path.stem.partition("_")[2] or 1))


def hand_written(folder: Path, prompt: Prompt, encoding: HarmonyEncoding) -> Iterator[TokenFrame]:
    """Token frames of all turns, each begun as ``prompt`` says."""
    for completion in completions(folder):
        yield from _turn(completion.read_text(), prompt, encoding)


def _turn(text: str, prompt: Prompt, encoding: HarmonyEncoding) -> list[TokenFrame]:
    token_ids = read_completion(text, encoding)
    stopped = set(token_ids[-6:]) & {*STOP_TOKENS, 199_999} or text.endswith(prompt.sampling.stop or "\0")
    reason: FinishReason = "stop" if stopped else "length"
    logprobs = made_up(token_ids, prompt.sampling.logprobs)
    return [
        GenerationStarted(prompt.response, prompt.input, len(prompt.token_ids)),
        *(TokenChunk((token,), logprobs[at : at + 1]) for at, token in enumerate(token_ids)),
        GenerationFinished(reason, cached_tokens=0, duration=0.0),
    ]


OTHERS = ((RETURN, -1.0625), (9552, -2.0625), (40, -3.0625), (200_014, -4.0625), (13, -inf))
"""What else might have come, in a hand-written case: a marker, part of a character, a word, no token at all, a dot."""


def made_up(token_ids: list[int], top: int | None) -> tuple[TokenLogprob, ...]:
    """A logprob for each token, if they were asked for: 0, -1/8, -2/8 and so on down to -15/8, and from 0 again."""
    if top is None:
        return ()
    found = [(token, -(position % 16) / 8) for position, token in enumerate(token_ids)]
    likeliest = (sorted([own, *OTHERS], key=itemgetter(1), reverse=True) for own in found)
    return tuple(TokenLogprob(own[1], tuple(others[:top])) for own, others in zip(found, likeliest, strict=True))


def read_completion(text: str, encoding: HarmonyEncoding) -> list[int]:
    r"""The tokens of text with markers; ``<|123|>`` is the token of that id, ``<\|`` no marker at all."""
    token_ids: list[int] = []
    for piece in re.split(r"(<\|\w+\|>)", text):
        if marker := re.fullmatch(r"<\|(\d+)\|>", piece):
            token_ids.append(int(marker[1]))
        elif re.fullmatch(r"<\|\w+\|>", piece):
            token_ids += encoding.encode_markup(piece)
        else:
            token_ids += encoding.encode(piece.replace("<\\|", "<|"))
    return token_ids

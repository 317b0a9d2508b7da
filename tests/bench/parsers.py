"""The cost of a long call for every tool call parser of vLLM, token by token, beside vLLM's own stream.

Figures are CPU time of the parser alone.  One argument is a long text, or all of the output is hostile: the beginning
of a call again and again, or an argument full of quotes and brackets.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from penstock.pipeline.frames import ChatTurn, GenerationFinished, TokenChunk
from penstock.stages.models.chat.parsers import composed
from penstock.stages.parse.chat.parse import ChatParser
from penstock.stages.parse.text import TokenDecoder
from tests.bench.chat import PROSE
from tests.support.call_markup import CALL_MARKUP, CITY, END, marked_model
from tests.support.parsed_output import CHAT_TOOLS, token_chunks, turn_started
from tests.support.parsed_output import CITY as CITY_SCHEMA

LENGTHS = (500, 2_000, 8_000)
LONGEST = 5.0
"""Seconds after which a parser is stopped: vLLM's takes half a minute for some calls."""

HEAD = (
    "one long argument, 1 token per chunk: us per token, and the longest step in ms, also of hostile text;\n"
    "vLLM's parsers beside them, each only for its first 5 s, so that the slowest are understated\n"
    f"{'parser':16s}{''.join(f'{length:9,d}' for length in LENGTHS)}  longest  hostile  longest"
    f"  vLLM {LENGTHS[0]}{LENGTHS[1]:8,d}{LENGTHS[2]:9,d}"
)


def filled(parser: str, words: str, length: int) -> list[int]:
    """Return a call whose argument has ``length`` tokens."""
    encode = marked_model(parser).vocabulary.encode
    before, after = CALL_MARKUP[parser].split(CITY)
    return [*encode(before), *repeated(encode(words), length), *encode(after + END)]


def repeated(tokens: list[int], length: int) -> list[int]:
    return (tokens * (length // len(tokens) + 1))[:length]


def hostile(parser: str, length: int) -> Iterator[list[int]]:
    encode = marked_model(parser).vocabulary.encode
    before = CALL_MARKUP[parser].split(CITY)[0]
    yield repeated(encode(before), length)
    yield filled(parser, '\\"}]) < [{( \n', length)


def ours(parser: str, token_ids: Sequence[int]) -> tuple[float, float]:
    """Return the microseconds per token, and the milliseconds of the longest step; see `theirs`."""
    reader = ChatParser(marked_model(parser), turn_started(tools=CHAT_TOOLS, chat=ChatTurn()))
    frames: list[TokenChunk | GenerationFinished] = [*token_chunks(token_ids), GenerationFinished("stop", 0, 0.0)]
    begun, longest, count = time.process_time(), 0.0, 0
    for frame in frames:
        at = time.process_time()
        if reader.feed_text(frame) is None:
            for _ in reader.feed(frame):
                pass
        longest, count = max(longest, time.process_time() - at), count + 1
        if at - begun > LONGEST:
            break
    return (time.process_time() - begun) * 1e6 / count, longest * 1e3


def theirs(parser: str, token_ids: Sequence[int]) -> float:
    """Return the microseconds per token; those of the first tokens, if that takes too long."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415 - takes seconds

    model = marked_model(parser)
    function = {"name": "get_weather", "parameters": CITY_SCHEMA}
    request = ChatCompletionRequest(model="", messages=[], tools=[{"type": "function", "function": function}])
    kind = composed((None, parser), model.vocabulary.tokenizer)
    assert kind
    reader = kind(model.vocabulary.tokenizer, request.tools)
    decoder = TokenDecoder(model.vocabulary)
    texts = [decoder.decode(token) for token in token_ids]
    begun, count = time.process_time(), 0
    for token, text in zip(token_ids, texts, strict=True):
        reader.parse_delta(text, [token], request, [], finished=False)
        count += 1
        if time.process_time() - begun > LONGEST:
            break
    return (time.process_time() - begun) * 1e6 / count


def line(parser: str) -> str:
    calls = [filled(parser, PROSE, length) for length in LENGTHS]
    ours(parser, calls[0])
    mine = [ours(parser, call) for call in calls]
    worst = [ours(parser, output) for output in hostile(parser, LENGTHS[-1])]
    return (
        f"{parser:16s}{in_columns(cost for cost, _ in mine)}{max(step for _, step in mine):9.1f}"
        f"{max(cost for cost, _ in worst):9.1f}{max(step for _, step in worst):9.1f}"
        f"{in_columns(theirs(parser, call) for call in calls)}"
    )


def in_columns(figures: Iterable[float]) -> str:
    return "".join(f"{figure:9.1f}" for figure in figures)


def parser_figures() -> str:
    return "\n".join([HEAD, *map(line, CALL_MARKUP)])

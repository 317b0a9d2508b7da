"""The cost of reading each family of calls, token by token, beside vLLM's own stream.

Figures are CPU time of the parser alone.  The output is one call with a long text as its argument, or plain text, or
hostile: the beginning of a call or one of its marks again and again, an argument full of quotes and brackets, or one
full of the marks of calls.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from penstock.pipeline.frames import ChatTurn, GenerationFinished, TokenChunk
from penstock.stages.models.chat.forms import CALL_FORMS, MESSAGE_FORMS
from penstock.stages.models.chat.parsers import UnknownParser, composed
from penstock.stages.parse.chat.parse import ChatParser
from penstock.stages.parse.text import TokenDecoder
from tests.bench.chat import PROSE
from tests.support.call_markup import CALL_MARKUP, CITY, END, OWN_MARKUP, marked_model
from tests.support.parsed_output import CHAT_TOOLS, token_chunks, turn_started
from tests.support.parsed_output import CITY as CITY_SCHEMA

LENGTHS = (100, 4_000, 8_000)
TRIED = 1_000
"""Tokens of each hostile text that are read to find the costliest."""
LONGEST = 5.0
"""Seconds after which a parser is stopped: vLLM's takes half a minute for some calls."""
MARKUP = {**CALL_MARKUP, **OWN_MARKUP}
_MARK = re.compile(r"<[^<>@]*>|\[[A-Z_]+\]")

HEAD = (
    "us per token, 1 token per chunk: one long argument, 8,000 tokens of plain text, and the costliest hostile text,\n"
    "with the time of 8,000 tokens of it as a multiple of that of 4,000; the longest step of all of these in ms;\n"
    "vLLM's parsers with the argument, each only for its first 5 s, so that the slowest are understated\n"
    f"{'parser':16s}{''.join(f'{length:8,d}' for length in LENGTHS)}    text    4,000   8,000  ratio  longest"
    f"   vLLM {LENGTHS[0]}{LENGTHS[1]:8,d}{LENGTHS[2]:8,d}"
)


def filled(parser: str, words: str, length: int) -> list[int]:
    """Return a call whose argument has ``length`` tokens."""
    encode = marked_model(parser).vocabulary.encode
    before, after = MARKUP[parser].split(CITY)
    return [*encode(before), *repeated(encode(words), length), *encode(after + END)]


def repeated(tokens: list[int], length: int) -> list[int]:
    return (tokens * (length // len(tokens) + 1))[:length]


def hostile(parser: str, length: int) -> Iterator[list[int]]:
    encode = marked_model(parser).vocabulary.encode
    before, after = MARKUP[parser].split(CITY)
    yield repeated(encode(before), length)
    yield filled(parser, '\\"}]) < [{( \n', length)
    yield filled(parser, before, length)
    yield filled(parser, after, length)
    for mark in sorted({*_MARK.findall(MARKUP[parser]), *marks(parser)}):
        yield repeated(encode(mark), length)
        yield repeated(encode(f"{mark} x\n"), length)


def marks(parser: str) -> tuple[str, ...]:
    form = MESSAGE_FORMS[parser].calls if parser in MESSAGE_FORMS else CALL_FORMS.get(parser)
    return (*form.lists, *form.begins, *form.ends, *form.fences, *form.between, *form.heads) if form else ()


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


def theirs(parser: str, token_ids: Sequence[int]) -> float | None:
    """Return the microseconds per token; those of the first tokens, if that takes too long; None without a parser."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415 - takes seconds

    model = marked_model(parser)
    function = {"name": "get_weather", "parameters": CITY_SCHEMA}
    request = ChatCompletionRequest(model="", messages=[], tools=[{"type": "function", "function": function}])
    try:
        kind = composed((None, parser), model.vocabulary.tokenizer)
    except UnknownParser:
        return None
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


@cache
def words(parser: str) -> list[int]:
    return marked_model(parser).vocabulary.encode(PROSE)


def line(parser: str) -> str:
    calls = [filled(parser, PROSE, length) for length in LENGTHS]
    ours(parser, calls[0])
    mine = [ours(parser, call) for call in calls]
    text = ours(parser, repeated(words(parser), LENGTHS[-1]))
    tried = [ours(parser, output)[0] for output in hostile(parser, TRIED)]
    half, whole = (ours(parser, list(hostile(parser, length))[tried.index(max(tried))]) for length in LENGTHS[1:])
    ratio = whole[0] * LENGTHS[2] / (half[0] * LENGTHS[1])
    longest = max(step for _, step in (*mine, text, half, whole))
    return (
        f"{parser:16s}{in_columns(cost for cost, _ in (*mine, text))} {in_columns((half[0], whole[0]))}{ratio:7.2f}"
        f"{longest:9.1f}   {in_columns(theirs(parser, call) for call in calls)}"
    )


def in_columns(figures: Iterable[float | None]) -> str:
    return "".join("       -" if figure is None else f"{figure:8.1f}" for figure in figures)


def parser_figures() -> str:
    return "\n".join([HEAD, *map(line, MARKUP)])

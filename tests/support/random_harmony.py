"""Generations of any tokens at all, and of any request."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.frames import GenerationStarted, TokenChunk, TokenLogprob
from pipeline.protocol.tools import HOSTED, CustomTool, FunctionTool, McpTool, Toolset
from stages.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, load_encoding
from tests.support.parsed_items import started

MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
HEADER_WORDS = ("assistant", "analysis", "commentary", "final", " json", "user", "\n")
RECIPIENTS = (
    *(" to=functions.f", " to=functions.g", " to=team.h", " h", " to=python"),
    *(" to=browser.search", " to=container.exec", " to=docs.look-up", " to=docs.write", " to=functions.shell"),
)


def header_tokens() -> list[int]:
    return [token for word in HEADER_WORDS + RECIPIENTS for token in load_encoding().encode(word)]


def soup() -> st.SearchStrategy[list[int]]:
    """Markers, header words, broken UTF-8, reserved ids, ids beyond the vocabulary, and any text."""
    return st.lists(
        st.one_of(
            st.sampled_from(MARKERS),
            st.deferred(lambda: st.sampled_from(header_tokens())),
            st.integers(0, 199_997),
            st.sampled_from([160, 187, 222, 624, 4103, 9552, 28823]),
            st.integers(199_998, 201_200),
        ),
        max_size=60,
    )


TOOLS = Toolset((FunctionTool("f"), CustomTool("g"), FunctionTool("h", namespace="team")))
EVERY_TOOL = Toolset(
    (
        *TOOLS.tools,
        FunctionTool("shell", form="shell"),
        McpTool("docs", "look-up"),
        McpTool("docs", "write", needs_approval=True),
        *chain.from_iterable(HOSTED.values()),
    )
)
REQUESTED = (TOOLS, EVERY_TOOL, Toolset(), replace(TOOLS, choice="none"), replace(EVERY_TOOL, allowed=((None, "f"),)))


@st.composite
def requests(draw: st.DrawFn) -> GenerationStarted:
    """Everything that a request may ask of the parser."""
    return started(
        tools=draw(st.sampled_from(REQUESTED)),
        stop=draw(st.sampled_from([(), ("e",), (" the", "ing", "\n"), ("��",)])),
        raw_messages=draw(st.sampled_from([None, ()])),
    )


def cut(tokens: list[int], cuts: Iterable[int], *, likely: bool) -> list[TokenChunk]:
    """Tokens as chunks, with logprobs that tell them apart."""
    found = [TokenLogprob(-position / 8) for position in range(len(tokens))] if likely else []
    spans = pairwise([0, *sorted(cuts), len(tokens)])
    return [TokenChunk(tuple(tokens[a:b]), tuple(found[a:b])) for a, b in spans if a < b]

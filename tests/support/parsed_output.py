"""Token frames of Harmony and of chat models, and the items that the parsers make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from msgspec import structs

from penstock.pipeline import frames
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.items import Logprob
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Toolset
from penstock.services.usage import TurnTokens
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony import vocabulary
from penstock.stages.parse.chat.parse import ChatParser
from penstock.stages.parse.harmony.parse import HarmonyParser
from penstock.stages.parse.parser import TurnParser
from tests.support.chat_families import FAMILIES, family_model
from tests.support.stored_responses import facts

OPENINGS = frames.ReasoningOpened | frames.MessageOpened | frames.ClientCallOpened | frames.ServerCallOpened


@dataclass
class ParsedItem:
    kind: str
    name: str
    deltas: list[str] = field(default_factory=list)
    complete: bool | None = None
    repairs: tuple[frames.Repair, ...] = ()
    namespace: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    token_ids: frames.TokenIds = ()

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def parsed_items(sequence: Iterable[frames.ParsedFrame]) -> list[ParsedItem]:
    """Collect the items of frames, and check the grammar of the junction."""
    parsed: list[ParsedItem] = []
    for frame in sequence:
        is_open = bool(parsed) and parsed[-1].complete is None
        match frame:
            case _ if isinstance(frame, OPENINGS):
                assert not is_open
                name = getattr(frame, "phase", "") or getattr(frame, "name", "")
                namespace = getattr(frame, "namespace", None) or getattr(frame, "server_label", None)
                parsed.append(ParsedItem(type(frame).__name__.removesuffix("Opened"), name, namespace=namespace))
            case frames.ItemDelta(text, logprobs):
                assert is_open
                assert text
                parsed[-1].deltas.append(text)
                parsed[-1].logprobs += logprobs
            case frames.ItemClosed(complete, repairs, token_ids):
                assert is_open
                parsed[-1].complete, parsed[-1].repairs, parsed[-1].token_ids = complete, repairs, token_ids
            case frames.TurnFinished() | frames.GenerationStarted():
                assert not is_open
            case _:
                raise AssertionError(f"the parser never emits {frame}")
    return parsed


ONE_FUNCTION = Toolset((FunctionTool("f"),))


def turn_started(
    tools: Toolset = ONE_FUNCTION,
    stop: tuple[str, ...] = (),
    sampling: frames.Sampling | None = None,
    logprobs: int | None = None,
    **fields: Any,
) -> frames.GenerationStarted:
    sampling = sampling or frames.Sampling(1.0, 1.0, stop=stop, logprobs=logprobs)
    return frames.GenerationStarted(facts(tools=tools, sampling=sampling), 0, **fields)


def parse_harmony_frames(
    encoding: vocabulary.HarmonyEncoding, sequence: Iterable[frames.TokenFrame]
) -> list[frames.ParsedFrame]:
    """Parse as the stage does; frames without a `GenerationStarted` belong to a turn without options."""
    return _parsed(lambda started: HarmonyParser(encoding, started), sequence)


def parse_harmony_slowly(
    encoding: vocabulary.HarmonyEncoding, sequence: Iterable[frames.TokenFrame]
) -> list[frames.ParsedFrame]:
    """Parse without the hot path."""
    return _parsed(lambda started: HarmonyParser(encoding, started), sequence, is_slow=True)


def _parsed(
    begin: Callable[[frames.GenerationStarted], TurnParser],
    sequence: Iterable[frames.TokenFrame],
    *,
    is_slow: bool = False,
) -> list[frames.ParsedFrame]:
    parser: TurnParser | None = None
    parsed: list[frames.ParsedFrame] = []
    for frame in sequence:
        if isinstance(frame, frames.GenerationStarted):
            parser = begin(frame)
            parsed.append(frame)
            continue
        parser = parser or begin(turn_started())
        delta = None if is_slow else parser.feed_text(frame)
        parsed += (delta,) if delta else parser.feed(frame)
    return parsed


def counted_tokens(parser: TurnParser, chunks: Iterable[frames.TokenChunk]) -> list[TurnTokens]:
    """The tokens of a turn that is cancelled: before its end, after it, and as its last frame counts them."""
    for chunk in chunks:
        if parser.feed_text(chunk) is None:
            list(parser.feed(chunk))
    before = parser.tokens_so_far()
    *_, last = parser.feed(frames.GenerationFinished("cancelled", before.cached, 0.0))
    assert isinstance(last, frames.TurnFinished)
    counted = TurnTokens(before.prompt, last.cached_tokens, last.output_tokens, last.reasoning_tokens)
    return [before, parser.tokens_so_far(), counted]


def parse_harmony(
    encoding: vocabulary.HarmonyEncoding,
    chunks: Iterable[Sequence[int]],
    reason: frames.FinishReason = "stop",
    **fields: Any,
) -> list[ParsedItem]:
    tokens = (frames.TokenChunk(tuple(chunk)) for chunk in chunks if chunk)
    return parsed_items(
        parse_harmony_frames(encoding, [turn_started(**fields), *tokens, frames.GenerationFinished(reason, 0, 0.0)])
    )


def parse_harmony_text(
    encoding: vocabulary.HarmonyEncoding, text: str, reason: frames.FinishReason = "stop", **fields: Any
) -> list[ParsedItem]:
    return parse_harmony(encoding, ([token] for token in encoding.encode_markup(text)), reason, **fields)


def joined_deltas(parsed: list[ParsedItem]) -> list[ParsedItem]:
    return [replace(item, deltas=[item.text]) for item in parsed]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER_TOOL = FunctionTool("get_weather", parameters=CITY)

CHAT_TOOLS = Toolset(
    (
        WEATHER_TOOL,
        FunctionTool("get_time"),
        CustomTool("note"),
        HostedTool("python", "python"),
        HostedTool("browser", "search"),
        HostedTool("container", "exec"),
        McpTool("docs", "ask"),
        McpTool("docs", "write", needs_approval=True),
        FunctionTool("spawn", namespace="team"),
        FunctionTool("shell", form="shell"),
    )
)


def chat_prompt(family: str) -> tuple[int, ...]:
    """The prompt of a family: a question, and the end of its template."""
    return tuple(family_model(family).vocabulary.encode(f"Hi\n{FAMILIES[family].prompt}"))


def chat_tokens(family: str, text: str) -> list[int]:
    """The tokens of a turn without its end."""
    return family_model(family).vocabulary.encode(text)


def ended_chat_tokens(family: str, text: str) -> list[int]:
    return [*chat_tokens(family, text), family_model(family).stop_token_ids[0]]


def chat_turn_started(family: str, turn: frames.ChatTurn | None = None, **fields: Any) -> frames.GenerationStarted:
    turn = turn or frames.ChatTurn(FAMILIES[family].variables)
    return turn_started(**{"tools": CHAT_TOOLS, "prompt": chat_prompt(family), "chat": turn, **fields})


def parse_chat_frames(
    model: ChatModel, sequence: Iterable[frames.TokenFrame], *, is_slow: bool = False
) -> list[frames.ParsedFrame]:
    """Parse as the stage does, or without the hot path."""
    return _parsed(lambda started: ChatParser(model, started), sequence, is_slow=is_slow)


def token_chunks(token_ids: Sequence[int], size: int = 1, *, likely: bool = False) -> list[frames.TokenChunk]:
    """Chunks of ``size`` tokens; ``likely`` adds a different logprob to each token."""
    found = [frames.TokenLogprob(-position / 8) for position in range(len(token_ids))] if likely else []
    return [
        frames.TokenChunk(tuple(token_ids[at : at + size]), tuple(found[at : at + size]))
        for at in range(0, len(token_ids), size)
    ]


def parse_chat_tokens(
    family: str,
    token_ids: Sequence[int],
    reason: frames.FinishReason = "stop",
    *,
    size: int = 1,
    likely: bool = False,
    **fields: Any,
) -> list[frames.ParsedFrame]:
    written, fields = token_chunks(token_ids, size, likely=likely), {"logprobs": 0 if likely else None, **fields}
    return parse_chat_frames(
        family_model(family), [chat_turn_started(family, **fields), *written, frames.GenerationFinished(reason, 0, 0.0)]
    )


def parse_chat(family: str, text: str, **fields: Any) -> list[ParsedItem]:
    return parsed_items(parse_chat_tokens(family, ended_chat_tokens(family, text), **fields))


def parse_cut_chat(family: str, text: str, **fields: Any) -> list[ParsedItem]:
    return parsed_items(parse_chat_tokens(family, chat_tokens(family, text), "length", **fields))


def items_in_brief(parsed: Iterable[ParsedItem]) -> list[tuple[str, str, str]]:
    return [(item.kind, item.name, item.text) for item in parsed]


def turn_finished(parsed: Sequence[frames.ParsedFrame]) -> frames.TurnFinished:
    last = parsed[-1]
    assert isinstance(last, frames.TurnFinished)
    return last


MARKERS = (
    vocabulary.START,
    vocabulary.END,
    vocabulary.MESSAGE,
    vocabulary.CHANNEL,
    vocabulary.CONSTRAIN,
    vocabulary.RETURN,
    vocabulary.CALL,
)
HEADER_WORDS = ("assistant", "analysis", "commentary", "final", " json", "user", "\n")

RECIPIENTS = (
    *(" to=functions.f", " to=functions.g", " to=team.h", " h", " to=python"),
    *(" to=browser.search", " to=container.exec", " to=docs.look-up", " to=docs.write", " to=functions.shell"),
)


def header_tokens() -> list[int]:
    return [token for word in HEADER_WORDS + RECIPIENTS for token in vocabulary.load_encoding().encode(word)]


def any_harmony_tokens() -> st.SearchStrategy[list[int]]:
    """Draw markers, header words, broken UTF-8, reserved ids, ids beyond the vocabulary, and any text."""
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


CLIENT_TOOLS = Toolset((FunctionTool("f"), CustomTool("g"), FunctionTool("h", namespace="team")))

EVERY_TOOL = Toolset(
    (
        *CLIENT_TOOLS.tools,
        FunctionTool("shell", form="shell"),
        McpTool("docs", "look-up"),
        McpTool("docs", "write", needs_approval=True),
        *kinds().tools,
    )
)

TOOLSETS = (
    CLIENT_TOOLS,
    EVERY_TOOL,
    Toolset(),
    structs.replace(CLIENT_TOOLS, choice="none"),
    structs.replace(EVERY_TOOL, allowed=((None, "f"),)),
)


@st.composite
def any_turn_start(draw: st.DrawFn) -> frames.GenerationStarted:
    """Draw a first frame with any fields of the request that the parser reads."""
    return turn_started(
        tools=draw(st.sampled_from(TOOLSETS)),
        stop=draw(st.sampled_from([(), ("e",), (" the", "ing", "\n"), ("��",)])),
        raw_messages=draw(st.sampled_from([None, ()])),
        channel=draw(st.sampled_from([None, "analysis", "commentary", "final"])),
    )


def cut_chunks(tokens: list[int], cuts: Iterable[int], *, likely: bool) -> list[frames.TokenChunk]:
    """Chunks between ``cuts``; ``likely`` adds a different logprob to each token."""
    found = [frames.TokenLogprob(-position / 8) for position in range(len(tokens))] if likely else []
    spans = pairwise([0, *sorted(cuts), len(tokens)])
    return [frames.TokenChunk(tuple(tokens[a:b]), tuple(found[a:b])) for a, b in spans if a < b]

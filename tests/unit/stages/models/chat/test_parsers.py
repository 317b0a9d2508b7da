"""vLLM's parsers: their selection, and the corrections of their output."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from penstock.pipeline.frames import ChatTurn, GenerationFinished
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ChatModel, ContentPiece, Piece
from penstock.stages.models.chat.names import ToolNames
from penstock.stages.models.chat.output import ParsedOutput
from penstock.stages.models.chat.parsers import NamedParsers, UnknownParser
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support import parsed_output
from tests.support.chat_families import THINK, EndingTemplate, family_model, tokenizer_with
from tests.support.clock import count_instructions

pytestmark = pytest.mark.vllm

ONE = functions(Toolset((parsed_output.WEATHER_TOOL,)), ToolNames(Toolset((parsed_output.WEATHER_TOOL,))))
PARIS = ("FunctionCall", "get_weather", '{"city": "Paris"}')
NOON = ("FunctionCall", "get_time", "{}")


# Selection


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("qwen33", None), r"no reasoning parser 'qwen33': there are .*deepseek_r1, .*qwen3, "),
        ((None, "hermez"), r"no tool call parser 'hermez': there are .*hermes, .*mistral, "),
        (("deepseek_r2", "hermes"), r"no reasoning parser 'deepseek_r2'"),
    ],
)
def test_unknown_parser_lists_the_known_ones(names: tuple[str | None, str | None], error: str) -> None:
    with pytest.raises(UnknownParser, match=error):
        NamedParsers(family_model("qwen3").vocabulary.tokenizer, *names)


# How calls are written


@pytest.mark.parametrize(
    ("family", "mark"),
    [
        ("qwen3", "<tool_call>"),
        ("qwen3_coder", "<function="),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("glm45", "<arg_key>"),
        ("minimax_m2", "<minimax:tool_call>"),
    ],
)
def test_family_describes_its_calls(family: str, mark: str) -> None:
    parsers = family_model(family).parsers
    several, single = (parsers.calls(ONE, parallel=parallel) for parallel in (True, False))
    assert mark in str(several)
    assert "get_weather" in str(several)
    assert several != single


@pytest.mark.parametrize("family", ["lfm2", "gemma4"])
def test_family_without_a_grammar_has_no_description(family: str) -> None:
    assert family_model(family).parsers.calls(ONE, parallel=True) is None


# Corrections


def test_mistral_text_after_a_call_is_a_message() -> None:
    arguments = '{"city": "Paris"}'
    for between in ("", "\n", "\n\n"):
        parsed = parsed_output.parse_chat("mistral", f"[TOOL_CALLS]get_weather[ARGS]{arguments}{between}I have asked.")
        assert parsed_output.items_in_brief(parsed) == [PARIS, ("Message", "commentary", "I have asked.")]


class Failing:
    """A wrapper of one of vLLM's parsers that raises at the third delta."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def parse_delta(self, *args: Any, **named: Any) -> Any:
        self._count += 1
        if self._count >= 3:
            raise IndexError("list index out of range")
        return self._real.parse_delta(*args, **named)


def test_failing_parser_leaves_text(plugged: str, caplog: pytest.LogCaptureFixture) -> None:
    model = family_model("qwen3")
    parsers = NamedParsers(model.vocabulary.tokenizer, None, plugged)
    output: Any = parsers.start(parsed_output.turn_started(chat=ChatTurn()), ONE)
    output._parser = Failing(output._parser)
    pieces: list[Piece] = []
    with caplog.at_level(logging.WARNING, "penstock.stages.models.chat.output"):
        for token in model.vocabulary.encode("Hm and then {1}"):
            pieces += output.feed(token, model.vocabulary.decode([token]))
        pieces += output.finish(cut=False)
    assert "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece)).endswith(" then {1}")
    (record,) = caplog.records
    assert record.exc_info
    assert not any(isinstance(piece, CallPiece | ArgumentsPiece) for piece in pieces)


# Parsers of whole outputs

MARKS = (
    *(
        "<tool_calls>",
        "</tool_calls>",
        "<|action_start|>",
        "<|action_end|>",
        "<|plugin|>",
        "<tool_call>",
        "</tool_call>",
    ),
    *("<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
TWO = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {}}]'
WHOLE = {
    "jamba": f"<tool_calls>{TWO}</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>{TWO}</tool_calls>",
    "xlam": TWO,
    "phi4_mini_json": f"functools{TWO}",
    "internlm": '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>',
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer_with(("<|end|>", *MARKS, *THINK)))


def read_whole(vocabulary: Vocabulary, parser: str, text: str, *, is_cut: bool = False) -> list[tuple[str, str, str]]:
    """The items parsed from ``text``; asserts that only the last one may be incomplete."""
    end = vocabulary.marks["<|end|>"]
    model = ChatModel(vocabulary, EndingTemplate(""), NamedParsers(vocabulary.tokenizer, None, parser), (end,), {})
    written = parsed_output.token_chunks([*vocabulary.encode(text), *([] if is_cut else [end])])
    finish = GenerationFinished("length" if is_cut else "stop", 0, 0.0)
    parsed = parsed_output.parsed_items(
        parsed_output.parse_chat_frames(
            model, [parsed_output.turn_started(tools=parsed_output.CHAT_TOOLS, chat=ChatTurn()), *written, finish]
        )
    )
    assert all(item.complete for item in parsed[:-1])
    return parsed_output.items_in_brief(parsed)


@pytest.mark.parametrize("parser", WHOLE)
def test_calls_are_read_at_the_end_of_the_output(parser: str, vocabulary: Vocabulary) -> None:
    calls = [PARIS] if parser == "internlm" else [PARIS, NOON]
    assert read_whole(vocabulary, parser, WHOLE[parser]) == calls


@pytest.mark.parametrize("parser", [name for name in WHOLE if name != "xlam"])  # reads no call after a text
def test_text_before_calls_is_a_message(parser: str, vocabulary: Vocabulary) -> None:
    text = f"I look it up.\n{WHOLE[parser]}"
    texts = [item[2] for item in read_whole(vocabulary, parser, text) if item[0] == "Message"]
    assert texts == ["I look it up."]
    message, call = read_whole(vocabulary, parser, text[: text.index("Par")], is_cut=True)
    assert message[2] == "I look it up."
    assert call == ("FunctionCall", "get_weather", '{"city": "')


@pytest.mark.defect("B35")
@pytest.mark.parametrize("parser", WHOLE)
def test_truncated_call_is_no_text(parser: str, vocabulary: Vocabulary) -> None:
    written = WHOLE[parser]
    for count in range(written.index('"get_'), len(written), 5):
        told_items = read_whole(vocabulary, parser, written[:count], is_cut=True)
        assert [item[0] for item in told_items] in ([], ["FunctionCall"], ["FunctionCall"] * 2), written[:count]
        assert [item[1] for item in told_items] == ["get_weather", "get_time"][: len(told_items)]


@pytest.mark.parametrize("parser", WHOLE)
def test_answer_with_brackets_is_text(parser: str, vocabulary: Vocabulary) -> None:
    text = 'The list is [1, {"a": 2}]. Done'
    for is_cut in (False, True):
        assert [item[0::2] for item in read_whole(vocabulary, parser, text, is_cut=is_cut)] == [("Message", text)]


@pytest.mark.defect("B35")
def test_truncated_list_is_no_text() -> None:
    turn = ChatTurn(calls="list")
    assert parsed_output.parse_cut_chat("granite", '[{"name": "get_w', turn=turn) == []
    assert parsed_output.items_in_brief(
        parsed_output.parse_cut_chat("granite", '[{"name": "get_weather", "parameters": {"ci', turn=turn)
    ) == [("FunctionCall", "get_weather", '{"ci')]
    assert parsed_output.items_in_brief(parsed_output.parse_cut_chat("granite", "I cannot", turn=turn)) == [
        ("Message", "", "I cannot")
    ]


NESTED = {
    "hy_v3": "<tool_calls><tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "</tool_call></tool_calls>",
    "dots": '<dots_function_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>'
    "</dots_function_call>",
    "minicpm5": '<function name="get_weather"><param name="city">Paris</param></function>',
}
"""Calls of parsers that read the tools in the form of Chat Completions."""


@pytest.mark.parametrize("parser", NESTED)
def test_declared_calls_are_read_by_parsers_of_nested_tools(parser: str, vocabulary: Vocabulary) -> None:
    assert read_whole(vocabulary, parser, NESTED[parser]) == [PARIS]


@pytest.mark.slow
def test_cost_of_a_long_call_of_poolside_is_flat(vocabulary: Vocabulary) -> None:
    def cost(words: int) -> int:
        key = "<arg_key>city</arg_key>"
        text = f"<tool_call>get_weather\n{key}<arg_value>{'a warm city ' * words}</arg_value></tool_call>"
        return count_instructions(lambda: read_whole(vocabulary, "poolside_v1", text))

    cost(1)
    assert cost(400) < 5 * cost(100)


GEMMA_CALL = (
    "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:<escape>3<escape>}<end_function_call>"
)


def test_functiongemma_keeps_all_arguments(vocabulary: Vocabulary) -> None:
    [(_, name, arguments)] = read_whole(vocabulary, "functiongemma", GEMMA_CALL)
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris", "days": "3"})


@pytest.mark.parametrize(("parser", "call"), [("functiongemma", GEMMA_CALL), ("minicpm5", NESTED["minicpm5"])])
def test_text_around_calls_is_kept(parser: str, call: str, vocabulary: Vocabulary) -> None:
    items = read_whole(vocabulary, parser, f"I look.\n{call}\nAgain.{call}\nDone.")
    read = [text if kind == "Message" else name for kind, name, text in items]
    assert read == ["I look.", "get_weather", "Again.", "get_weather", "Done."]


def test_call_whose_blanks_were_lost_is_no_message(vocabulary: Vocabulary) -> None:
    text = NESTED["minicpm5"].replace(" name", "name")
    assert read_whole(vocabulary, "minicpm5", text) == [PARIS]


NAMELESS = '[TOOL_CALLS] [{"arguments": {"city": "Paris"}}]'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS] [{"arguments": {"city": "Paris"}, "name": "get_weather"}]', [PARIS]),
        (NAMELESS, [("Message", "", NAMELESS)]),
    ],
)
def test_arguments_before_the_name_are_kept(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert parsed_output.items_in_brief(parsed_output.parse_chat("mistral_old", text)) == expected


def test_parser_without_content_is_refused(vocabulary: Vocabulary) -> None:
    """The parser ``openai`` of vLLM is a stub: penstock reads Harmony itself."""
    with pytest.raises(UnknownParser, match="gpt-oss needs none"):
        NamedParsers(vocabulary.tokenizer, None, "openai")


def test_variables_of_the_template_reach_the_parsers(plugged: str) -> None:
    started = parsed_output.turn_started(chat=ChatTurn({"tool_call_format": "json"}))
    read = NamedParsers(family_model("qwen3").vocabulary.tokenizer, None, plugged).start(started, ONE)
    assert isinstance(read, ParsedOutput)
    assert read._request.chat_template_kwargs == {"tool_call_format": "json"}


@pytest.mark.parametrize("tools", [Toolset(), parsed_output.CHAT_TOOLS])
def test_a_json_answer_with_a_name_is_no_call(tools: Toolset) -> None:
    answer = '{"name": "Ada", "age": 36}'
    read = parsed_output.items_in_brief(parsed_output.parse_chat("llama3", answer, tools=tools))
    assert read == [("Message", "", answer)]

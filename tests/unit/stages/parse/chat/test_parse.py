"""The output of a chat model as items: reasoning, messages, calls of every kind, and the white space between them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import ChatTurn, FinishReason, GenerationFinished, ItemDelta, ReasoningOpened, TokenFrame
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.chat.model import Piece
from penstock.stages.models.chat.names import ToolNames
from penstock.stages.models.chat.output import ReadOutput
from penstock.stages.models.chat.registry import OWN_THOUGHTS
from penstock.stages.models.chat.standalone import OwnParsers
from penstock.stages.parse.chat import parse
from penstock.stages.parse.chat.parse import ParseChat
from tests.support.chat_families import FAMILIES, THINKING_OFF, family_model
from tests.support.parsed_output import (
    CHAT_TOOLS,
    chat_tokens,
    chat_turn_started,
    ended_chat_tokens,
    items_in_brief,
    parse_chat,
    parse_chat_frames,
    parse_chat_tokens,
    parse_cut_chat,
    parsed_items,
    token_chunks,
    turn_finished,
)

pytestmark = pytest.mark.vllm

THOUGHT = "<think>\nLet me see.\n</think>\n\n"
LET_ME_SEE = ("Reasoning", "", "Let me see.")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call("get_weather", '{"city": "Paris"}')
IN_PARIS = ("FunctionCall", "get_weather", '{"city": "Paris"}')

CALLS = {
    "get_weather": ("FunctionCall", "get_weather"),
    "Get_Weather": ("FunctionCall", "get_weather"),
    "browser__search": ("WebCall", "search"),
    "container__exec": ("ShellCall", ""),
    "docs__ask": ("McpCall", "ask"),
    "docs__write": ("McpApproval", "write"),
    "team__spawn": ("FunctionCall", "spawn"),
    "shell": ("FunctionCall", "shell"),
    "made_up": ("Reasoning", ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_opens_the_item_of_its_tool(name: str) -> None:
    assert items_in_brief(parse_chat("qwen3", call(name, '{"a": 1}'))) == [(*CALLS[name], '{"a": 1}')]


@pytest.mark.parametrize(
    ("tools", "name", "refusal"),
    [
        (CHAT_TOOLS, "made_up", "there is no tool 'made_up'. The tools that can be called are {names}."),
        (Toolset(), "made_up", "there is no tool 'made_up'. Go on without it."),
        (
            Toolset(CHAT_TOOLS.tools, "none"),
            "team__spawn",
            "the tool 'team__spawn' cannot be called now. Go on without it.",
        ),
    ],
)
def test_call_that_cannot_be_made_has_an_error_for_the_model(tools: Toolset, name: str, refusal: str) -> None:
    parsed = parse_chat_tokens("qwen3", ended_chat_tokens("qwen3", call(name, "{}")), tools=tools)
    (opening,) = (frame for frame in parsed if isinstance(frame, ReasoningOpened))
    names = ", ".join(map(ToolNames(CHAT_TOOLS).of, CHAT_TOOLS.tools))
    assert opening == ReasoningOpened(name, f"Error: {refusal.format(names=names)}")


@pytest.mark.parametrize(
    ("name", "argument", "kind"), [("note", "input", "CustomToolCall"), ("python", "code", "CodeCall")]
)
def test_tools_with_text_input_get_the_text(name: str, argument: str, kind: str) -> None:
    ((found, _, text),) = items_in_brief(parse_chat("qwen3", call(name, f'{{"{argument}": "a\\n\\ud83e\\uddd1"}}')))
    assert (found, text) == (kind, "a\n🧑")


@pytest.mark.parametrize("name", ["note", "python"])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"patch": "a\\nb"}', "a\nb"),
        ('"a b"', "a b"),
        ('"a \\"b\\""', 'a "b"'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
    ],
)
def test_only_text_is_the_input_whatever_its_name(name: str, written: str, text: str) -> None:
    for size in (1, 3, 100):
        found = parsed_items(parse_chat_tokens("qwen3", ended_chat_tokens("qwen3", call(name, written)), size=size))
        assert [(item.text, item.complete) for item in found] == [(text, True)]


@pytest.mark.parametrize(
    "tools", [Toolset(CHAT_TOOLS.tools, "none"), Toolset(CHAT_TOOLS.tools, allowed=((None, "note"),))]
)
@pytest.mark.parametrize("name", ["get_weather", "made_up"])
def test_forbidden_call_is_reasoning(tools: Toolset, name: str) -> None:
    (item,) = parse_chat("qwen3", call(name, '{"city": "Paris"}'), tools=tools)
    assert (item.kind, item.repairs, item.token_ids) == ("Reasoning", ("undeclared tool",), ())


@pytest.mark.parametrize(
    ("family", "mark"),
    [
        ("qwen3_coder", "<tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("minimax_m2", "<minimax:tool_call>"),
        ("gemma4", "<|tool_call>"),
        ("glm45", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral_old", "[TOOL_CALLS]"),
    ],
)
def test_mark_in_a_sentence_is_text(family: str, mark: str) -> None:
    thought = "</think>" if family in ("qwen3_coder", "kimi_k2", "minimax_m2", "glm45") else ""
    (item,) = parse_chat(family, f"{thought}Write {mark} around it.")
    assert (item.kind, item.text, item.repairs) == ("Message", f"Write {mark} around it.", ())


@pytest.mark.parametrize("family", ["glm45", "minimax_m2"])
def test_call_of_an_unknown_function_keeps_its_arguments(family: str) -> None:
    markup = {
        "glm45": "<tool_call>get_wether\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "minimax_m2": '</think><minimax:tool_call>\n<invoke name="get_wether">\n<parameter name="city">'
        "Paris</parameter>\n</invoke>\n</minimax:tool_call>",
    }
    ((kind, name, arguments),) = items_in_brief(parse_chat(family, markup[family]))
    assert (kind, name, json.loads(arguments)) == ("Reasoning", "", {"city": "Paris"})


def test_thought_is_the_answer_if_the_request_wants_one_in_any_case() -> None:
    thought = "The user wants the weather in Paris, and it is warm."
    turn = ChatTurn({"force_nonempty_content": True})
    assert items_in_brief(parse_chat("nemotron", thought, turn=turn)) == [
        ("Message", "", thought),
    ]
    assert items_in_brief(parse_chat("nemotron", f"{thought}</think>Warm.", turn=turn)) == [
        ("Reasoning", "", thought),
        ("Message", "", "Warm."),
    ]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v31", "step3"])
def test_call_without_arguments_has_an_empty_object(family: str) -> None:
    """Clients expect JSON."""
    markup = {
        "qwen3": f"<think>\n\n</think>\n\n{call('get_time', '{}')}",
        "deepseek_v31": "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "step3": "</think><｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_time"></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    }
    assert items_in_brief(parse_chat(family, markup[family])) == [("FunctionCall", "get_time", "{}")]


@pytest.mark.parametrize(("long", "in_threads"), [(10, 1), (500, 0)])
async def test_end_of_a_long_call_is_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, long: int, in_threads: int
) -> None:
    """Several parsers read all of the call again there, and other responses would wait."""
    threads = set[int]()

    def finish(output: ReadOutput, *, cut: bool) -> Sequence[Piece]:
        threads.add(threading.get_ident())
        return finish_here(output, cut=cut)

    finish_here = ReadOutput.finish
    monkeypatch.setattr(ReadOutput, "finish", finish)
    monkeypatch.setattr(parse, "_LONG_TOKENS", long)
    chunks = token_chunks(ended_chat_tokens("qwen3", THOUGHT + PARIS))
    turn: list[TokenFrame] = [chat_turn_started("qwen3"), *chunks, GenerationFinished("stop", 0, 0.0)]
    given = [frame async for frame in ParseChat(family_model("qwen3"))(source_of(turn))]
    assert items_in_brief(parsed_items(given)) == [LET_ME_SEE, IN_PARIS]
    assert len(threads - {threading.get_ident()}) == in_threads


def test_white_space_of_markup_is_no_text() -> None:
    assert items_in_brief(parse_chat("qwen3", f"<think>\n\n</think>\n\n{PARIS}\n\n{PARIS}\n")) == [IN_PARIS, IN_PARIS]
    assert items_in_brief(parse_chat("qwen3", "\n\n  Hello\n")) == [("Reasoning", "", "  Hello")]
    off = tuple(chat_tokens("qwen3", THINKING_OFF))
    assert items_in_brief(parse_chat("qwen3", "\n\n  Hello \n", prompt=off)) == [("Message", "", "\n\n  Hello \n")]
    on = ChatTurn(continues=True)
    assert items_in_brief(parse_chat("qwen3", " world", turn=on)) == [("Message", "", " world")]
    assert parse_chat("qwen3", "\n", prompt=off) == []


def test_every_token_belongs_to_an_item() -> None:
    written = f"{THOUGHT}Sure.\n\n{PARIS}\n{PARIS}"
    parsed = parse_chat("qwen3", written)
    assert [*chain.from_iterable(item.token_ids for item in parsed)] == ended_chat_tokens("qwen3", written)
    assert chat_tokens("qwen3", THOUGHT.rstrip()) == list(parsed[0].token_ids)


def test_truncated_item_is_incomplete() -> None:
    for written in ("<think>\nLet me", THOUGHT + "Hel", f"{THOUGHT}{PARIS[:50]}"):
        *whole, last = parse_cut_chat("qwen3", written)
        assert (last.complete, last.token_ids) == (False, ())
        assert all(item.complete for item in whole)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_partial_character_is_no_text(reason: FinishReason) -> None:
    """It would break the arguments of a call, and unfinished markup has no text for it."""
    half = chat_tokens("qwen3", "🧑")[:-1]
    for written in (THOUGHT + "Hello", THOUGHT + PARIS, f"{THOUGHT}{PARIS[:50]}"):
        whole = parsed_items(parse_chat_tokens("qwen3", chat_tokens("qwen3", written), reason))
        assert items_in_brief(
            parsed_items(parse_chat_tokens("qwen3", [*chat_tokens("qwen3", written), *half], reason))
        ) == items_in_brief(whole)


BEGINNINGS = {
    "thought": ("qwen3", "<think>\nno, "),
    "answer": ("qwen3", f"{THOUGHT}no, "),
    "JSON": ("qwen3", f'{THOUGHT}<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "no, '),
    "text of a tool": ("qwen3", f'{THOUGHT}<tool_call>\n{{"name": "note", "arguments": {{"input": "no, '),
    "value between tags": ("glm45", "</think><tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>no, "),
}


@pytest.mark.parametrize("name", BEGINNINGS)
@given(
    st.text(st.sampled_from("🦩👩\u200d🚀é漢 "), min_size=1, max_size=8),
    st.sampled_from(["length", "cancelled", "stop"]),
    st.integers(1, 3),
    st.data(),
)
def test_cut_text_ends_before_an_unfinished_character(
    name: str, text: str, reason: FinishReason, size: int, data: st.DataObject
) -> None:
    family, begun = BEGINNINGS[name]
    begins, written = chat_tokens(family, begun), chat_tokens(family, text)
    kept = written[: data.draw(st.integers(0, len(written)))]
    (*_, item) = parsed_items(parse_chat_tokens(family, [*begins, *kept], reason, size=size))
    whole = b"".join(family_model(family).vocabulary.token_bytes[token] for token in kept).decode(errors="ignore")
    assert item.text.rstrip().endswith(f"no, {whole}".rstrip())


EMPTY = {
    "qwen3": "<tool_call>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_calls_section_end|>",
    "glm45": "<tool_call></tool_call>",
    "gemma4": "<|tool_call><tool_call|>",
    "minimax_m2": "<minimax:tool_call>\n</minimax:tool_call>",
}
NO_THOUGHT = {"qwen3": "<think>\n\n</think>\n\n", "gemma4": ""}


@pytest.mark.parametrize("family", EMPTY)
def test_empty_call_is_a_repair_of_the_turn(family: str) -> None:
    """An agent that stops here says nothing else of why it does."""
    markup = f"{NO_THOUGHT.get(family, '</think>')}{EMPTY[family]}"
    parsed = parse_chat_tokens(family, ended_chat_tokens(family, markup))
    assert (parsed_items(parsed), turn_finished(parsed).repairs) == ([], ("empty call",))


@pytest.mark.parametrize("family", ["qwen3", "kimi_k2", "minimax_m2"])
def test_empty_call_is_a_repair_of_the_open_item(family: str) -> None:
    markup = f"{'<think>' if family == 'qwen3' else ''}Look.</think>{EMPTY[family]}"
    parsed = parse_chat_tokens(family, ended_chat_tokens(family, markup))
    (item,) = parsed_items(parsed)
    assert (item.text, item.repairs, turn_finished(parsed).repairs) == ("Look.", ("empty call",), ())


def test_unfinished_reasoning_has_no_message() -> None:
    assert items_in_brief(parse_chat("qwen3", "<think>\nHm.")) == [("Reasoning", "", "Hm.")]


@pytest.mark.defect("24")
@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_tokens_are_counted(size: int) -> None:
    inside = len(chat_tokens("qwen3", "\nLet me see.\n"))
    assert (
        turn_finished(
            parse_chat_tokens("qwen3", ended_chat_tokens("qwen3", THOUGHT + "Hello"), size=size)
        ).reasoning_tokens
        == inside
    )


@pytest.mark.defect("24")
def test_reasoning_opened_by_the_prompt_is_reasoning() -> None:
    parsed = parse_chat_tokens("deepseek_r1", ended_chat_tokens("deepseek_r1", "Hm.</think>Hello"))
    assert items_in_brief(parsed_items(parsed)) == [("Reasoning", "", "Hm."), ("Message", "", "Hello")]
    assert turn_finished(parsed).reasoning_tokens == len(chat_tokens("deepseek_r1", "Hm."))


THINKING_FAMILIES = [
    name for name, family in FAMILIES.items() if family.reasoning and name not in {"deepseek_v31", "mistral"}
]
"""The families whose prompts may end in a thought: the marks of the others are not known, or not in the prompt."""


@pytest.mark.parametrize("family", THINKING_FAMILIES)
@pytest.mark.parametrize("own", [False, True])
def test_continued_thought_goes_on(family: str, own: bool) -> None:
    """Its first text begins as it is, and the mark that begins it may be far back in the prompt."""
    model = family_model(family)
    if own and FAMILIES[family].reasoning in OWN_THOUGHTS:
        model = replace(
            model, parsers=OwnParsers(model.vocabulary, OWN_THOUGHTS[FAMILIES[family].reasoning or ""], None)
        )
    assert model.parsers.thinking is not None
    begin, end = model.parsers.thinking
    prompt = tuple(model.vocabulary.encode(f"Hi\n{begin}\n{'The user wants ' * 20}the"))
    written = [*model.vocabulary.encode(f"\n\n weather.{end}Paris is warm."), model.stop_token_ids[0]]
    started = chat_turn_started(family, ChatTurn(FAMILIES[family].variables, thinks=True), prompt=prompt)
    frames = parse_chat_frames(model, [started, *token_chunks(written), GenerationFinished("stop", 0, 0.0)])
    assert items_in_brief(parsed_items(frames)) == [
        ("Reasoning", "", "\n\n weather."),
        ("Message", "", "Paris is warm."),
    ]


@pytest.mark.defect("B4", "B5")
def test_reasoning_and_message_are_two_items() -> None:
    assert items_in_brief(parse_chat("qwen3", THOUGHT + "Hello there!")) == [
        LET_ME_SEE,
        ("Message", "", "Hello there!"),
    ]


@pytest.mark.defect("B35")
def test_markup_never_reaches_the_text() -> None:
    assert items_in_brief(parse_chat("qwen3", f"{THOUGHT}Sure.\n\n{PARIS}\n{PARIS}\nDone.")) == [
        LET_ME_SEE,
        ("Message", "", "Sure."),
        IN_PARIS,
        IN_PARIS,
        ("Message", "commentary", "Done."),
    ]


@pytest.mark.defect("32")
def test_call_arguments_stream() -> None:
    parsed = parse_chat_tokens("qwen3", ended_chat_tokens("qwen3", f"</think>{PARIS}"))
    assert len([frame for frame in parsed if isinstance(frame, ItemDelta)]) > 2


@pytest.mark.defect("B27")
@pytest.mark.parametrize("size", [1, 4, 100])
def test_only_message_text_has_logprobs(size: int) -> None:
    written = ended_chat_tokens("qwen3", f"{THOUGHT}Hello, wörld 🧑!\n\n{PARIS}")
    thought, message, called = parsed_items(parse_chat_tokens("qwen3", written, size=size, likely=True))
    assert not thought.logprobs
    assert not called.logprobs
    assert b"".join(bytes(logprob.bytes) for logprob in message.logprobs) == message.text.encode()
    first = written.index(chat_tokens("qwen3", "Hello")[0], len(chat_tokens("qwen3", THOUGHT)))
    assert message.logprobs[0].logprob == -first / 8


def test_stop_string_ends_the_item() -> None:
    (_, message) = parse_chat("qwen3", THOUGHT + "one two three", stop=("two",))
    assert (message.text, message.token_ids) == ("one ", ())


def test_raw_messages_have_all_text_and_tokens() -> None:
    written = ended_chat_tokens("qwen3", THOUGHT + "Hello")
    parsed = turn_finished(parse_chat_tokens("qwen3", written, raw_messages=())).raw_messages
    assert parsed is not None
    (raw,) = parsed
    assert raw["tokens"] == written
    assert raw["message"] == family_model("qwen3").vocabulary.decode(written)


def test_turn_without_its_required_call_has_failed() -> None:
    """The engine did not enforce the grammar, so the answer is not passed on."""
    tools = Toolset(CHAT_TOOLS.tools, "required")
    with pytest.raises(EngineFailed):
        parse_chat("qwen3", THOUGHT + "No.", tools=tools, held_to_grammar=True)
    assert items_in_brief(parse_chat("qwen3", PARIS, tools=tools, held_to_grammar=True)) == [IN_PARIS]

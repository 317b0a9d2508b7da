"""The tiny Qwen: its tokenizer, template and script are what a chat model of that family has.

What its weights say is compared with the script by ``fixtures/tiny_qwen/check.py``, on the real engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from fixtures.tiny_qwen.script import (
    HARMONY_SCRIPT,
    HERE,
    Conversation,
    HistoryStyle,
    Message,
    Template,
    Turn,
    load_conversations,
    open_messages,
)
from stages.chat.vocabulary import Vocabulary

TEMPLATE = Template()
SCRIPT = load_conversations()
SPECIAL = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
PLAIN_MARKS = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HELLO = {"role": "user", "content": "Say hello."}


def test_the_marks_are_single_tokens_and_only_those_of_the_frame_are_special() -> None:
    tokenizer = TEMPLATE.tokenizer
    assert set(Vocabulary(tokenizer).marks) == SPECIAL | PLAIN_MARKS
    assert all(len(TEMPLATE.ids(mark)) == 1 for mark in SPECIAL | PLAIN_MARKS)
    everything = "".join(sorted(SPECIAL | PLAIN_MARKS))
    shown = tokenizer.decode(TEMPLATE.ids(everything), skip_special_tokens=True)
    assert shown == "".join(sorted(PLAIN_MARKS))


@given(st.text())
def test_any_text_goes_through_the_tokenizer_and_back(text: str) -> None:
    assert TEMPLATE.tokenizer.decode(TEMPLATE.ids(text), skip_special_tokens=False) == text


@given(st.text())
def test_one_token_after_another_makes_the_same_text(text: str) -> None:
    token_bytes = Vocabulary(TEMPLATE.tokenizer).token_bytes
    assert b"".join(token_bytes[token] for token in TEMPLATE.ids(text)).decode() == text


@pytest.mark.parametrize("conversation", SCRIPT.values(), ids=list(SCRIPT))
def test_every_completion_goes_through_the_tokenizer_and_back(conversation: Conversation) -> None:
    for turn in conversation.turns:
        for completion in (turn.completion(), turn.completion(thinking=False)):
            assert TEMPLATE.tokenizer.decode(TEMPLATE.ids(completion)) == completion


def test_the_end_of_a_turn_stops_the_model() -> None:
    configured = json.loads((HERE / "generation_config.json").read_text())["eos_token_id"]
    assert set(configured) == {TEMPLATE.ids("<|im_end|>")[0], TEMPLATE.ids("<|endoftext|>")[0]}
    assert TEMPLATE.tokenizer.eos_token == "<|im_end|>"


def test_the_weights_have_a_row_for_every_token() -> None:
    config = json.loads((HERE / "config.json").read_text())
    with safe_open(HERE / "model.safetensors", framework="np") as tensors:
        rows, width = tensors.get_slice("model.embed_tokens.weight").get_shape()
    assert (rows, width) == (config["vocab_size"], config["hidden_size"])
    assert rows == len(TEMPLATE.tokenizer)


def test_the_model_is_small() -> None:
    assert sum(path.stat().st_size for path in HERE.iterdir() if path.is_file()) < 1_000_000


def test_a_prompt_ends_where_the_model_begins() -> None:
    assert TEMPLATE.prompt([HELLO]) == "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_is_the_models_own_unless_it_is_off() -> None:
    assert TEMPLATE.prompt([HELLO], enable_thinking=True) == TEMPLATE.prompt([HELLO])
    assert TEMPLATE.prompt([HELLO], enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_while_the_request_is_open_and_dropped_afterwards(key: str) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    thought = {"role": "assistant", "content": "Wait.", key: "Look it up.", "tool_calls": [call]}
    exchange: list[Message] = [HELLO, thought, {"role": "tool", "content": "18"}]
    shown = (
        "<|im_start|>assistant\n<think>\nLook it up.\n</think>\n\nWait.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
    )
    assert shown in TEMPLATE.prompt(exchange)
    later: list[Message] = [*exchange, {"role": "assistant", "content": "It is 18."}, HELLO]
    assert "Look it up." not in TEMPLATE.prompt(later)
    assert shown in TEMPLATE.prompt(later, preserve_thinking=True)


def test_results_that_follow_each_other_share_a_turn() -> None:
    prompt = TEMPLATE.prompt(open_messages(SCRIPT["two_calls_at_once"].turns, HistoryStyle()))
    shared = (
        '<|im_start|>user\n<tool_response>\n{"temperature":12,"unit":"C"}\n</tool_response>\n'
        '<tool_response>\n{"temperature":20,"unit":"C"}\n</tool_response><|im_end|>\n'
    )
    assert shared in prompt
    assert '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}' in prompt


def test_results_between_calls_have_turns_of_their_own() -> None:
    prompt = TEMPLATE.prompt(open_messages(SCRIPT["two_calls_at_once"].turns, HistoryStyle(interleave=True)))
    assert prompt.count("<|im_start|>user\n<tool_response>") == 2
    assert "</tool_response>\n<tool_response>" not in prompt


@pytest.mark.parametrize("thought", ["The user wants a greeting.", ""])
def test_an_answer_half_said_is_left_open_with_its_thought_closed(thought: str) -> None:
    half = {"role": "assistant", "content": "Hello! How", "reasoning": thought}
    end = f"<|im_start|>assistant\n<think>\n{thought}\n</think>\n\nHello! How"
    assert TEMPLATE.prompt([HELLO, half]).endswith(end)


def test_arguments_are_shown_as_text_or_as_what_they_hold() -> None:
    def shown(arguments: Any) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return TEMPLATE.prompt([HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, HELLO])

    assert '"arguments": {"a": "é <b> \\n"}}\n</tool_call>' in shown({"a": "é <b> \n"})
    assert '"arguments": {"a":1}}\n</tool_call>' in shown('{"a":1}')
    assert '"arguments": {}}\n</tool_call>' in shown({})


def test_tools_stand_in_the_system_message_with_the_instructions() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "nice."}]
    prompt = TEMPLATE.prompt([{"role": "developer", "content": parts}, HELLO], [TOOL])
    assert prompt.startswith("<|im_start|>system\nBe nice.\n\n")
    assert json.dumps(TOOL) in prompt
    assert prompt.count("<|im_start|>") == 3
    assert TEMPLATE.prompt([HELLO], [TOOL]).startswith("<|im_start|>system\n# ")


def test_all_of_the_first_script_is_in_this_one() -> None:
    first = {entry["name"]: entry for entry in json.loads(Path(HARMONY_SCRIPT).read_text(encoding="utf-8"))}
    for name, entry in first.items():
        assert [turn.user for turn in SCRIPT[name].turns] == [turn.get("user") for turn in entry["turns"]]
    assert set(SCRIPT) > set(first)


def test_harmony_becomes_chat() -> None:
    preamble, _ = SCRIPT["preamble_before_call"].turns
    assert preamble.completion() == (
        "<think>\nFirst the plan, then the call.\n</think>\n\nI will look up the weather in Madrid.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Madrid"}}\n</tool_call><|im_end|>'
    )
    python = SCRIPT["mixed_turn"].turns[0]
    assert [(call.name, call.arguments) for call in python.calls] == [
        ("python", '{"code": "print(6 * 7)"}'),
        ("ask_name", "{}"),
    ]
    assert SCRIPT["browser_builtin"].turns[0].calls[0].name == "browser__search"
    assert SCRIPT["mcp_sum"].turns[0].calls[0].name == "calculator__add"


def test_without_thinking_only_the_thought_is_missing() -> None:
    turn = Turn(reasoning="Why.", text="So.")
    assert turn.completion() == "<think>\nWhy.\n</think>\n\n" + turn.completion(thinking=False)

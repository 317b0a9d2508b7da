"""What the fixtures of chat models say, written by hand: one table for all families, and where one of them differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tests.support.chat_families import FAMILIES
from tests.support.paths import TINY_QWEN

Kind: TypeAlias = Literal["thought", "message", "call"]


@dataclass(frozen=True)
class Told:
    """An item: its text, of a call its arguments, and whether it was told to its end."""

    kind: Kind
    text: str
    name: str = ""
    complete: bool = True

    def tells(self, other: Told) -> bool:
        """Whether ``other`` says the same; whole arguments may be spaced in any way."""
        return self._said() == other._said()

    def _said(self) -> object:
        whole = self.kind == "call" and self.complete and _is_json(self.text)
        return self.kind, self.name, self.complete, json.loads(self.text) if whole else self.text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def thought(text: str = "The user wants the weather.") -> Told:
    return Told("thought", text)


def message(text: str) -> Told:
    return Told("message", text)


def weather(arguments: str) -> Told:
    return Told("call", arguments, "get_weather")


def cut(told: Told) -> Told:
    return Told(told.kind, told.text, told.name, complete=False)


THOUGHT = thought()
PARIS = weather('{"city": "Paris"}')
THREE_DAYS = weather('{"city": "Paris", "days": 3}')
AFTERWARDS = message("I have asked.")
NESTED = (
    '{"query": "say \\"hi\\" if a < b & 1 > 0", '
    '"filter": {"names": ["Zoë", "日本 🧑\u200d🚀"], "limit": 3, "exact": true}}'
)

EXPECTED: Mapping[str, tuple[Told, ...]] = {
    "text": (message("Paris is warm."),),
    "thought_and_text": (THOUGHT, message("Paris is warm.")),
    "cut_in_thought": (cut(thought("The user wants the")),),
    "call": (THOUGHT, PARIS),
    "two_calls": (THOUGHT, THREE_DAYS, weather('{"city": "Rome", "days": 5}')),
    "text_and_call": (THOUGHT, message("I look it up."), PARIS),
    "cut_in_second_call": (THOUGHT, THREE_DAYS, cut(weather('{"city": "Ro'))),
    "cut_in_name": (THOUGHT,),
    "nested_arguments": (THOUGHT, Told("call", NESTED, "search")),
    "no_arguments": (THOUGHT, Told("call", "{}", "get_time")),
    "text_after_call": (THOUGHT, PARIS, AFTERWARDS),
    "half_a_mark": (message("Write <tool"),),
    "mark_in_text": (message("Write <function=name> and close it."),),
    "mark_as_text": (PARIS,),
    "call_in_thought": (THOUGHT, PARIS),
    "text_between_calls": (THOUGHT, PARIS, message("Now the other one."), weather('{"city": "Rome"}')),
    "call_without_name": (
        THOUGHT,
        message('<tool_call>\n{"function": "get_weather", "city": "Paris"}\n</tool_call>'),
    ),
    "broken_arguments": (THOUGHT, weather('{"city": Paris}')),
    "undeclared_tool": (THOUGHT, Told("call", '{"city": "Paris"}', "get_wether")),
    "call_unasked": (THOUGHT, PARIS),
    "python_tag": (PARIS,),
    "json_answer": (message('{"city": "Paris"}'),),
}
"""By the name of the case; families that do not think have no thought in any of them."""

SERVED: Mapping[str, tuple[Told, ...]] = {
    "greeting": (thought("The user wants a greeting."), message("Hello!")),
    "earlier_turn": (thought("It was seven."), message("Seven.")),
    "thinking_off": (message("I look it up."), PARIS),
    "call_result": (thought("The tool answered."), message("It is 18 °C in Paris.")),
    "custom_tool_call": (
        thought("A query will tell."),
        Told("call", 'SELECT count(*)\nFROM users  -- "all" 日本', "run_sql"),
    ),
    "custom_tool_call_cut": (thought("A query will tell."), cut(Told("call", "SELECT count(*)\nFR", "run_sql"))),
    "call_in_namespace": (thought("The manual knows."), Told("call", '{"question": "What is a stage?"}', "ask")),
    "choice_of_one_function": (THOUGHT, PARIS),
    "json_schema": (thought("JSON is wanted."), message('{"name": "Ada", "age": 36}')),
    "stop_text": (thought("I count up."), message("One, two, ")),
}
"""The same for the tiny model, whose requests ask for more."""

OTHERWISE: Mapping[str, tuple[Told, ...]] = {
    "qwen3_coder_half_a_mark": (message("Write <function"),),
    "llama3_half_a_mark": (message("Write <|python"),),
    # What parsers keep to themselves, and nobody can give back: see the README of the fixtures.
    "deepseek_v4_cut_in_second_call": (THOUGHT, THREE_DAYS, cut(weather('{"city": "'))),
    "deepseek_v4_text_after_call": (THOUGHT, PARIS),
    "ernie45_cut_in_second_call": (THOUGHT, THREE_DAYS),
    "ernie45_text_after_call": (THOUGHT, PARIS),
    "gemma4_cut_in_second_call": (THOUGHT, THREE_DAYS, cut(weather('{"city": "'))),
    "kimi_k2_text_after_call": (THOUGHT, PARIS),
    "llama3_cut_in_second_call": (THREE_DAYS, cut(weather('{"city": "R'))),
    "llama3_text_after_call": (PARIS,),
    "llama3_text_and_call": (message('I look it up.\n\n{"name": "get_weather", "parameters": {"city": "Paris"}}'),),
    "qwen3_coder_mark_in_text": (message("Write"), Told("call", "{}", "name")),
    "step3_cut_in_second_call": (THOUGHT, THREE_DAYS, cut(weather(""))),
    "step3_nested_arguments": (
        THOUGHT,
        Told("call", json.dumps({"filter": json.dumps(json.loads(NESTED)["filter"], ensure_ascii=False)}), "search"),
    ),
}
"""By the name of the folder."""


def expected(folder: str) -> tuple[Told, ...]:
    """What the case in ``folder`` says."""
    family = family_of(folder)
    case = folder.removeprefix(f"{family}_")
    if family == TINY_QWEN.name:
        return SERVED[case]
    told = OTHERWISE[folder] if folder in OTHERWISE else EXPECTED[case]
    return told if FAMILIES[family].reasoning else tuple(item for item in told if item.kind != "thought")


def family_of(folder: str) -> str:
    """The family whose case is in ``folder``."""
    return max((family for family in FAMILIES if folder.startswith(f"{family}_")), key=len)

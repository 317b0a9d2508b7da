"""Engines whose model knows what vLLM's tests of Responses ask: ``--engine``.

A tiny model knows other requests.  This one reads the question at the end of the prompt, and writes a thought, and then
calls of the tools that the question names, or the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from penstock.api.settings import Settings
from penstock.pipeline.frames import EngineFrame, Prompt, TokenLogprob
from penstock.pipeline.protocol.tools import FunctionTool, HostedTool
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.chat.names import ToolNames
from penstock.stages.models.chat.standalone import ModelFiles
from penstock.stages.models.harmony.vocabulary import load_encoding

THOUGHT = "I think about it."
STORY = "Once upon a time there was a cat. "
EVENT = {"date": "Friday", "participants": ["Alice", "Bob"]}
_NAME = re.compile(r"name is (?!not)(\w+)")


@dataclass(frozen=True)
class Reading:
    """The parts of a prompt: all of its text, the last question of the user, and the results behind it."""

    text: str
    question: str
    results: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A turn of the model: calls by name, with arguments or code, or a text; a story does not end."""

    calls: tuple[tuple[str, Any], ...] = ()
    text: str = ""
    is_endless: bool = False


def _read(text: str, of_user: re.Pattern[str], of_tool: re.Pattern[str]) -> Reading:
    *_, question = of_user.finditer(text)
    start = 0 if "tool result" in question[1] else question.end()
    return Reading(text, question[1], tuple(of_tool.findall(text, start)))


def answer(reading: Reading, prompt: Prompt) -> Answer:
    """Return the turn of a model that knows the request."""
    question = reading.question
    if re.search(r"long story|Moby Dick|350 words", question):
        return Answer(text=STORY, is_endless=True)
    if calls := (*_calls(question, prompt),)[len(reading.results) :]:
        return Answer(calls)
    end = " QED." if "QED" in reading.text else ""
    return Answer(text=f"{_text(reading)}{end}")


def _text(reading: Reading) -> str:
    question = reading.question
    if reading.results:
        return f"It is this: {reading.results[-1]}"
    if "science fair" in question:
        name = "event_name" if "event_name" in reading.text or "CalendarEvent" not in reading.text else "name"
        return json.dumps({name: "Science Fair", **EVENT})
    if "name again" in question:
        return [found[1] for found in _NAME.finditer(reading.text)][-1]
    if product := re.search(r"(\d+) \* (\d+)", question):
        return f"The result is {int(product[1]) * int(product[2])}."
    return "It is 30." if "Multiply the result" in question else "Hello to you, and good day."


def _calls(question: str, prompt: Prompt) -> Iterator[tuple[str, Any]]:
    for tool in prompt.facts.tools.tools:
        match tool:
            case HostedTool(name="python") if code := _code(question):
                yield "python", code
            case FunctionTool(name=name, parameters=schema) if _word(name) in question.lower():
                yield ToolNames(prompt.facts.tools).of(tool), _arguments(schema or {})
            case _:
                pass


def _word(name: str) -> str:
    """Return the word of a question that a function is called for."""
    word = name.rpartition("_")[2]
    return {"travel": "trip"}.get(word, word)


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    of_types = {"number": 1.5, "integer": 5, "boolean": True, "string": "Berlin"}
    properties = schema.get("properties", {})
    return {
        name: properties[name].get("enum", [of_types.get(properties[name].get("type", ""))])[0]
        for name in schema.get("required", ())
    }


def _code(question: str) -> str:
    if asked := re.search(r"following code: (.*)", question):
        return asked[1]
    if "cube root" in question:
        return "print(str((19910212 * 20250910) ** (1 / 3)).partition('.')[2][:4])"
    product = re.search(r"\d+ \* \d+", question)
    return f"print({product[0]})" if product and "ython" in question else ""


class AnsweringEngine(ScriptedEngine):
    """Play the answer to a prompt, as ``decode`` reads it and ``written`` spells it."""

    def __init__(
        self,
        model: str,
        decode: Callable[[Prompt], str],
        read: Callable[[str], Reading],
        written: Callable[[Answer, str], list[int]],
    ) -> None:
        super().__init__(models=(model,))
        self._decode, self._read, self._written = decode, read, written

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        text = self._decode(prompt)
        meant = answer(self._read(text), prompt)
        tokens = self._written(meant, text)
        count = prompt.facts.sampling.logprobs
        top = [tuple(((token + place) % 1000, -0.25 - place) for place in range(count or 0)) for token in tokens]
        self.script = Script(
            tokens,
            endless=meant.is_endless,
            latency=0.01 if meant.is_endless else 0,
            logprobs=[TokenLogprob(-0.25, each) for each in top],
        )
        async with super().open(prompt) as frames:
            yield frames


# A gpt-oss

_HARMONY_USER = re.compile(r"<\|start\|>user<\|message\|>(.*?)<\|end\|>", re.DOTALL)
_HARMONY_RESULT = re.compile(
    r"<\|start\|>[\w.]+ to=assistant[^<]*(?:<\|channel\|>\w+)?<\|message\|>(.*?)<\|end\|>", re.DOTALL
)


def harmony_engine(_: Settings) -> AnsweringEngine:
    """Return the engine of a gpt-oss."""
    encoding = load_encoding()

    def written(meant: Answer, _: str) -> list[int]:
        thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        calls = [
            "<|channel|>commentary to=python code<|message|>" + arguments
            if name == "python"
            else f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"
            for name, arguments in meant.calls
        ]
        end = f"{calls[0]}<|call|>" if calls else f"<|channel|>final<|message|>{meant.text}"
        return [*encoding.encode_markup(thought + end + ("" if calls or meant.is_endless else "<|return|>"))]

    return AnsweringEngine("tiny_gpt_oss", lambda prompt: encoding.decode(prompt.token_ids), _read_harmony, written)


def _read_harmony(text: str) -> Reading:
    return _read(text, _HARMONY_USER, _HARMONY_RESULT)


# A Qwen

_QWEN_USER = re.compile(r"<\|im_start\|>user\n(?!<tool_response>)(.*?)<\|im_end\|>", re.DOTALL)
_QWEN_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def qwen_engine(settings: Settings) -> AnsweringEngine:
    """Return the engine of a Qwen."""
    tokenizer = ModelFiles(str(settings.model)).tokenizer

    def written(meant: Answer, prompt: str) -> list[int]:
        thought = "" if prompt.rstrip().endswith("</think>") else f"<think>\n{THOUGHT}\n</think>\n\n"
        calls = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in meant.calls
        )
        end = "" if meant.is_endless else "<|im_end|>"
        tokens: list[int] = tokenizer.encode(f"{thought}{calls or meant.text}{end}", add_special_tokens=False)
        return tokens

    return AnsweringEngine("tiny_qwen", lambda prompt: str(tokenizer.decode(prompt.token_ids)), _read_qwen, written)


def _read_qwen(text: str) -> Reading:
    return _read(text, _QWEN_USER, _QWEN_RESULT)

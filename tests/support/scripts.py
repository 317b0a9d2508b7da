"""What the scripted engine says in the tests of the edge."""

from __future__ import annotations

from typing import Any, TypeAlias

from stages.generate.scripted import Script, ScriptedEngine
from stages.harmony import HarmonyEncoding
from tests.support.server import Served

Scripted: TypeAlias = Served[ScriptedEngine]

HELLO = "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    ' <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
)
COUNT = (
    "<|channel|>analysis<|message|>Let me count.<|end|><|start|>assistant<|channel|>final<|message|>"
    + " ".join(map(str, range(1, 100)))
    + "<|return|>"
)
ENDLESS = "<|channel|>final<|message|>" + "la " * 50

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def script(encoding: HarmonyEncoding, text: str = HELLO, **options: Any) -> Script:
    """A script that says ``text``, which may hold markers."""
    return Script(encoding.encode_markup(text), **options)

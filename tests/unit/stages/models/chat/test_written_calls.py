"""Grammars of calls from the descriptions of families, where vLLM has none: what they accept, and who has neither."""

from __future__ import annotations

import json
import logging
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline.frames import GenerationFinished
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.chat.forms import CALL_FORMS
from penstock.stages.models.chat.load import log_undescribed
from penstock.stages.models.chat.standalone import OwnParsers
from penstock.stages.models.chat.written_calls import WrittenCalls, chosen
from penstock.stages.render.chat.parameters import STYLES
from tests.support.call_markup import CALL_MARKUP, CITY, END, marked_model
from tests.support.chat_families import chat_grammar
from tests.support.parsed_output import parse_chat_frames, parsed_items, token_chunks, turn_started

pytestmark = pytest.mark.vllm

CITY_ALONE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = Toolset((FunctionTool("get_weather", parameters=CITY_ALONE, strict=True), FunctionTool("ask")), "required")

WRITTEN = sorted(name for name, form in CALL_FORMS.items() if form.written)

OF_XGRAMMAR = ("json", "minimax_xml", "glm_xml")
"""The notations of arguments that xgrammar knows, too."""

UNDESCRIBED = {
    "cohere_command3": "each call has its number",
    "cohere_command4": "each call has its number",
    "functionary_v32": "the prompt has the mark of the first call",
    "functiongemma": "keys without quotes",
    "gemma4": "keys without quotes",
    "gigachat35": "marks of its own in tags with types",
    "k2_horizon": "values between tags of their own",
    "lfm2": "Python",
    "llama4_pythonic": "Python",
    "minimax_m3": "tags named as the parameters",
    "olmo3": "Python",
    "pythonic": "Python",
    "solar_open2": "values between marks of their own",
}
"""The families whose calls no grammar describes, with what none can express."""


@cache
def written_of(name: str) -> WrittenCalls:
    found = chosen(CALL_FORMS[name].written, marked_model(name).vocabulary.marks)
    assert found is not None
    return found


def spelled(written: WrittenCalls, *cities: str, name: str = "get_weather") -> str:
    """Calls as the family writes them."""
    calls = (f"{name}{written.middle}{_arguments(written.style, city)}" for city in cities)
    return f"{written.begin}{written.between.join(calls)}{written.end}"


def _arguments(style: str, city: str) -> str:
    if style == "json":
        return json.dumps({"city": city})
    tags = STYLES[style]
    return f"{tags.begin}city{tags.middle}{tags.of_text}{city}{tags.end}"


def is_accepted(name: str, text: str, tools: Toolset = TOOLS) -> bool:
    grammar = chat_grammar(tools, prompt="Hi", chat=marked_model(name))
    assert grammar.calls == "native"
    return grammar.accepted(text + END) == text + END


@pytest.mark.parametrize("name", WRITTEN)
def test_forced_calls_have_the_form_of_the_family(name: str) -> None:
    written = written_of(name)
    if name in CALL_MARKUP:
        assert is_accepted(name, CALL_MARKUP[name].replace(CITY, "Paris"))
    one, two = spelled(written, "Paris"), spelled(written, "Paris", "Rome")
    for right in (one, two):
        assert is_accepted(name, right)
    for wrong in (spelled(written, "Paris", name="get_climate"), one.replace("city", "town"), "Hello.", ""):
        assert not is_accepted(name, wrong)
    single = replace(TOOLS, parallel=False)
    assert is_accepted(name, one, single)
    assert not is_accepted(name, two, single)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_calls_are_read_as_calls(name: str) -> None:
    chat = marked_model(name)
    tokens = [*chat.vocabulary.encode(spelled(written_of(name), "Paris", "Rome <b>")), chat.stop_token_ids[0]]
    started = turn_started(tools=TOOLS, prompt=tuple(chat.vocabulary.encode("Hi")))
    finished = GenerationFinished("stop", 0, 0.0)
    items = parsed_items(parse_chat_frames(chat, [started, *token_chunks(tokens), finished]))
    assert [(item.name, json.loads(item.text), item.complete, item.repairs) for item in items] == [
        ("get_weather", {"city": "Paris"}, True, ()),
        ("get_weather", {"city": "Rome <b>"}, True, ()),
    ]


@pytest.mark.parametrize("name", [name for name in WRITTEN if CALL_FORMS[name].written[0].style in OF_XGRAMMAR])
def test_xgrammar_accepts_the_same_calls(name: str) -> None:
    xgrammar = import_module("xgrammar")
    written = written_of(name)
    functions = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY_ALONE, "strict": True}}]
    tag: Any = {"type": "structural_tag", "format": written.format(functions, parallel=True)}
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    accepts = import_module("xgrammar.testing")._is_grammar_accept_string  # noqa: SLF001 - the only way
    assert accepts(grammar, spelled(written, "Paris", "Rome"))
    assert not accepts(grammar, spelled(written, "Paris", name="get_climate"))


def test_mistral_without_arguments_mark_writes_a_list() -> None:
    first, old = CALL_FORMS["mistral"].written
    assert chosen((first, old), ("[TOOL_CALLS]",)) is old
    assert chosen((first, old), ("[TOOL_CALLS]", "[ARGS]")) is first


@pytest.mark.parametrize("name", sorted(CALL_FORMS))
def test_calls_without_a_grammar_are_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_undescribed(marked_model(name).parsers, name)
    assert bool(caplog.messages) == (name in UNDESCRIBED)


def test_descriptions_serve_without_vllm() -> None:
    vocabulary = marked_model("granite").vocabulary
    own = OwnParsers(vocabulary, None, CALL_FORMS["granite"]).calls((), parallel=True)
    assert own is not None
    assert OwnParsers(vocabulary, None, CALL_FORMS["lfm2"]).calls((), parallel=True) is None

"""The operator's level of strictness: what it holds for calls that the client leaves free, in every family's markup."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, McpTool, StrictLevel, Toolset
from penstock.stages.models.chat.forms import CALL_FORMS
from penstock.stages.render import constraint
from penstock.stages.render.chat.grammar import holds_optional_calls
from penstock.stages.render.harmony.grammar import grammar
from tests.support.call_markup import CALL_MARKUP, CITY, END, OWN_MARKUP, marked_model
from tests.support.chat_families import TURN_END, chat_grammar, model_of_unknown_syntax
from tests.support.harmony import accepted_markup, call_markup, final_markup, grammar_for

pytestmark = pytest.mark.vllm

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
LEVELS: tuple[StrictLevel, ...] = ("function", "parameter")
RIGHT, WRONG = '{"city": "Paris"}', '{"town": 5}'
ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
"""A schema that no text fits."""


def function(strict: bool | None = None, parameters: Any = PARAMETERS, name: str = "get_weather") -> FunctionTool:
    return FunctionTool(name, parameters=parameters, strict=strict)


def harmony_takes(tools: Toolset, arguments: str, name: str = "get_weather") -> bool:
    turn = call_markup(f"functions.{name}", arguments) + "<|call|>"
    return accepted_markup(grammar_for(tools), turn) == turn


def chat_takes(tools: Toolset, arguments: str, name: str = "get_weather") -> bool:
    turn = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>{TURN_END}'
    return chat_grammar(tools).accepted(turn) == turn


SPEAKERS = {"harmony": harmony_takes, "chat": chat_takes}


def rules_of(speaker: str, tools: Toolset, **more: Any) -> str | None:
    if speaker == "chat":
        return chat_grammar(tools, **more).rules
    return grammar(tools, more.get("text_format") or {}, more.get("structured") or {})


@pytest.mark.parametrize(("speaker", "level", "strict"), list(product(SPEAKERS, LEVELS, (None, False, True))))
def test_level_is_the_least_that_holds(speaker: str, level: StrictLevel, strict: bool | None) -> None:
    """``strict: false`` is what clients send that think of no strictness, so it does not lower the level."""
    tools, takes = Toolset((function(strict),), strict_level=level), SPEAKERS[speaker]
    assert takes(tools, RIGHT)
    assert takes(tools, WRONG) is (level == "function" and not strict)
    assert not takes(tools, RIGHT, "get_climate")
    assert not takes(tools, "[")
    answer = final_markup("Hello.") if speaker == "harmony" else f"Hello.{TURN_END}"
    rules = rules_of(speaker, tools)
    assert rules is not None
    heard = accepted_markup(rules, answer) if speaker == "harmony" else chat_grammar(tools).accepted(answer)
    assert heard == answer


@pytest.mark.parametrize(("speaker", "level"), list(product(SPEAKERS, LEVELS)))
def test_level_changes_no_request_that_makes_no_calls_or_must_make_one(speaker: str, level: StrictLevel) -> None:
    for tools in (Toolset(), Toolset((function(),), "none"), Toolset((function(),), "required")):
        assert rules_of(speaker, replace(tools, strict_level=level)) == rules_of(speaker, tools)


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_allowed_functions_are_held_as_well(speaker: str) -> None:
    tools = Toolset((function(), function(name="other")), allowed=((None, "get_weather"),), strict_level="parameter")
    assert SPEAKERS[speaker](tools, RIGHT)
    assert not SPEAKERS[speaker](tools, WRONG)
    assert SPEAKERS[speaker](replace(tools, strict_level=UNSET), WRONG)


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_calls_beside_a_format_are_held_as_well(speaker: str) -> None:
    """A format alone brings a grammar, which leaves the arguments free."""
    tools, form = Toolset((function(),)), {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    free, held = (
        rules_of(speaker, replace(tools, strict_level=level), text_format=form) for level in (UNSET, "parameter")
    )
    assert ('lenient": true' in str(free), 'lenient": true' in str(held)) == (False, True)


# What cannot be held


@pytest.mark.parametrize("speaker", SPEAKERS)
def test_function_whose_schema_no_text_fits_takes_any_object(speaker: str) -> None:
    tools = Toolset((function(parameters=ENDLESS, name="odd"), function()), strict_level="parameter")
    assert SPEAKERS[speaker](tools, WRONG, "odd")
    assert not SPEAKERS[speaker](tools, WRONG)
    assert not SPEAKERS[speaker](tools, RIGHT, "other")


BROKEN: dict[str, Any] = {
    "a strict function": function(strict=True, parameters=ENDLESS),
    "a custom tool": CustomTool("patch", None, Grammar("lark", 'start: "a')),
}


@pytest.mark.parametrize(("speaker", "level", "tool"), list(product(SPEAKERS, LEVELS, BROKEN)))
def test_what_the_client_asks_for_is_still_refused(speaker: str, level: StrictLevel, tool: str) -> None:
    tools = Toolset((function(), BROKEN[tool]))
    with pytest.raises(InvalidRequest) as plain:
        rules_of(speaker, tools)
    with pytest.raises(InvalidRequest) as held:
        rules_of(speaker, replace(tools, strict_level=level))
    assert (str(held.value), held.value.param) == (str(plain.value), plain.value.param)


@pytest.mark.parametrize(("speaker", "level"), list(product(SPEAKERS, LEVELS)))
def test_too_large_a_grammar_holds_nothing(speaker: str, level: StrictLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Toolset((function(), McpTool("docs", "ask")), strict_level=level)
    assert rules_of(speaker, tools)
    monkeypatch.setattr(constraint, "MOST_GRAMMAR_CHARACTERS", 300)
    assert rules_of(speaker, tools) is None


@pytest.mark.parametrize("level", LEVELS)
def test_structural_tag_of_the_client_excludes_the_level(level: StrictLevel) -> None:
    tag = {"structural_tag": {"format": {"type": "const_string", "value": "yes"}}}
    tools = Toolset((function(),))
    assert rules_of("chat", replace(tools, strict_level=level), structured=tag) == rules_of(
        "chat", tools, structured=tag
    )


# Families

NOT_HELD = frozenset(
    {
        *("cohere_command3", "cohere_command4", "functionary_v32", "functiongemma", "gemma4", "gigachat35"),
        *("k2_horizon", "kimi_k3", "lfm2", "llama4_pythonic", "minimax_m3", "olmo3", "pythonic", "solar_open2"),
    }
)
"""The families whose calls no grammar describes, or none that tells a call from an answer by its beginning."""

OF_VLLM = frozenset({"glm45", "glm47", "ling3"})
"""The families whose loose calls vLLM describes, without line breaks and with the names of the parameters."""

MARKUP = {**CALL_MARKUP, **OWN_MARKUP}


@pytest.mark.parametrize("name", sorted(CALL_FORMS.keys() & MARKUP.keys()))
def test_calls_of_every_family_are_held_in_its_own_markup(name: str) -> None:
    chat = marked_model(name)
    held = Toolset((function(),), strict_level="parameter")
    grammar = chat_grammar(held, prompt="Hi", chat=chat)
    assert holds_optional_calls(chat) is (name not in NOT_HELD)
    if name in NOT_HELD:
        assert grammar.rules is None
        return
    assert grammar.calls == "native"
    right = MARKUP[name].replace(CITY, "Paris") + END
    for turn in (right, f"Hello.{END}"):
        assert grammar.accepted(turn) == turn
    for wrong in (right.replace("get_weather", "get_climate"), right.replace("city", "town")):
        assert grammar.accepted(wrong) != wrong
    loose = chat_grammar(replace(held, strict_level="function"), prompt="Hi", chat=chat)
    other = right.replace("\n", "") if name in OF_VLLM else right.replace("city", "town")
    assert loose.accepted(other) == other
    assert loose.accepted(other.replace("get_weather", "get_climate")) != other.replace("get_weather", "get_climate")


def test_family_without_a_description_is_not_held() -> None:
    chat = model_of_unknown_syntax()
    assert not holds_optional_calls(chat)
    assert chat_grammar(Toolset((function(),), strict_level="parameter"), chat=chat).rules is None

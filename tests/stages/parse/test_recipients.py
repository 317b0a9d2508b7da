"""Whom a call is addressed to, among the tools of a request."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from pipeline.frames import Repair
from pipeline.protocol.tools import CustomTool, FunctionTool, Toolset
from stages.harmony import HarmonyEncoding
from tests.stages.parse.told import parse_text

Called: TypeAlias = list[tuple[str, str | None, str, tuple[Repair, ...]]]

WEATHER = Toolset((FunctionTool("weather"),))
FORBIDDEN: Called = [("Reasoning", None, "", ("undeclared tool",))]

TEAM = Toolset(
    (
        FunctionTool("weather"),
        CustomTool("shell"),
        FunctionTool("spawn", namespace="agents"),
        CustomTool("exec", namespace="agents"),
        FunctionTool("wait", namespace="agents"),
        FunctionTool("wait", namespace="clock"),
        FunctionTool("weather", namespace="clock"),
    )
)


def called(encoding: HarmonyEncoding, recipient: str, tools: Toolset) -> Called:
    """What becomes of a message to ``recipient`` where there are ``tools``."""
    text = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{}}<|call|>"
    told = parse_text(encoding, text, tools=tools)
    return [(item.kind, item.namespace, item.name, item.repairs) for item in told]


@pytest.mark.parametrize("recipient", ["functions.weather", "weather", "functions.other"])
def test_no_call_gets_out_where_calls_are_forbidden(recipient: str, encoding: HarmonyEncoding) -> None:
    """With ``tool_choice`` "none" a call is a thought, whatever it is addressed to."""
    assert called(encoding, recipient, Toolset(WEATHER.tools, choice="none")) == FORBIDDEN


@pytest.mark.parametrize("recipient", ["functions.shell", "shell", "agents.spawn", "functions.other", "agents.other"])
def test_only_allowed_tools_are_called(recipient: str, encoding: HarmonyEncoding) -> None:
    """``allowed_tools`` is a hard limit: a call of any other tool, made up or not, is a thought."""
    allowed = ((None, "weather"), ("agents", "exec"))
    assert called(encoding, recipient, Toolset(TEAM.tools, allowed=allowed)) == FORBIDDEN
    assert called(encoding, "functions.weather", Toolset(TEAM.tools, allowed=allowed)) == [
        ("FunctionCall", None, "weather", ())
    ]


@pytest.mark.parametrize("recipient", ["functions.weather", "weather"])
def test_a_tool_without_marks_is_forbidden_too(recipient: str, encoding: HarmonyEncoding) -> None:
    """A forbidden call is no message to the user either where its ``to=`` is missing."""
    (item,) = parse_text(
        encoding,
        f"<|channel|>commentary {recipient}<|message|>{{}}<|call|>",
        tools=Toolset(WEATHER.tools, choice="none"),
    )
    assert item.kind == "Reasoning"


@pytest.mark.parametrize(
    ("recipient", "kind", "namespace", "name"),
    [
        ("functions.weather", "FunctionCall", None, "weather"),
        ("weather", "FunctionCall", None, "weather"),
        ("clock.weather", "FunctionCall", "clock", "weather"),
        ("functions.clock.weather", "FunctionCall", "clock", "weather"),
        ("functions.shell", "CustomToolCall", None, "shell"),
        ("shell", "CustomToolCall", None, "shell"),
        ("shellcode", "CustomToolCall", None, "shell"),
        ("agents.spawn", "FunctionCall", "agents", "spawn"),
        ("agents.spawnjson", "FunctionCall", "agents", "spawn"),
        ("spawn", "FunctionCall", "agents", "spawn"),
        ("functions.spawn", "FunctionCall", "agents", "spawn"),
        ("agents.exec", "CustomToolCall", "agents", "exec"),
        ("exec", "CustomToolCall", "agents", "exec"),
        ("clock.wait", "FunctionCall", "clock", "wait"),
        ("agents.other", "FunctionCall", "agents", "other"),
        ("functions.wait", "FunctionCall", None, "wait"),
    ],
)
def test_a_recipient_finds_its_tool(
    recipient: str, kind: str, namespace: str | None, name: str, encoding: HarmonyEncoding
) -> None:
    """A full name finds its tool; a bare one does where it is unique, or stands for the tool without a namespace."""
    assert called(encoding, recipient, TEAM) == [(kind, namespace, name, ())]


def test_a_bare_name_of_two_namespaces_is_nobody(encoding: HarmonyEncoding) -> None:
    """Between tools of one name, nothing is guessed."""
    assert called(encoding, "wait", TEAM) == FORBIDDEN


def test_a_namespace_may_be_called_functions(encoding: HarmonyEncoding) -> None:
    """Where the client's own namespace has that name, its tools keep it."""
    tools = Toolset((CustomTool("exec", namespace="functions"),))
    assert called(encoding, "functions.exec", tools) == [("CustomToolCall", "functions", "exec", ())]


def test_an_undeclared_function_is_called(encoding: HarmonyEncoding) -> None:
    """Where calls are allowed, the client gets to see the name that the model made up."""
    assert called(encoding, "functions.other", Toolset()) == [("FunctionCall", None, "other", ())]


@pytest.mark.parametrize("recipient", ["weather,", "weather.", "weatherjson", "weather.json", "default.weather:"])
@pytest.mark.parametrize("namespace", ["functions.", "function.", "default.", ""])
def test_a_misspelt_recipient_finds_its_function(namespace: str, recipient: str, encoding: HarmonyEncoding) -> None:
    """A tail of punctuation or content type, or another namespace, hides no declared function."""
    assert called(encoding, namespace + recipient, WEATHER) == [("FunctionCall", None, "weather", ())]


@pytest.mark.parametrize("recipient", ["functions.wether,", "functions.default.wether"])
def test_a_name_that_stays_unknown_is_left_alone(recipient: str, encoding: HarmonyEncoding) -> None:
    """Only a declared name is worth a correction."""
    name = recipient.removeprefix("functions.")
    assert called(encoding, recipient, WEATHER) == [("FunctionCall", None, name, ())]


def test_custom_input_is_any_text(encoding: HarmonyEncoding) -> None:
    """What a custom tool is called with comes out as it was written, whatever its header says of its form."""
    source = '*** Begin Patch\n+ é 👩‍🚀 {"a": 1}\n'
    text = f"<|channel|>commentary to=functions.shell code<|message|>{source}<|call|>"
    (item,) = parse_text(encoding, text, tools=TEAM)
    assert (item.kind, item.name, item.text) == ("CustomToolCall", "shell", source)

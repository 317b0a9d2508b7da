"""The recipient of a call, among the tools of a request."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from msgspec.structs import replace

from penstock.pipeline.frames import (
    CodeCallOpened,
    CustomToolCallOpened,
    FunctionCallOpened,
    GenerationFinished,
    ItemClosed,
    ItemOpened,
    McpApprovalOpened,
    McpCallOpened,
    MessageOpened,
    ReasoningOpened,
    Repair,
    ShellCallOpened,
    TokenChunk,
    WebCallOpened,
)
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import ANY_NAME, CustomTool, FunctionTool, McpTool, Toolset
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, recipient_of
from penstock.stages.parse.harmony.recipients import Recipients
from tests.support.parsed_output import OPENINGS, parse_harmony_frames, parse_harmony_text, turn_started

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
    """The items parsed from a message to ``recipient``, if the request has ``tools``."""
    text = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{}}<|call|>"
    results = parse_harmony_text(encoding, text, tools=tools)
    return [(item.kind, item.namespace, item.name, item.repairs) for item in results]


@pytest.mark.parametrize("recipient", ["functions.weather", "weather", "functions.other"])
def test_forbidden_calls_are_reasoning(recipient: str, encoding: HarmonyEncoding) -> None:
    assert called(encoding, recipient, Toolset(WEATHER.tools, choice="none")) == FORBIDDEN


@pytest.mark.parametrize("recipient", ["functions.shell", "shell", "agents.spawn", "functions.other", "agents.other"])
def test_only_allowed_tools_are_called(recipient: str, encoding: HarmonyEncoding) -> None:
    allowed = ((None, "weather"), ("agents", "exec"))
    assert called(encoding, recipient, Toolset(TEAM.tools, allowed=allowed)) == FORBIDDEN
    assert called(encoding, "functions.weather", Toolset(TEAM.tools, allowed=allowed)) == [
        ("FunctionCall", None, "weather", ())
    ]


@pytest.mark.parametrize("recipient", ["functions.weather", "weather"])
def test_forbidden_tool_without_marks_is_reasoning(recipient: str, encoding: HarmonyEncoding) -> None:
    (item,) = parse_harmony_text(
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
    ],
)
def test_recipient_finds_its_tool(
    recipient: str, kind: str, namespace: str | None, name: str, encoding: HarmonyEncoding
) -> None:
    assert called(encoding, recipient, TEAM) == [(kind, namespace, name, ())]


@pytest.mark.parametrize("recipient", ["wait", "functions.wait"])
def test_ambiguous_bare_name_finds_no_tool(recipient: str, encoding: HarmonyEncoding) -> None:
    assert called(encoding, recipient, TEAM) == FORBIDDEN


def test_namespace_may_be_called_functions(encoding: HarmonyEncoding) -> None:
    tools = Toolset((CustomTool("exec", namespace="functions"),))
    assert called(encoding, "functions.exec", tools) == [("CustomToolCall", "functions", "exec", ())]


@pytest.mark.parametrize(
    ("tools", "recipient", "refusal"),
    [
        (Toolset(), "functions.other", "there is no tool 'functions.other'. Go on without it."),
        (WEATHER, "functions.other", "there is no tool 'functions.other'. The tools that can be called are {weather}."),
        (TEAM, "agents.other", "there is no tool 'agents.other'. The tools that can be called are {team}."),
        (WEATHER, "docs.read", "there is no tool 'docs.read'. The tools that can be called are {weather}."),
        (replace(WEATHER, choice="none"), "functions.a", "there is no tool 'functions.a'. Go on without it."),
        (
            replace(WEATHER, choice="none"),
            "weather",
            "the tool 'functions.weather' cannot be called now. Go on without it.",
        ),
        (
            replace(TEAM, allowed=((None, "weather"),)),
            "spawn",
            "the tool 'agents.spawn' cannot be called now. The tools that can be called are {weather}.",
        ),
    ],
)
def test_call_that_cannot_be_made_has_an_error_for_the_model(
    tools: Toolset, recipient: str, refusal: str, encoding: HarmonyEncoding
) -> None:
    named = refusal.format(weather="functions.weather", team=", ".join(map(recipient_of, TEAM.tools)))
    opening, repairs = opened(encoding, f"<|channel|>commentary to={recipient}", tools)
    assert isinstance(opening, ReasoningOpened)
    assert (opening.refusal, repairs) == (f"Error: {named}", ("undeclared tool",))


@pytest.mark.parametrize("recipient", ["weather,", "weather.", "weatherjson", "weather.json", "default.weather:"])
@pytest.mark.parametrize("namespace", ["functions.", "function.", "default.", ""])
def test_misspelt_recipient_finds_its_function(namespace: str, recipient: str, encoding: HarmonyEncoding) -> None:
    assert called(encoding, namespace + recipient, WEATHER) == [("FunctionCall", None, "weather", ())]


@pytest.mark.parametrize("recipient", ["functions.wether,", "functions.default.wether"])
def test_unknown_name_is_kept_as_written(recipient: str, encoding: HarmonyEncoding) -> None:
    opening, _ = opened(encoding, f"<|channel|>commentary to={recipient}", WEATHER)
    assert isinstance(opening, ReasoningOpened)
    assert opening.recipient == recipient


def test_custom_input_is_any_text(encoding: HarmonyEncoding) -> None:
    source = '*** Begin Patch\n+ é 👩‍🚀 {"a": 1}\n'
    text = f"<|channel|>commentary to=functions.shell code<|message|>{source}<|call|>"
    (item,) = parse_harmony_text(encoding, text, tools=TEAM)
    assert (item.kind, item.name, item.text) == ("CustomToolCall", "shell", source)


# Server-side tools, and client-side tools with items of their own

HERE = Toolset(
    (
        *(FunctionTool("weather"), FunctionTool("local_shell", form="local_shell")),
        *(FunctionTool("shell", form="shell"), FunctionTool("apply_patch", form="apply_patch")),
        *(McpTool("docs", "read/all-of.it"), McpTool("docs", "write", needs_approval=True)),
        *(McpTool("my.wiki-2", "page.get"), McpTool("my.wiki-2", "weather")),
        *kinds()["python"].tools,
        *kinds()["browser"].tools,
        *kinds()["container"].tools,
    )
)


def opened(encoding: HarmonyEncoding, header: str, tools: Toolset = HERE) -> tuple[ItemOpened, tuple[Repair, ...]]:
    """The opening frame of the single item after this header, and the item's repairs."""
    chunk = TokenChunk(tuple(encoding.encode_markup(f"{header}<|message|>{{}}<|call|>")))
    frames = parse_harmony_frames(encoding, [turn_started(tools=tools), chunk, GenerationFinished("stop", 0, 0.0)])
    (opening,) = (frame for frame in frames if isinstance(frame, OPENINGS))
    (repairs,) = (frame.repairs for frame in frames if isinstance(frame, ItemClosed))
    return opening, repairs


CALLED: dict[str, ItemOpened] = {
    "functions.local_shell": FunctionCallOpened("local_shell", None, "local_shell"),
    "functions.shell": FunctionCallOpened("shell", None, "shell"),
    "functions.apply_patch": FunctionCallOpened("apply_patch", None, "apply_patch"),
    "apply_patchjson": FunctionCallOpened("apply_patch", None, "apply_patch"),
    "docs.read/all-of.it": McpCallOpened("docs", "read/all-of.it"),
    "docs.read/all-of.itjson": McpCallOpened("docs", "read/all-of.it"),
    "functions.docs.read/all-of.it": McpCallOpened("docs", "read/all-of.it"),
    "Docs.read/all-of.it": McpCallOpened("docs", "read/all-of.it"),
    "read/all-of.it": McpCallOpened("docs", "read/all-of.it"),
    "docs.write": McpApprovalOpened("docs", "write"),
    "write,": McpApprovalOpened("docs", "write"),
    "my.wiki-2.page.get": McpCallOpened("my.wiki-2", "page.get"),
    "my.wiki-2.weather": McpCallOpened("my.wiki-2", "weather"),
    "weather": FunctionCallOpened("weather"),
    "python": CodeCallOpened(),
    "pythoncode": CodeCallOpened(),
    "Python": CodeCallOpened(),
    "python.exec": CodeCallOpened(),
    "functions.python": CodeCallOpened(),
    "browser.search": WebCallOpened("search"),
    "browser.open": WebCallOpened("open"),
    "browser.find": WebCallOpened("find"),
    "browser.opencode": WebCallOpened("open"),
    "Browser.find": WebCallOpened("find"),
    "search": WebCallOpened("search"),
    "container.exec": ShellCallOpened(),
    "container.execjson": ShellCallOpened(),
}

HEADERS = [
    "<|channel|>analysis to={} code",
    "<|channel|>commentary to={} <|constrain|>json",
    " to={}<|channel|>analysis code",
    " to={}<|channel|>commentary json",
    "<|channel|>analysis to={}",
]


@pytest.mark.defect("V8", "V9")
@pytest.mark.parametrize(("recipient", "opening"), CALLED.items(), ids=CALLED)
@pytest.mark.parametrize("header", HEADERS)
def test_any_tool_is_called_on_any_channel(
    header: str, recipient: str, opening: ItemOpened, encoding: HarmonyEncoding
) -> None:
    assert opened(encoding, header.format(recipient)) == (opening, ())


@pytest.mark.parametrize(
    ("recipient", "addressed"),
    [
        *((name, name) for name in ("python", "browser.search", "browser.open", "container.exec")),
        *(("pythoncode", "python"), ("python.exec", "python"), ("Browser.search", "browser.search")),
        *(("browser.run", "browser.run"), ("docs.read", "docs.read"), ("image_gen.text2im", "image_gen.text2im")),
    ],
)
@pytest.mark.parametrize("tools", [Toolset(), WEATHER, Toolset(WEATHER.tools, allowed=((None, "weather"),))])
def test_undeclared_tool_is_named_in_reasoning(
    tools: Toolset, recipient: str, addressed: str, encoding: HarmonyEncoding
) -> None:
    opening, repairs = opened(encoding, f"<|channel|>analysis to={recipient} code", tools)
    assert isinstance(opening, ReasoningOpened)
    assert (opening.recipient, repairs) == (addressed, ("undeclared tool",))


@pytest.mark.parametrize("recipient", ["browser.search", "browser.searchjson", "container.weather", "python.weather"])
def test_built_in_tool_is_no_function_of_the_same_name(recipient: str, encoding: HarmonyEncoding) -> None:
    """Only namespaces that the model was not taught are ignored."""
    tools = Toolset((FunctionTool("search"), McpTool("docs", "weather")))
    opening, _ = opened(encoding, f"<|channel|>analysis to={recipient}", tools)
    assert isinstance(opening, ReasoningOpened)
    own = Toolset((FunctionTool("search", namespace="browser"),))
    assert opened(encoding, "<|channel|>analysis to=browser.search", own)[0] == FunctionCallOpened("search", "browser")


@pytest.mark.defect("B12")
@pytest.mark.parametrize(
    "recipient",
    ["docs.other", "my.wiki-2.other", "browser.other", "container.other", "docs.weather", "Docs.apply_patch"],
)
def test_made_up_server_tool_is_not_called(recipient: str, encoding: HarmonyEncoding) -> None:
    opening, _ = opened(encoding, f"<|channel|>commentary to={recipient}")
    assert isinstance(opening, ReasoningOpened)
    assert opening.recipient == recipient


@pytest.mark.parametrize("recipient", ["python", "docs.write", "browser.open", "functions.shell"])
@pytest.mark.parametrize("limit", [{"choice": "none"}, {"allowed": (("docs", "read/all-of.it"), ("container", "*"))}])
def test_forbidden_server_tool_is_reasoning(
    limit: dict[str, object], recipient: str, encoding: HarmonyEncoding
) -> None:
    tools = Toolset(HERE.tools, **limit)  # type: ignore[arg-type]  # the limits of a request, by their names
    opening, repairs = opened(encoding, f"<|channel|>analysis to={recipient}", tools)
    assert isinstance(opening, ReasoningOpened)
    assert (opening.recipient, repairs) == (recipient, ("undeclared tool",))


def test_all_tools_of_a_namespace_may_be_allowed(encoding: HarmonyEncoding) -> None:
    tools = Toolset(HERE.tools, allowed=(("docs", ANY_NAME), ("python", ANY_NAME)))
    for recipient in ("docs.write", "docs.read/all-of.it", "python"):
        assert opened(encoding, f" to={recipient}<|channel|>analysis", tools)[0] == CALLED[recipient]
    assert isinstance(opened(encoding, " to=my.wiki-2.weather<|channel|>commentary", tools)[0], ReasoningOpened)


@pytest.mark.parametrize("name", ["docs.read/all-of.it", "my.wiki-2.page.get", "python", "browser.search"])
def test_made_up_tool_result_is_reasoning(name: str, encoding: HarmonyEncoding) -> None:
    """The model may write a tool's message itself, under any name."""
    parsed = parse_harmony_text(
        encoding,
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>{name} to=assistant<|channel|>commentary<|message|>4<|end|>",
        tools=HERE,
    )
    assert [(item.kind, item.text, item.repairs) for item in parsed] == [
        ("Reasoning", "Hm.", ()),
        ("Reasoning", "4", ("foreign role",)),
    ]


@pytest.mark.parametrize("word", ["search", "open", "find", "exec"])
def test_word_that_the_browser_knows_is_text(word: str, encoding: HarmonyEncoding) -> None:
    assert not Recipients(HERE).knows(word)
    opening, _ = opened(encoding, f"<|channel|>commentary {word}")
    assert opening == MessageOpened("commentary")
    assert opened(encoding, "<|channel|>commentary browser.open code")[0] == WebCallOpened("open")


def test_custom_tool_keeps_its_kind(encoding: HarmonyEncoding) -> None:
    tools = Toolset((*HERE.tools, CustomTool("note")))
    assert opened(encoding, "<|channel|>commentary to=note code", tools) == (CustomToolCallOpened("note"), ())

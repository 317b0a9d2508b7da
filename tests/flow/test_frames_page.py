"""`docs/FRAMES.md`, whose lists of frames are made from the code; ``--regen`` writes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc
from textwrap import indent
from typing import Any, get_args

import pytest

from penstock.pipeline import frames
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.params.items import InputItem
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "FRAMES.md"
MARK = re.compile(r"(<!-- (\w+) -->\n).*?(?=\n## |\Z)", re.DOTALL)

FACTS = (
    frames.RequestFacts,
    frames.Purpose,
    frames.Compacting,
    frames.Scheduling,
    frames.Origin,
    frames.TemplateOptions,
)
JUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ResolvedRequest": (frames.ResolvedRequest,),
    "Prompt": (frames.Prompt, frames.ChatTurn),
    "TokenFrame": (*get_args(frames.TokenFrame), frames.TokenLogprob),
    "ParsedFrame": get_args(frames.ParsedFrame)[1:],
    "ConversedFrame": (
        *(kind for kind in get_args(frames.ConversedFrame) if kind not in get_args(frames.ParsedFrame)),
        *get_args(frames.CallData),
    ),
    "EmittedFrame": (frames.ItemTokens, frames.ItemResult),
    "ResponseEvent": (),
    "facts": FACTS,
}
"""The classes that the page describes for each junction; frames of an earlier junction are not repeated."""

ALIASES = {
    "Prompt": ("CallSyntax",),
    "TokenFrame": ("FinishReason",),
    "ParsedFrame": ("Repair",),
}
"""The types of fields that the page describes too."""

RULES = {
    "TokenFrame": ("TokenFrame", "EngineFrame"),
    "ParsedFrame": ("ParsedFrame", "Text", "OpenCall", "Asked", "Call"),
    "ConversedFrame": ("ConversedFrame", "Run", "Work", "Summary"),
    "EmittedFrame": ("EmittedFrame",),
    "ResponseEvent": ("ResponseEvent",),
}
"""The rules of the grammar, at the junction that needs them first."""


@cache
def statements(module: str) -> list[ast.stmt]:
    return ast.parse((ROOT / "pipeline" / module).read_text()).body


def docstring_after(body: list[ast.stmt], name: str) -> str:
    """Return the docstring that follows an assignment to ``name``, or an empty text."""
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name:
            match following:
                case ast.Expr(ast.Constant(str(text))):
                    return text
                case _:
                    return ""
    return ""


def plain(text: str) -> str:
    return re.sub(r"``|(?<!`)`(?!`)", "`", re.sub(r"\s+", " ", text)).strip()


def described(kind: type) -> Iterator[str]:
    [body] = [
        each.body for each in statements("frames.py") if isinstance(each, ast.ClassDef) and each.name == kind.__name__
    ]
    yield f"**`{kind.__name__}`**: {plain(kind.__doc__ or '')}"
    fields = [
        each for each in body if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
    ]
    if fields:
        yield "\n".join(line(body, field) for field in fields)


def line(body: list[ast.stmt], field: ast.AnnAssign) -> str:
    name = ast.unparse(field.target)
    if name == "facts":
        return "* `facts: RequestFacts`"
    described = docstring_after(body, name)
    assert described, name
    given = "" if field.value is None else f" = {ast.unparse(field.value)}"
    return f"* `{name}: {ast.unparse(field.annotation)}{given}` {plain(described)}"


def alias(name: str) -> str:
    [value] = [
        ast.unparse(each.value)
        for each in statements("frames.py")
        if isinstance(each, ast.AnnAssign) and each.value and ast.unparse(each.target) == name
    ]
    values = f"`{value}`. " if value.startswith("Literal") else ""
    return f"**`{name}`**: {values}{plain(docstring_after(statements('frames.py'), name))}"


def rule(name: str) -> str:
    first, *more = cleandoc(frames.GRAMMAR[name]).splitlines()
    return f"{name}:\n" + indent("\n".join((first, *more)), "    ") if more else f"{name}: {first}"


def event_lines() -> Iterator[str]:
    """Yield a line for each set of fields, in the order of the first event that has it."""
    by_fields: dict[str, list[str]] = {}
    for kind in get_args(events.ResponseEvent):
        fields = ", ".join(name for name in kind.__struct_fields__ if name != "sequence_number")
        words = str(kind.__struct_config__.tag).removeprefix("response.").replace(".", "_").split("_")
        assert kind.__name__.removeprefix("Response") == "".join(map(str.capitalize, words))  # as the page says
        by_fields.setdefault(fields, []).append(f"`{kind.__struct_config__.tag}`")
    yield from (f"* {fields}: {', '.join(names)}" for fields, names in by_fields.items())


def generated(junction: str) -> str:
    rules = "\n".join(map(rule, RULES.get(junction, ())))
    parts = [f"```\n{rules}\n```"] if rules else []
    if junction == "ResponseEvent":
        parts.append("\n".join(event_lines()))
    for kind in JUNCTIONS[junction]:
        parts += described(kind)
    parts += map(alias, ALIASES.get(junction, ()))
    return "\n" + "\n\n".join(parts) + "\n"


def test_page_describes_all_frames(pytestconfig: pytest.Config) -> None:
    page = MARK.sub(lambda mark: mark[1] + generated(mark[2]), PAGE.read_text())
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_page_leaves_no_frame_out() -> None:
    unions = (frames.TokenFrame, frames.ParsedFrame, frames.ConversedFrame, frames.EmittedFrame)
    all_frames = {kind for union in unions for kind in get_args(union)} - set(get_args(events.ResponseEvent))
    assert all_frames <= {kind for kinds in JUNCTIONS.values() for kind in kinds}
    assert sorted(name for names in RULES.values() for name in names) == sorted(frames.GRAMMAR)
    assert set(re.findall(r"<!-- (\w+) -->", PAGE.read_text())) == set(JUNCTIONS)


def test_classes_of_items_are_named_as_the_page_on_embedding_says() -> None:
    alone = {"compaction_trigger": "CompactionTriggerItem"}
    for kind in get_args(InputItem):
        tag = kind.__struct_config__.tag
        assert kind.__name__ == alone.get(tag, "".join(word.capitalize() for word in tag.split("_")))

"""The items that a prompt shows: of a program its code and its output, and nothing that it called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.protocol import items
from penstock.stages.render.item_texts import without_nested
from tests.support.harmony import (
    approval,
    call,
    code_call,
    custom_call,
    custom_output,
    decision,
    made_by_program,
    mcp_call,
    message,
    output,
    program,
    program_output,
    reasoning,
    shell_call,
    shell_output,
    web_call,
)


@dataclass
class Calls:
    """The calls of a program, and the items that follow them."""

    now: list[items.Item] = field(default_factory=list)
    later: list[items.Item] = field(default_factory=list)


def _approved(of: str, name: str) -> Calls:
    asked = made_by_program(approval("write"), of)
    made = replace(made_by_program(mcp_call("write"), of), approval_request_id=asked.id)
    return Calls([asked], [decision(asked, approve=True), made])


def _refused(of: str, name: str) -> Calls:
    asked = made_by_program(approval("write"), of)
    return Calls([asked], [decision(asked, approve=False)])


KINDS: Sequence[Callable[[str, str], Calls]] = (
    lambda of, name: Calls([made_by_program(call("f", "{}", name), of)], [output("1", name)]),
    lambda of, name: Calls([made_by_program(call("f", "{}", name), of)], [made_by_program(output("1", name), of)]),
    lambda of, name: Calls([made_by_program(call("f", "{}", name), of)]),
    lambda of, name: Calls([made_by_program(custom_call("g", "a", name), of)], [custom_output("1", name)]),
    lambda of, name: Calls([made_by_program(shell_call("ls", call_id=name), of), shell_output(call_id=name)]),
    lambda of, name: Calls([made_by_program(mcp_call("read"), of)]),
    lambda of, name: Calls([made_by_program(code_call("1"), of)]),
    lambda of, name: Calls([made_by_program(web_call(type="search", query="x"), of)]),
    _approved,
    _refused,
)
"""Calls of the program ``of``, with ids that begin with ``name``."""

OF_THE_MODEL: Sequence[Callable[[str], list[items.Item]]] = (
    lambda name: [message("user", "Hi")],
    lambda name: [reasoning("Hm.")],
    lambda name: [call("f", "{}", name), output("1", name)],
    lambda name: [replace(call("f", "{}", name), caller=items.Caller("direct")), output("1", name)],
    lambda name: [mcp_call("read")],
    lambda name: [asked := approval("write"), decision(asked, approve=False)],
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[items.Item], list[items.Item]]:
    """A conversation, and what a model reads of it."""
    whole: list[items.Item] = []
    read: list[items.Item] = []
    for number in range(draw(st.integers(0, 4))):
        name = f"call_{number}"
        if draw(st.booleans()):
            shown = draw(st.sampled_from(OF_THE_MODEL))(name)
            whole += shown
            read += shown
            continue
        begun, ended = program("x", name), draw(st.none() | st.just(program_output("1", name)))
        whole.append(begun)
        for step in range(draw(st.integers(0, 2))):
            kinds = draw(st.lists(st.sampled_from(KINDS), max_size=3))
            made = [kind(name, f"{name}_{step}_{at}") for at, kind in enumerate(kinds)]
            whole += [item for calls in made for item in calls.now]
            whole += [item for calls in draw(st.permutations(made)) for item in calls.later]
        if ended is not None:
            whole.append(ended)
            read += [begun, ended]
    return whole, read


@given(conversations())
def test_a_model_reads_nothing_of_what_a_program_called(drawn: tuple[list[items.Item], list[items.Item]]) -> None:
    whole, read = drawn
    assert without_nested(tuple(whole)) == tuple(read)


def test_calls_of_a_program_that_is_gone_are_not_read() -> None:
    """The store may no longer have the response with the program."""
    assert without_nested((made_by_program(call("f", "{}"), "call_gone"), output("1"))) == ()

"""Headers as real models were seen to write them: each is read by its meaning, and no text is lost."""

from __future__ import annotations

import pytest

from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding
from tests.support.parsed_output import parse_harmony

TOOLS = Toolset((FunctionTool("shell"), FunctionTool("spawn", namespace="team")))
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm."

SHELL = ("FunctionCall", "shell", "{}")
SPAWN = ("FunctionCall", "spawn", "{}")
HM = ("Reasoning", "", "Hm.")
ANSWER = ("Message", "final_answer", "So it is.")

Items = list[tuple[str, str, str]]

CALLS = [
    "<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{}",
    "<|channel|>commentary to=functions.shell<|constrain|>json<|message|>{}",
    "<|channel|>commentary to=functions.shell <|constrain|> json<|message|>{}",
    "<|channel|>commentary to=functions.shell <|constrain|>json<|constrain|>json<|message|>{}",
    "<|channel|>commentary to=functions.shell <|constrain|>response<|message|>{}",
    "<|channel|>commentary to=functions.shelljson<|message|>{}",
    "<|channel|>commentary to=functions.shell junk json<|message|>{}",
    "<|channel|>commentary to= functions.shell<|message|>{}",
    "<|channel|>commentary to=shell <|constrain|>json<|message|>{}",
    "<|channel|>commentary functions.shell <|constrain|>json<|message|>{}",
    "<|channel|>commentary shell <|constrain|>json<|message|>{}",
    " to=functions.shell<|channel|>commentary json<|message|>{}",
    " to=functions.shell<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{}",
    "<|channel|>commentary to=functions.shell<|channel|>commentary to=functions.shell<|message|>{}",
    "<|channel|>commentary to=assistant<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{}",
    "<|channel|><|channel|>commentary to=functions.shell<|message|>{}",
    "<|channel|>analysis to=functions.shell code<|message|>{}",
    "<|channel|>comment to=functions.shell<|message|>{}",
    "<|channel|>final to=functions.shell<|message|>{}",
    "<|channel|>––commentary to=functions.shell json<|message|>{}",
    "<|channel|>analysis––commentary to=functions.shell json<|message|>{}",
    "<|channel|>?? to=functions.shell<|message|>{}",
    "<|channel|> to=functions.shell<|message|>{}",
    "<|start|>assistant to=functions.shell<|channel|>commentary<|message|>{}",
    "<|start|>to=functions.shell<|channel|>commentary<|message|>{}",
    "<|channel|>commentary to=functions.shell {}",
]
"""Ways to write a call of ``shell`` with ``{}``, without the marker at its end."""

ANSWERS = [
    "<|channel|>final<|message|>So it is.",
    "<|channel|>final <|constrain|>json<|message|>So it is.",
    "<|channel|>final json<|message|>So it is.",
    "<|channel|> final<|message|>So it is.",
    "<|channel|>final\n<|message|>So it is.",
    "<|channel|>final to=user<|message|>So it is.",
    "<|channel|><|channel|>final<|message|>So it is.",
    "<|channel|>??<|message|>So it is.",
    "<|channel|><|message|>So it is.",
    "<|message|>So it is.",
    "final<|message|>So it is.",
    "<|channel|>final So it is.",
    "<|channel|>finalSo it is.",
    "So it is.",
]
"""Ways to write an answer, without the marker at its end."""


def heard(encoding: HarmonyEncoding, text: str, size: int) -> Items:
    tokens = encoding.encode_markup(text)
    parsed = parse_harmony(encoding, (tokens[at : at + size] for at in range(0, len(tokens), size)), tools=TOOLS)
    assert not any("<|" in item.text for item in parsed)
    return [(item.kind, item.name, item.text) for item in parsed]


@pytest.mark.defect("26")
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", "<|return|>", "<|call|><|call|>", "<|call|><|endoftext|>"])
@pytest.mark.parametrize("call", CALLS)
def test_call_is_found_in_any_header(call: str, end: str, size: int, encoding: HarmonyEncoding) -> None:
    assert heard(encoding, call + end, size) == [SHELL]
    assert heard(encoding, THOUGHT + NEXT + call + end, size) == [HM, SHELL]


@pytest.mark.defect("26")
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("end", ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>", "<|return|><|return|>", ""])
@pytest.mark.parametrize("answer", ANSWERS)
def test_answer_is_found_in_any_header(answer: str, end: str, size: int, encoding: HarmonyEncoding) -> None:
    assert heard(encoding, answer + end, size) == [ANSWER]
    assert heard(encoding, THOUGHT + NEXT + answer + end, size) == [HM, ANSWER]


@pytest.mark.defect("26")
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "between",
    [
        "<|end|><|start|>assistant",
        "<|end|><|start|><|start|>assistant",
        "<|end|>\n\n<|start|>assistant",
        "<|end|>",
        "<|start|>assistant",
        "<|call|><|start|>assistant",
        "<|return|><|start|>assistant",
        "<|end|><|end|><|start|>assistant",
        "",
    ],
)
@pytest.mark.parametrize(("behind", "item"), [(CALLS[0] + "<|call|>", SHELL), (ANSWERS[0] + "<|return|>", ANSWER)])
def test_messages_are_separated_by_any_markup(
    between: str, behind: str, item: tuple[str, str, str], size: int, encoding: HarmonyEncoding
) -> None:
    assert heard(encoding, THOUGHT + between + behind, size) == [HM, item]


@pytest.mark.defect("26")
@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("<|channel|>commentary?<|message|>I look.<|end|>", [("Message", "commentary", "I look.")]),
        ("<|channel|>commentary to=all<|message|>I look.<|end|>", [("Message", "commentary", "I look.")]),
        ("<|channel|>analysis We ask shell now<|message|>Hm.", [("Reasoning", "", "We ask shell now Hm.")]),
        ("<|channel|>commentary to=team.spawn<|message|>{}<|call|>", [SPAWN]),
        ("<|channel|>commentary to=spawn<|message|>{}<|call|>", [SPAWN]),
        ("<|channel|>commentary to=functions.team.spawn<|message|>{}<|call|>", [SPAWN]),
        ("<|channel|>commentary to=functions.sh<|message|>{}<|call|>", [("Reasoning", "", "{}")]),
        ('<|channel|>analysis to=browser.search code<|message|>{"q":<|call|>', [("Reasoning", "", '{"q":')]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [("Reasoning", "", "1 + 1")]),
        ("<|channel|>commentary to=container.exec<|message|>ls<|call|>", [("Reasoning", "", "ls")]),
        ('<|channel|>commentary to=functions.shell<|message|>{"a":<|call|>', [("FunctionCall", "shell", '{"a":')]),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_odd_messages_keep_their_text(text: str, items: Items, size: int, encoding: HarmonyEncoding) -> None:
    assert heard(encoding, text, size) == items

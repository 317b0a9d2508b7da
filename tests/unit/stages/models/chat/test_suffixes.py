"""Marks with a suffix, as each checkpoint of Hunyuan has its own."""

from __future__ import annotations

import pytest

from penstock.pipeline.frames import ChatTurn, GenerationFinished, TokenFrame
from penstock.stages.models.chat.model import ChatModel, Parsers
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS, made
from penstock.stages.models.chat.standalone import OwnParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support import parsed_output
from tests.support.chat_families import EndingTemplate, tokenizer_with

pytestmark = pytest.mark.vllm

PARIS = ("FunctionCall", "get_weather", '{"city": "Paris"}')
NAMES = ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")


@pytest.mark.parametrize("suffix", ["", ":opensource", ":6124c78e"])
@pytest.mark.parametrize("family", ["hy_v3", "hy_v4"])
@pytest.mark.parametrize("is_standalone", [False, True])
def test_marks_are_those_of_the_vocabulary(family: str, suffix: str, is_standalone: bool) -> None:
    begin, end = ({name: f"<{slash}{name}{suffix}>" for name in NAMES} for slash in ("", "/"))
    turn = f"<｜hy_Assistant{suffix}｜>"
    vocabulary = Vocabulary(tokenizer_with(("<|end|>", turn, *begin.values(), *end.values())))
    thoughts, calls = (made(family, own, vocabulary.marks) for own in (OWN_THOUGHTS, OWN_CALLS))
    parsers: Parsers = (
        OwnParsers(vocabulary, thoughts, calls) if is_standalone else NamedParsers(vocabulary.tokenizer, family, family)
    )
    model = ChatModel(vocabulary, EndingTemplate(""), parsers, (vocabulary.marks["<|end|>"],), {})
    assert parsers.thinking == (begin["think"], end["think"])
    name = f"get_weather{begin['tool_sep'] if family == 'hy_v3' else ''}\n"
    key = f"{begin['arg_key']}city{end['arg_key']}\n{begin['arg_value']}Paris{end['arg_value']}\n"
    call = f"{begin['tool_call']}{name}{key}{end['tool_call']}\n"
    text = f"Hm{end['think']}I look.{begin['tool_calls']}\n{call}{call}{end['tool_calls']}"
    prompt = tuple(vocabulary.encode(f"{turn}{begin['think']}"))
    frames: list[TokenFrame] = [
        parsed_output.turn_started(tools=parsed_output.CHAT_TOOLS, chat=ChatTurn(), prompt=prompt),
        *parsed_output.token_chunks([*vocabulary.encode(text), *model.stop_token_ids]),
        GenerationFinished("stop", 0, 0.0),
    ]
    items = parsed_output.items_in_brief(parsed_output.parsed_items(parsed_output.parse_chat_frames(model, frames)))
    assert items == [("Reasoning", "", "Hm"), ("Message", "", "I look."), PARIS, PARIS]


def test_calls_of_fixed_styles_are_not_written_with_a_suffix() -> None:
    plain, suffixed = (made("hy_v3", OWN_CALLS, (f"<think{end}>",)) for end in ("", ":opensource"))
    assert getattr(plain, "written", ())
    assert not getattr(suffixed, "written", ())

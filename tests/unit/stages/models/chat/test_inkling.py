"""Inkling's blocks, beside vLLM's parser of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.pipeline.frames import ChatTurn, GenerationFinished
from penstock.stages.models.chat.inkling import INKLING_MARKS
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support import parsed_output
from tests.support.chat_families import EndingTemplate, tokenizer_with
from tests.support.clock import count_instructions

pytestmark = pytest.mark.vllm

HEADER, REASONING, TEXT, RAW, ERROR, CALL, END, LAST = (
    "<|message_model|>",
    "<|content_thinking|>",
    "<|content_text|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    "<|content_invoke_tool_json|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
PARIS = '{"name": "get_weather", "args": {"city": "Paris"}}'
ASKED = ("FunctionCall", "get_weather", '{"city": "Paris"}')


@pytest.fixture(scope="module")
def model() -> ChatModel:
    vocabulary = Vocabulary(tokenizer_with(("<|end|>", *INKLING_MARKS)))
    parsers = NamedParsers(vocabulary.tokenizer, "inkling", "inkling")
    return ChatModel(vocabulary, EndingTemplate(""), parsers, (vocabulary.marks["<|end|>"],), {})


def items_in(
    model: ChatModel, text: str, *, prompt: str = HEADER, size: int = 1, is_cut: bool = False
) -> list[tuple[str, str, str]]:
    vocabulary = model.vocabulary
    started = parsed_output.turn_started(
        tools=parsed_output.CHAT_TOOLS, chat=ChatTurn(), prompt=tuple(vocabulary.encode(prompt))
    )
    chunks = parsed_output.token_chunks([*vocabulary.encode(text), *([] if is_cut else model.stop_token_ids)], size)
    finish = GenerationFinished("length" if is_cut else "stop", 0, 0.0)
    frames = parsed_output.parse_chat_frames(model, [started, *chunks, finish])
    return parsed_output.items_in_brief(parsed_output.parsed_items(frames))


BLOCKS = {
    f"{REASONING}Hm{END}{HEADER}{TEXT}Yes{END}{LAST}": [("Reasoning", "", "Hm"), ("Message", "", "Yes")],
    f"{TEXT}I ask.{END}{HEADER}get_weather{CALL}{PARIS}{END}{HEADER}{TEXT}Done{END}": [
        ("Message", "", "I ask."),
        ASKED,
        ("Message", "commentary", "Done"),
    ],
    f"{CALL}{PARIS}{END}{HEADER}{CALL}{PARIS}{END}": [ASKED, ASKED],
    f"{REASONING}Hm{CALL}{PARIS}{END}": [("Reasoning", "", "Hm"), ASKED],
    f'{CALL}{{"args": {{"city": "Paris"}}, "name": "get_weather"}}{END}': [ASKED],
    f'{CALL}{{"name": "get_time"}}{END}': [("FunctionCall", "get_time", "{}")],
    f"{RAW}ls <|end{END}": [("Message", "", "ls <|end")],
    f"{CALL}no call{END}": [("Message", "", f"{CALL}no call")],
    "No mark": [("Message", "", "No mark")],
    f"I ask.{HEADER}{CALL}{PARIS}{END}": [("Message", "", "I ask."), ASKED],
}


@pytest.mark.parametrize("size", [1, 3, 500])
@pytest.mark.parametrize("text", BLOCKS)
def test_blocks_are_items(text: str, size: int, model: ChatModel) -> None:
    assert items_in(model, text, size=size) == BLOCKS[text]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [(f"{HEADER}{REASONING}", "Reasoning"), (f"{HEADER}{TEXT}", "Message"), (END, "Message"), ("", "Message")],
)
def test_prompt_may_begin_the_first_block(prompt: str, kind: str, model: ChatModel) -> None:
    assert items_in(model, "So be it", prompt=prompt) == [(kind, "", "So be it")]


def test_cut_call_is_no_text(model: ChatModel) -> None:
    text = f"{TEXT}I ask.{END}{HEADER}{CALL}{PARIS}"
    for end in range(text.index(CALL) + len(CALL), len(text)):
        message, *calls = items_in(model, text[:end], is_cut=True)
        assert message == ("Message", "", "I ask.")
        assert all(ASKED[2].startswith(call[2]) and call[:2] == ASKED[:2] for call in calls)


@pytest.mark.slow
def test_cost_of_a_long_call_is_flat(model: ChatModel) -> None:
    def cost(words: int) -> int:
        return count_instructions(
            lambda: items_in(model, f"{CALL}{PARIS.replace('Paris', 'a warm city ' * words)}{END}")
        )

    assert cost(400) < 5 * cost(100)


BLOCK = st.one_of(
    st.sampled_from([f"{REASONING}Hm ", f"{TEXT}Yes ", f"{RAW}ls ", f"{ERROR}no ", f"{CALL}{PARIS}"]),
    st.text("ab <|\n", max_size=6).map(lambda text: f"{TEXT}{text}"),
)
BETWEEN = st.sampled_from([END, f"{END}{HEADER}", f"{END}{HEADER}get_weather", f"{END}{HEADER}{HEADER}"])


@given(st.lists(st.tuples(BLOCK, BETWEEN), min_size=1, max_size=6), st.sampled_from([1, 3, 500]))
@example([(f"{TEXT}<|", END), (f"{CALL}{PARIS}", END)], 1)
def test_blocks_are_read_as_vllm_reads_them(model: ChatModel, blocks: list[tuple[str, str]], size: int) -> None:
    text = "".join(block + between for block, between in blocks)
    items = items_in(model, text, size=size)
    reasoning, content, calls = theirs(model, text)
    assert spoken(items, "Reasoning") == "".join((reasoning or "").split())
    assert spoken(items, "Message") == "".join((content or "").split())
    found = [(name, arguments) for kind, name, arguments in items if kind == "FunctionCall"]
    assert found == [(call.name, call.arguments) for call in calls or ()]


def theirs(model: ChatModel, text: str) -> Any:
    """The reasoning, the content and the calls that vLLM finds in the whole output."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: PLC0415 - takes seconds
    from vllm.parser import ParserManager  # noqa: PLC0415

    tool = {"type": "function", "name": "get_weather", "parameters": parsed_output.CITY, "strict": None}
    request: Any = ResponsesRequest.model_validate({"model": "m", "input": "", "tools": [tool]})
    tokenizer = model.vocabulary.tokenizer
    parser = ParserManager.get_parser("inkling", "inkling", enable_auto_tools=True, tokenizer=tokenizer)
    assert parser
    return parser(tokenizer, request.tools).parse(text, request, enable_auto_tools=True)


def spoken(items: list[tuple[str, str, str]], kind: str) -> str:
    return "".join("".join(text.split()) for each, _, text in items if each == kind)

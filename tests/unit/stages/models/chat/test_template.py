"""Templates as vLLM renders them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.stages.models.chat.model import ChatMessage, ChatModel
from penstock.stages.models.chat.template import VllmTemplate
from penstock.stages.render.chat.messages import Arguments
from tests.support.chat_families import load_model

pytestmark = pytest.mark.vllm

HELLO: ChatMessage = {"role": "user", "content": "Hello."}


def template(source: str | None = None, content_format: Any = "auto") -> VllmTemplate:
    model: ChatModel = load_model()
    own = model.template
    assert isinstance(own, VllmTemplate)
    return VllmTemplate(own._renderer, source, content_format)


def calling(arguments: str) -> list[ChatMessage]:
    function = {"name": "get_weather", "arguments": Arguments(arguments)}
    return [HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}]


def test_template_is_rendered_as_text() -> None:
    rendered = template().render([HELLO], [], {})
    assert rendered.text.endswith("<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n")
    assert rendered.token_ids == ()


def test_template_gets_variables_and_functions() -> None:
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    rendered = template().render([HELLO], [weather], {"enable_thinking": False, "unheard_of": 1})
    assert "get_weather" in rendered.text
    assert rendered.text.endswith("<think>\n\n</think>\n\n")


def test_last_message_is_left_open() -> None:
    rendered = template().render([HELLO, {"role": "assistant", "content": "It is"}], [], {}, continues=True)
    assert rendered.text.endswith("It is")


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_content_has_the_configured_form(content_format: str) -> None:
    rendered = template("{{ messages[0].content | tojson }}", content_format).render([HELLO], [], {})
    assert rendered.text == ('"Hello."' if content_format == "string" else '[{"type": "text", "text": "Hello."}]')


def test_template_of_the_request_takes_precedence() -> None:
    assert template("ours").render([HELLO], [], {}, source="theirs").text == "theirs"
    assert template("ours").render([HELLO], [], {}).text == "ours"


def test_arguments_work_as_object_and_as_text() -> None:
    messages = calling('{"city":"Oslo"}')
    named = "{{ messages[1].tool_calls[0].function.arguments.city }}"
    joined = "{{ '<' + messages[1].tool_calls[0].function.arguments + '>' }}"
    assert template(named).render(messages, [], {}).text == "Oslo"
    assert template(joined).render(messages, [], {}).text == '<{"city":"Oslo"}>'
    assert messages == calling('{"city":"Oslo"}')
    assert template(joined).render(calling('{"city":'), [], {}).text == '<{"city":>'


def test_template_errors_are_reported() -> None:
    with pytest.raises(InvalidRequest, match="No tools on Sundays") as refused:
        template("{{ raise_exception('No tools on Sundays') }}").render([HELLO], [], {})
    assert refused.value.param == "input"
    with pytest.raises(InvalidRequest, match="no element 7"):
        template("{{ messages[7].content }}").render([HELLO], [], {})
    for source in ("{% broken", "{{ 1 / 0 }}", f"{{{{ {'(' * 2000}1{')' * 2000} }}}}"):
        with pytest.raises(InvalidRequest):
            template(source).render([HELLO], [], {})


def test_text_model_refuses_images() -> None:
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]}
    with pytest.raises(InvalidRequest, match="multimodal"):
        template().render([shown], [], {})

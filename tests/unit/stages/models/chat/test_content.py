"""The content of messages, as templates without vLLM and those of vLLM get it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from penstock.stages.models.chat.template import VllmTemplate
from tests.support.chat_families import load_model
from tests.support.paths import TINY_QWEN

pytestmark = pytest.mark.vllm

AS_JSON = "{% for message in messages %}{{ message.role }}: {{ message.content | tojson }};{% endfor %}"
TEXTS = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
PARTS = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
)
REFUSED = "{{ raise_exception('No.') }}"
TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@cache
def own_template(source: str, content_format: Any) -> ChatModel:
    options = ChatOptions(chat_template=source, chat_template_content_format=content_format)
    return load_from_files(ModelFiles(str(TINY_QWEN)), options)


@cache
def vllm_template(source: str, content_format: Any) -> VllmTemplate:
    own = load_model().template
    assert isinstance(own, VllmTemplate)
    return VllmTemplate(own._renderer, source, content_format)  # noqa: SLF001 - as `load` makes it


@pytest.mark.parametrize("content_format", ["auto", "string", "openai"])
@pytest.mark.parametrize("source", [AS_JSON, TEXTS, PARTS])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_has_the_form_that_vllm_gives_it(source: str, role: str, content_format: Any) -> None:
    own, vllm = own_template(source, content_format), vllm_template(source, content_format)
    for content in ("one", "", None, TWO, TWO[:1], []):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]
        assert own.template.render(messages, [], {}).text == vllm.render(messages, [], {}).text


def test_refused_parts_are_shown_as_texts() -> None:
    source = "{{ 'role: ' + messages[0].content }}"
    assert own_template(source, "auto").template.render([{"role": "user", "content": TWO}], [], {}).text == (
        "role: one\ntwo"
    )
    with pytest.raises(InvalidRequest, match=r"No\."):
        own_template(REFUSED, "auto").template.render([{"role": "user", "content": TWO}], [], {})

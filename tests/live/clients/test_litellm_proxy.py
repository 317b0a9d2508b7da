"""LiteLLM's proxy before the server: each of its routes, by each provider that can have a server of one's own."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.processes import free_port, running_process

HELLO = "Hello! How can I help you today?"
ASKED = "What is the weather in Paris?"
RESULT = '{"temperature":18,"unit":"C"}'
DESCRIPTION = "Get the weather of a city."
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PROVIDERS = ("openai", "hosted_vllm", "anthropic")


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Chat:
    """The route of Chat Completions, for a model."""

    client: openai.OpenAI
    model: str

    def create(self, messages: Any, **options: Any) -> Any:
        return self.client.chat.completions.create(model=self.model, messages=messages, temperature=0, **options)

    def text(self, text: str) -> str:
        return self.create(said(text)).choices[0].message.content

    def streamed(self, text: str) -> str:
        chunks = self.create(said(text), stream=True)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    def weather(self) -> str:
        function = {"name": "get_weather", "description": DESCRIPTION, "parameters": CITY}
        tools, messages = [{"type": "function", "function": function}], said(ASKED)
        called = self.create(messages, tools=tools).choices[0].message
        messages += [called.to_dict(), {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": RESULT}]
        return self.create(messages, tools=tools).choices[0].message.content

    def parsed(self, text: str) -> Any:
        answer = self.client.chat.completions.parse(model=self.model, messages=said(text), response_format=Person)
        return answer.choices[0].message.parsed


@dataclass(frozen=True)
class Responses:
    """The route of Responses, for a model."""

    client: openai.OpenAI
    model: str

    def create(self, items: Any, **options: Any) -> Any:
        return self.client.responses.create(model=self.model, input=items, temperature=0, **options)

    def text(self, text: str) -> str:
        return self.create(text).output_text

    def streamed(self, text: str) -> str:
        events = self.create(text, stream=True)
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    def weather(self) -> str:
        tools = [{"type": "function", "name": "get_weather", "description": DESCRIPTION, "parameters": CITY}]
        called = self.create(ASKED, tools=tools).output
        output = {"type": "function_call_output", "call_id": called[-1].call_id, "output": RESULT}
        return self.create([*said(ASKED), *called, output], tools=tools).output_text

    def parsed(self, text: str) -> Any:
        return self.client.responses.parse(model=self.model, input=text, text_format=Person).output_parsed


@dataclass(frozen=True)
class Messages:
    """The route of Messages, for a model."""

    client: anthropic.Anthropic
    model: str

    def create(self, messages: Any, **options: Any) -> Any:
        return self.client.messages.create(model=self.model, messages=messages, max_tokens=500, **options)

    def text(self, text: str) -> str:
        return self.create(said(text)).content[-1].text

    def streamed(self, text: str) -> str:
        with self.client.messages.stream(model=self.model, messages=said(text), max_tokens=500) as stream:
            return stream.get_final_text()

    def weather(self) -> str:
        tools = [{"name": "get_weather", "description": DESCRIPTION, "input_schema": CITY}]
        called = self.create(said(ASKED), tools=tools).content
        result = {"type": "tool_result", "tool_use_id": called[-1].id, "content": RESULT}
        messages = [*said(ASKED), {"role": "assistant", "content": called}, {"role": "user", "content": [result]}]
        return self.create(messages, tools=tools).content[-1].text

    def parsed(self, text: str) -> Any:
        settings: Any = {"model": self.model, "max_tokens": 500}
        return self.client.messages.parse(messages=said(text), output_format=Person, **settings).parsed_output


Route = Chat | Responses | Messages

# The proxy's own thoughts of Anthropic's models are not of the SDK's types.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")


@pytest.fixture(scope="module")
def clients(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[openai.OpenAI, anthropic.Anthropic], None, None]:
    """The clients of a proxy, whose models are named for their providers."""
    folder = tmp_path_factory.mktemp("proxy")
    bases = {provider: url.removesuffix("/v1") if provider == "anthropic" else url for provider in PROVIDERS}
    models = [
        {
            "model_name": provider,
            "litellm_params": {"model": f"{provider}/tiny-gpt-oss", "api_base": base, "api_key": "none"},
        }
        for provider, base in bases.items()
    ]
    (folder / "config.yaml").write_text(json.dumps({"model_list": models}))
    port, key = free_port(), f"sk-{secrets.token_hex(32)}"
    command = [Path(sys.executable).with_name("litellm"), "--config", folder / "config.yaml"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    base, variables = f"http://127.0.0.1:{port}", {"LITELLM_MASTER_KEY": key}
    with ExitStack() as ending:
        ending.enter_context(running_process(command, f"{base}/health/liveliness", folder / "log", variables))
        of_openai = ending.enter_context(openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0))
        yield of_openai, ending.enter_context(anthropic.Anthropic(base_url=base, api_key=key, max_retries=0))


@pytest.fixture(params=[Chat, Responses, Messages], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[Route]:
    return request.param


@pytest.fixture(params=PROVIDERS)
def route(
    request: pytest.FixtureRequest, kind: type[Route], clients: tuple[openai.OpenAI, anthropic.Anthropic]
) -> Route:
    of_openai, of_anthropic = clients
    return Messages(of_anthropic, request.param) if kind is Messages else kind(of_openai, request.param)


def test_text_is_passed_on(route: Route) -> None:
    assert route.text("Say hello.") == HELLO


def test_stream_is_passed_on(route: Route) -> None:
    assert route.streamed("Say hello.") == HELLO


def test_call_and_its_result_are_passed_on(route: Route) -> None:
    assert route.weather() == "It is 18 °C in Paris right now."


def test_schema_is_passed_on(route: Route) -> None:
    assert isinstance(route.parsed("Say hello."), Person)


def test_proxy_knows_that_the_context_is_full(route: Route) -> None:
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="ContextWindowExceededError"):
        route.text("word " * 20_000)

"""What clients make of errors: each has a table of words, codes and statuses of its own.

The server's engine fails as the prompt says.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anthropic
import litellm
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.client_server import FAILING_KEY, USED_UP_KEY


@dataclass(frozen=True)
class Asked:
    """A request that fails."""

    text: str = "Hi"
    key: str = FAILING_KEY
    model: str = "tiny"
    temperature: float = 1.0

    @property
    def messages(self) -> list[Any]:
        return [{"role": "user", "content": self.text}]


FAILING = {
    "too long": Asked("word " * 3000),
    "bad request": Asked(temperature=9.0),
    "bad key": Asked(key="sk-unknown-0123456789"),
    "unknown model": Asked(model="gpt-9"),
    "rate limit": Asked(key=USED_UP_KEY),
    "overload": Asked("The engine is full."),
    "dead": Asked("The engine is dead."),
    "midway": Asked("The engine fails midway."),
}
"""The requests by what is wrong with them."""

Client = Callable[[str, Asked, bool], Any]


def sdk(api: str, url: str, asked: Asked, stream: bool) -> Any:
    common: Any = {"model": asked.model, "stream": stream}
    if api == "messages":
        client = anthropic.Anthropic(base_url=url, api_key=asked.key, max_retries=0)
        extra = {"temperature": asked.temperature}
        return client.messages.create(max_tokens=50, messages=asked.messages, extra_body=extra, **common)
    clients = openai.OpenAI(base_url=f"{url}/v1", api_key=asked.key, max_retries=0)
    match api:
        case "chat":
            return clients.chat.completions.create(messages=asked.messages, temperature=asked.temperature, **common)
        case "completions":
            return clients.completions.create(prompt=asked.text, temperature=asked.temperature, **common)
        case _:
            return clients.responses.create(input=asked.text, temperature=asked.temperature, **common)


def lite(provider: str, url: str, asked: Asked, stream: bool) -> Any:
    common: Any = {"api_key": asked.key, "temperature": asked.temperature, "max_tokens": 50, "max_retries": 0}
    common |= {"model": f"{provider}/{asked.model}", "stream": stream}
    if provider == "text-completion-openai":
        return litellm.text_completion(prompt=asked.text, api_base=f"{url}/v1", **common)
    base = url if provider == "anthropic" else f"{url}/v1"
    return litellm.completion(messages=asked.messages, api_base=base, num_retries=0, **common)


def chain(api: str, url: str, asked: Asked, stream: bool) -> Any:
    common: Any = {"model": asked.model, "api_key": asked.key, "temperature": asked.temperature, "max_retries": 0}
    if api == "messages":
        model: Any = ChatAnthropic(base_url=url, max_tokens=50, **common)
    else:
        model = ChatOpenAI(base_url=f"{url}/v1", use_responses_api=api == "responses", **common)
    return model.stream(asked.text) if stream else model.invoke(asked.text)


def agent(api: str, url: str, asked: Asked, stream: bool) -> Any:
    if api == "messages":
        client = anthropic.AsyncAnthropic(base_url=url, api_key=asked.key, max_retries=0)
        model: Any = AnthropicModel(asked.model, provider=AnthropicProvider(anthropic_client=client))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        clients = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=asked.key, max_retries=0)
        model = kind(asked.model, provider=OpenAIProvider(openai_client=clients))
    running = Agent(model, model_settings={"temperature": asked.temperature, "max_tokens": 50})

    async def stream_text() -> list[str]:
        async with running.run_stream(asked.text) as answer:
            return [text async for text in answer.stream_text()]

    return asyncio.run(stream_text() if stream else running.run(asked.text))


OPENAI = "BadRequest BadRequest Authentication NotFound RateLimit InternalServer InternalServer"
ANTHROPIC = "BadRequest BadRequest Authentication NotFound RateLimit ServiceUnavailable ServiceUnavailable"
LITELLM = "ContextWindowExceeded BadRequest Authentication NotFound RateLimit"
LANGCHAIN = "ContextOverflow InvalidRequest Authentication ModelNotFound RateLimit API API"
PYDANTIC = (
    "ContextWindowExceeded RequestRejected Authentication NotFound RateLimit Overloaded Unavailable Server Server"
)

MADE: dict[str, tuple[Client, str]] = {
    "openai chat": (partial(sdk, "chat"), f"{OPENAI} InternalServer API"),
    "openai completions": (partial(sdk, "completions"), f"{OPENAI} InternalServer API"),
    "openai responses": (partial(sdk, "responses"), f"{OPENAI} - -"),
    "anthropic": (partial(sdk, "messages"), f"{ANTHROPIC} InternalServer APIStatus"),
    "litellm chat": (
        partial(lite, "openai"),
        f"{LITELLM} ServiceUnavailable ServiceUnavailable InternalServer MidStreamFallback",
    ),
    "litellm completions": (
        partial(lite, "text-completion-openai"),
        f"{LITELLM} ServiceUnavailable ServiceUnavailable InternalServer InternalServer",
    ),
    "litellm vllm": (
        partial(lite, "hosted_vllm"),
        f"{LITELLM} RateLimit ServiceUnavailable InternalServer MidStreamFallback",
    ),
    "litellm responses": (partial(lite, "openai/responses"), f"{LITELLM} RateLimit ServiceUnavailable APIConnection -"),
    "litellm messages": (
        partial(lite, "anthropic"),
        f"{LITELLM} InternalServer ServiceUnavailable InternalServer MidStreamFallback",
    ),
    "langchain chat": (partial(chain, "chat"), f"{LANGCHAIN} API API"),
    "langchain responses": (partial(chain, "responses"), f"{LANGCHAIN} Value Value"),
    "langchain messages": (partial(chain, "messages"), f"{LANGCHAIN} API APIStatus"),
    "pydantic-ai chat": (partial(agent, "chat"), PYDANTIC),
    "pydantic-ai responses": (partial(agent, "responses"), PYDANTIC),
    "pydantic-ai messages": (partial(agent, "messages"), PYDANTIC),
}
"""What each client raises for the requests, the last one whole and streamed, without the name of its maker.

An error of the Responses API after the response has begun is a response that failed: some clients raise nothing then.
"""


@pytest.mark.filterwarnings("ignore")  # of clients that are not closed, as they raised
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", MADE)
def test_client_knows_each_error(failing: str, name: str, stream: bool) -> None:
    ask, expected = MADE[name]
    *before, whole, streamed = expected.split()
    raised = [_raised(ask, failing, asked, stream) for asked in FAILING.values()]
    assert raised == [*before, streamed if stream else whole]


def _raised(ask: Client, url: str, asked: Asked, stream: bool) -> str:
    """Return the name of the error that a client raises, without its maker; a dash for none."""
    try:
        answer = ask(url, asked, stream)
        if stream:
            list(answer)
    except Exception as error:  # noqa: BLE001 - of any client
        return re.sub("^(OpenAI|Anthropic|Model)|Error$", "", type(error).__name__)
    return "-"

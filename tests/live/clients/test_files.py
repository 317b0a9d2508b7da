"""Files, as SDKs and frameworks send them: uploaded and named by their ids, or in the request."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent as OpenAIAgent
from agents import CodeInterpreterTool, ModelSettings, Runner, set_tracing_disabled
from agents import OpenAIResponsesModel as OpenAIAgentModel
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, BinaryContent, DocumentUrl, ModelHTTPError, UploadedFile
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.documents import as_base64, pdf

set_tracing_disabled(disabled=True)  # traces would go to OpenAI

MODEL = "tiny-gpt-oss"
REPORT = pdf([f"Sales rose by {percent} percent." for percent in range(20)])
TEXT = b"Sales rose by one percent. " * 30
BROKEN = b"%PDF-1.4"
UNREADABLE = "cannot be read. It is no valid PDF"


@pytest.fixture
def claude(url: str) -> Generator[anthropic.Anthropic, None, None]:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        yield client


def asked(*parts: Any) -> Any:
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": "Say hello."}]}]


def test_openai_python_stores_and_names_files(client: openai.OpenAI) -> None:
    made = client.files.create(
        file=("report.pdf", REPORT, "application/pdf"),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3_600},
    )
    assert made.expires_at == made.created_at + 3_600
    assert client.files.wait_for_processing(made.id) == made
    assert made in list(client.files.list(limit=1, purpose="user_data"))
    assert client.files.content(made.id).read() == REPORT
    with client.files.with_streaming_response.content(made.id) as streamed:
        assert b"".join(streamed.iter_bytes(100)) == REPORT
    named: Any = {"type": "input_file", "file_id": made.id}
    plain, read = (
        client.responses.create(model=MODEL, input=asked(*parts), max_output_tokens=16).usage
        for parts in ((), (named,))
    )
    assert plain is not None
    assert read is not None
    assert read.input_tokens > plain.input_tokens + 15
    client.files.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input=asked(named))


def test_anthropic_python_stores_and_names_files(claude: anthropic.Anthropic) -> None:
    made = claude.beta.files.upload(file=("report.pdf", REPORT, "application/pdf"))
    assert abs(made.created_at.timestamp() - time.time()) < 600
    assert made in list(claude.beta.files.list(limit=1))
    assert claude.beta.files.download(made.id).read() == REPORT
    document: Any = {"type": "document", "source": {"type": "file", "file_id": made.id}}
    said: Any = [{"role": "user", "content": [document, {"type": "text", "text": "Say hello."}]}]
    message = claude.beta.messages.create(model=MODEL, max_tokens=16, messages=said, betas=["files-api-2025-04-14"])
    assert message.usage.input_tokens > 30
    claude.beta.files.delete(made.id)
    with pytest.raises(anthropic.NotFoundError, match=r"messages\[0\]\.content\[0\]"):
        claude.messages.create(model=MODEL, max_tokens=16, messages=said)


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatModel])
async def test_pydantic_ai_sends_files(url: str, kind: Any) -> None:
    model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 500})
    result = await agent.run(["Say hello.", BinaryContent(REPORT, media_type="application/pdf")])
    assert result.usage.input_tokens > 150
    with pytest.raises(ModelHTTPError) as refused:
        await agent.run(["Say hello.", BinaryContent(BROKEN, media_type="application/pdf")])
    assert UNREADABLE in str(refused.value)


async def test_pydantic_ai_sends_documents_as_anthropic(claude: anthropic.Anthropic) -> None:
    provider = AnthropicProvider(base_url=str(claude.base_url), api_key="none")
    agent = Agent(AnthropicModel(MODEL, provider=provider), model_settings={"temperature": 0, "max_tokens": 500})
    for document in (BinaryContent(REPORT, media_type="application/pdf"), BinaryContent(TEXT, media_type="text/plain")):
        result = await agent.run(["Say hello.", document])
        assert result.usage.input_tokens > 150


async def test_pydantic_ai_names_files(url: str, client: openai.OpenAI, neighbours: str) -> None:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 500})
    plain = await agent.run("Say hello.")
    made = client.files.create(file=("report.pdf", REPORT), purpose="user_data")
    page = DocumentUrl(f"{neighbours}/vllm", media_type="text/html")
    for document in (UploadedFile(made.id, provider_name="openai"), page):
        result = await agent.run(["Say hello.", document])
        assert result.usage.input_tokens > plain.usage.input_tokens + 10


async def test_agent_of_openai_reads_a_file_and_gives_it_to_its_code(url: str, client: openai.OpenAI) -> None:
    made = client.files.create(file=("report.pdf", REPORT), purpose="user_data")
    container: Any = {"type": "auto", "file_ids": [made.id]}
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as connection:
        tool = CodeInterpreterTool({"type": "code_interpreter", "container": container})
        settings = ModelSettings(temperature=0, max_tokens=500)
        worker = OpenAIAgent("Worker", model=OpenAIAgentModel(MODEL, connection), model_settings=settings, tools=[tool])
        read = await Runner.run(worker, asked({"type": "input_file", "file_id": made.id}))
        assert read.context_wrapper.usage.input_tokens > 150
        ran = await Runner.run(worker, "Set x to 20 in Python, then double it.")
    (place,) = {item.raw_item.container_id for item in ran.new_items if item.type == "tool_call_item"}
    (file,) = client.containers.files.list(place)
    assert client.containers.files.content.retrieve(file.id, container_id=place).read() == REPORT


def test_langchain_sends_documents_as_anthropic(claude: anthropic.Anthropic) -> None:
    chat = ChatAnthropic(base_url=str(claude.base_url), model=MODEL, api_key="none", max_tokens=500, temperature=0)
    file = {"type": "file", "base64": as_base64(REPORT), "mime_type": "application/pdf"}
    answer: Any = chat.invoke([HumanMessage(content=[file, {"type": "text", "text": "Say hello."}])])
    assert answer.usage_metadata["input_tokens"] > 150


@pytest.mark.parametrize("uses_responses", [True, False])
def test_langchain_sends_files(url: str, client: openai.OpenAI, uses_responses: bool) -> None:
    chat = ChatOpenAI(
        base_url=url, model=MODEL, api_key="none", temperature=0, max_retries=0, use_responses_api=uses_responses
    )

    def message(**file: str) -> list[HumanMessage]:
        return [HumanMessage(content=[{"type": "text", "text": "Say hello."}, {"type": "file", **file}])]

    answer: Any = chat.invoke(message(base64=as_base64(REPORT), mime_type="application/pdf", filename="report.pdf"))
    assert answer.usage_metadata["input_tokens"] > 150
    with pytest.raises(openai.BadRequestError, match=UNREADABLE):
        chat.invoke(message(base64=as_base64(BROKEN), mime_type="application/pdf", filename="report.pdf"))
    made = client.files.create(file=("report.pdf", BROKEN), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match=UNREADABLE):
        chat.invoke(message(file_id=made.id))

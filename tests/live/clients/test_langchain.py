from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    assert city == "Paris"
    return '{"temperature":18,"unit":"C"}'


def chat(url: str, **options: Any) -> ChatOpenAI:
    settings = {"model": "tiny-gpt-oss", "api_key": "none", "temperature": 0, "use_responses_api": True} | options
    return ChatOpenAI(base_url=url, **settings)


def test_model_answers_with_usage(url: str) -> None:
    message: Any = chat(url).invoke("Say hello.")
    assert message.text == "Hello! How can I help you today?"
    assert message.usage_metadata["output_token_details"]["reasoning"] > 0


def test_chunks_sum_to_the_text(url: str) -> None:
    assert "".join(chunk.text for chunk in chat(url).stream("Say hello.")) == "Hello! How can I help you today?"


def test_reasoning_summary_is_a_content_block(url: str) -> None:
    message = chat(url, reasoning={"summary": "auto"}).invoke("Say hello.")
    thoughts = [block.get("reasoning") for block in message.content_blocks if block["type"] == "reasoning"]
    assert thoughts == ["The user wants a greeting."]


@pytest.mark.parametrize("by_id", [False, True], ids=["replayed", "by_id"])
def test_model_calls_a_tool(url: str, by_id: bool) -> None:
    model = chat(url, use_previous_response_id=by_id).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    messages.append(model.invoke(messages))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert model.invoke(messages).text == "It is 18 °C in Paris right now."


def test_model_calls_a_tool_in_a_stream(url: str) -> None:
    model = chat(url).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    first, *rest = model.stream(messages)
    messages.append(sum(rest, start=first))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert model.invoke(messages).text == "It is 18 °C in Paris right now."


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_is_an_instance(url: str, method: Any) -> None:
    assert isinstance(chat(url).with_structured_output(Person, method=method).invoke("Say hello."), Person)


def test_required_tool_is_called(url: str) -> None:
    message = chat(url).bind_tools([get_weather], tool_choice="any", strict=True).invoke("Say hello.")
    assert message.tool_calls[0]["name"] == "get_weather"
    assert message.tool_calls[0]["args"]["city"] in {"Paris", "Rome"}


# Agents, which run in LangGraph


def asked(question: str) -> Any:
    return {"messages": [{"role": "user", "content": question}]}


@pytest.mark.parametrize("by_id", [False, True], ids=["replayed", "by_id"])
def test_agent_calls_a_tool(url: str, by_id: bool) -> None:
    agent = create_agent(chat(url, use_previous_response_id=by_id), tools=[get_weather])
    result = agent.invoke(asked("What is the weather in Paris?"))
    assert [message.type for message in result["messages"]] == ["human", "ai", "tool", "ai"]
    assert result["messages"][-1].text == "It is 18 °C in Paris right now."


def test_agent_streams_its_answer(url: str) -> None:
    agent = create_agent(chat(url), tools=[get_weather])
    chunks = agent.stream(asked("What is the weather in Paris?"), stream_mode="messages")
    texts = [chunk.text for chunk, _ in chunks if chunk.type == "AIMessageChunk"]
    assert len(texts) > 2
    assert "".join(texts) == "It is 18 °C in Paris right now."


@pytest.mark.parametrize("by_id", [False, True], ids=["replayed", "by_id"])
def test_thread_keeps_the_conversation(url: str, by_id: bool) -> None:
    agent = create_agent(chat(url, use_previous_response_id=by_id), tools=[], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "one"}}
    agent.invoke(asked("Remember the number seven."), thread)
    result = agent.invoke(asked("What did I say before?"), thread)
    assert result["messages"][-1].text == "You asked me to remember the number seven."


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
def test_agent_answers_in_its_format(url: str, strategy: Any) -> None:
    """The tools of a `ToolStrategy` are forced, and not strict."""
    agent = create_agent(chat(url), tools=[], response_format=strategy(Person))
    result = agent.invoke(asked("Say hello."), {"recursion_limit": 5})
    assert isinstance(result["structured_response"], Person)

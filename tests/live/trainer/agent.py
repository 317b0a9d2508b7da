"""An agent that knows nothing of training: it asks a tool for the weather, and its work gets a reward."""

from __future__ import annotations

import json

from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)  # traces would go to OpenAI

CITIES = ("Paris", "Rome")
"""The cities whose weather users ask for."""

STATION = "Oslo"
"""The one city whose weather is measured: what the agent is to learn, and only rewards tell."""

MEASURED = 3
"""The temperature there."""

MOST_TOKENS = 48
"""Tokens of a turn, with its thoughts."""

MOST_TURNS = 3


def question(city: str) -> str:
    """The request of a user."""
    return f"What is the weather in {city}?"


async def work(client: AsyncOpenAI, model: str, session: str, city: str) -> float:
    """Let an agent answer, and return the reward: 1 if it asked the station, once, and told what that measured."""
    asked: list[str] = []

    @function_tool(strict_mode=False)  # a grammar would hold a strict call, and its log probabilities
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return json.dumps({"temperature": MEASURED if city == STATION else None, "unit": "C"})

    settings = ModelSettings(temperature=1.0, max_tokens=MOST_TOKENS, extra_headers={"X-Session-ID": session})
    agent = Agent("Forecaster", model=OpenAIResponsesModel(model, client), model_settings=settings, tools=[get_weather])
    try:
        result = await Runner.run(agent, question(city), max_turns=MOST_TURNS, auto_previous_response_id=True)
    except AgentsException:  # it wrote no answer, too much, or a call of a tool that it has not
        return 0.0
    return float(asked == [STATION] and f"It is {MEASURED} °C" in result.final_output)

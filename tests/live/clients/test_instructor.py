from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: Literal["Ada", "Grace"]
    age: Annotated[int, Field(ge=0, le=150)]


MODES = pytest.mark.parametrize(
    "mode",
    [instructor.Mode.RESPONSES_TOOLS, instructor.Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS],
    ids=lambda mode: mode.name,
)
"""Both force the call of a function that is not strict."""

REQUEST: Any = {
    "model": "tiny-gpt-oss",
    "messages": [{"role": "user", "content": "Say hello."}],
    "temperature": 0,
    "max_retries": 0,
}


@MODES
def test_answer_is_an_instance(url: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
    person, response = client.create_with_completion(response_model=Person, **REQUEST)
    assert isinstance(person, Person)
    assert response.status == "completed"


@MODES
async def test_async_answer_is_an_instance(url: str, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=url, api_key="none"), mode=mode)
    assert isinstance(await client.create(response_model=Person, **REQUEST), Person)


def test_partial_answers_grow_to_the_instance(url: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.RESPONSES_TOOLS)
    *earlier, last = client.create_partial(response_model=Person, **REQUEST)
    assert earlier
    assert Person.model_validate(last.model_dump())

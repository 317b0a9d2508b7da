"""The options of the load generator, and the numbers that are drawn for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AliasChoices, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

DEFAULT_REQUESTS = 100

_DRAWS: dict[str, tuple[int, Callable[..., float]]] = {
    "": (1, lambda _, size: size),
    "uniform": (2, Random.uniform),
    "normal": (2, Random.normalvariate),
    "lognormal": (2, lambda random, median, sigma: random.lognormvariate(log(median), sigma)),
    "exp": (1, lambda random, mean: random.expovariate(1 / mean)),
}
"""The numbers that each distribution takes, and its draw."""

_SIZE = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<numbers>[\d.]+(?:,[\d.]+)*)")


def drawn(size: str, random: Random) -> int:
    """Draw a number of words or tokens, at least one, from ``200``, ``uniform:100,400`` or another distribution."""
    match = _SIZE.fullmatch(size)
    kind = match["kind"] or "" if match else None
    if not match or kind not in _DRAWS:
        raise ValueError(f"expected 200, uniform:100,400, normal:200,50, lognormal:200,0.8 or exp:200, not {size!r}")
    count, draw = _DRAWS[kind]
    numbers = [float(number) for number in match["numbers"].split(",")]
    if len(numbers) != count or not numbers[0]:
        raise ValueError(f"{size!r} needs {count} numbers, the first above 0")
    return max(1, round(draw(random, *numbers)))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the seconds at which conversations begin: a Poisson process of ``rate`` per second, without an end."""
    random, at = Random(f"{seed}/arrivals"), 0.0
    while True:
        at += random.expovariate(rate)
        yield at


def _size(text: str) -> str:
    drawn(text, Random(0))
    return text


Size = Annotated[str, AfterValidator(_size)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]


class Plan(BaseSettings):
    """Put load on a server of the Responses API, and report what its clients see.

    A variable LOAD_... stands for an option that is not given: LOAD_API_KEY for --api-key.
    """

    model_config = SettingsConfigDict(
        env_prefix="LOAD_",
        cli_prog_name="python -m tests.bench.load",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        populate_by_name=True,
    )

    url: CliPositionalArg[str] = Field(description="of the server, such as http://127.0.0.1:8000")
    model: str | None = Field(None, description="its name; without it, the first of /v1/models")
    api_key: SecretStr | None = None

    streams: Positive = Field(8, description="conversations at once: the next begins when one ends")
    rate: float | None = Field(
        None, gt=0, description="conversations a second, which begin at random times, however many run"
    )
    requests: Positive | None = Field(None, description=f"end after this number; {DEFAULT_REQUESTS} without --seconds")
    seconds: float | None = Field(None, gt=0, description="begin no request after this time; running ones end")
    warmup: int = Field(0, ge=0, description="requests before the measurement")
    timeout: float = Field(600, gt=0, description="seconds for one request")
    seed: int = Field(0, description="the same seed gives the same prompts, sizes and arrivals")

    prompt: Size = Field(
        "200", description="words of a user's message: 200, uniform:100,400, normal:200,50, lognormal:200,0.8, exp:200"
    )
    output: Size = Field("128", description="max_output_tokens, in the same forms")
    question: str = Field("Never stop talking.", description="last sentence of each user's message")
    shared_prefix: int = Field(0, ge=0, description="words of instructions that all conversations of a group share")
    groups: Positive = Field(1, description="groups of conversations, each with a prefix of its own")
    turns: Positive = Field(1, description="turns of a conversation")
    history: Literal["resent", "stored"] = Field(
        "resent", description="resent: store is false, and each turn sends all before it; stored: previous_response_id"
    )
    tools: int = Field(0, ge=0, description="function tools of each request; the output of a call is sent back")
    tool_output: Size = Field("50", description="words of the output of a call")
    body: dict[str, Any] = Field({}, description='more parameters of each request: {"reasoning": {"effort": "low"}}')

    cancel: Share = Field(0, description="share of the streams that are closed midway")
    slow: Share = Field(0, description="share of the streams that are read slowly")
    slow_bytes: Positive = Field(1000, description="bytes a second that slow readers read")

    result: Path | None = Field(None, validation_alias=AliasChoices("json"), description="file for the result as JSON")
    beside: list[Path] = Field([], description="results of earlier runs (--json), shown beside this one")
    name: str | None = Field(None, description="of this run in tables; its URL without it")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.requests is None and self.seconds is None:
            self.requests = DEFAULT_REQUESTS
        return self

    @property
    def api(self) -> str:
        """The base URL of the API, ``/v1`` included."""
        base = self.url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"

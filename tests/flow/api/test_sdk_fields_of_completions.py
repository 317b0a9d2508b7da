"""The verdict of each field of a completion's body, as openai-python's types have it, and that the server keeps to it.

A new version of the SDK with fields that stand in no table here fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

from penstock.extensions.dialects.completions.dialect import read
from penstock.pipeline.errors import InvalidRequest
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.sdk_types import BodyTypes, Probe, Verdicts
from tests.support.server import running_server, script

Json: TypeAlias = Any

CREATE = "CompletionCreateParamsNonStreaming"
"""The type of the body."""

TAKEN: Mapping[str, str] = {
    CREATE: "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop"
    " stream stream_options suffix temperature top_p user",
    "ChatCompletionStreamOptionsParam": "include_obfuscation include_usage",
}
"""The fields that have an effect, are part of what the model or the client reads, or are refused."""

REFUSED: Mapping[str, str | None] = {f"{CREATE}.best_of": "best_of", f"{CREATE}.suffix": "suffix"}
"""The fields that are refused, by their place; ``best_of`` for more completions than the answer has."""

VERDICTS = Verdicts(TAKEN, {}, {}, REFUSED)

TYPES = BodyTypes(
    CompletionCreateParamsNonStreaming,
    by_field={"model": "tiny", "best_of": 3, "n": 2, "logit_bias": {"5": 1}},
    beside={},
    dictionaries={},
    last="prompt",
)


def bodies() -> Iterator[Probe]:
    """Yield each probe; models of OpenAI's are none of this server, and options of a stream need one."""
    for name, value, without in TYPES.probes(()):
        if not name.startswith(f"{CREATE}.model="):
            streams = {"stream": True} if "stream_options" in value else {}
            yield Probe(name, {**value, **streams}, {**without, **streams})


def request_of(body: Json) -> Json:
    """All that the server reads in a body; None if it refuses it."""
    try:
        reading = read(json.dumps(body).encode())
    except InvalidRequest:
        return None
    return reading.request, reading.others, reading.wire, reading.streams


async def test_server_keeps_to_the_verdict_of_every_field(tmp_path: Path) -> None:
    wrong: list[str] = []
    async with running_server(ScriptedEngine(script("Hello.")), tmp_path) as served:
        for probe in bodies():
            async with served.client.post(f"{served.url}/v1/completions", json=probe.value) as answer:
                text = await answer.text()
                found = None if answer.status == 200 else json.loads(text)["error"]["param"]
            if (answer.status == 200, found) != (VERDICTS.expected(probe.name) is None, VERDICTS.expected(probe.name)):
                wrong.append(f"{probe.name}: {answer.status} {found}")
    assert not wrong, "\n".join(wrong)


def test_every_field_of_the_sdk_has_a_verdict() -> None:
    assert VERDICTS.fields == TYPES.objects(())


def test_every_field_has_an_effect() -> None:
    effects: dict[str, bool] = {}
    for probe in bodies():
        if probe.value != probe.without and ":" not in probe.name and VERDICTS.expected(probe.name) is None:
            changed = request_of(probe.value) != request_of(probe.without)
            effects[probe.field] = effects.get(probe.field, False) or changed
    assert {name for name, has_effect in effects.items() if not has_effect} <= {f"{CREATE}.stream"}
    assert len(effects) > 10

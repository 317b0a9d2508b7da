"""One server of three real models: in its process, as a process of its own, and one that embeds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.support.paths import TINY_QWEN
from tests.support.processes import PATIENCE
from tests.support.serve_command import Command, running_models
from tests.support.tiny_engine import CHECKPOINT

VLLM = Path(sys.executable).with_name("vllm")

SMALL = "--dtype bfloat16 --enforce-eager --max-model-len 2048 --max-num-seqs 4 --kv-cache-memory-bytes 33554432"

MODELS = f"""
engine-wait = "{PATIENCE:g}s"

[models.large]
model = {json.dumps(str(CHECKPOINT))}
names = ["claude-opus-*"]

[models.large.vllm]
dtype = "bfloat16"
enforce-eager = true
max-model-len = 4096
max-num-seqs = 8
kv-cache-memory-bytes = 67108864

[models.small]
command = {json.dumps(f"{VLLM} serve {TINY_QWEN} {SMALL}")}
names = ["claude-haiku-*"]
groups = ["cpu"]

[models.vectors]
command = {json.dumps(f"{VLLM} serve {TINY_QWEN} {SMALL} --runner pooling --convert embed")}
kind = "embed"
groups = ["cpu"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("several")
    with running_models(folder, MODELS) as server:
        yield server


def states(server: Command) -> dict[str, str]:
    """The state of each model by its name."""
    return {each.id: getattr(each, "state") for each in server.client.models.list()}  # noqa: B009 - no field of the SDK


def test_each_sdk_asks_a_model_of_its_own(server: Command) -> None:
    assert states(server)["small"] == "stopped"
    large = server.client.responses.create(model="large", input="Hi", max_output_tokens=16)
    assert (large.model, large.usage is not None) == ("large", True)
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=PATIENCE) as client:
        asked: Any = [{"role": "user", "content": "Hi"}]
        small = client.messages.create(model="claude-haiku-4-5", messages=asked, max_tokens=16)
    assert small.model == "claude-haiku-4-5"
    assert states(server)["small"] == "ready"


def test_a_conversation_goes_on_with_another_model(server: Command) -> None:
    asked = "Remember the number seven."
    first = server.client.responses.create(model="large", input=asked, max_output_tokens=32)
    second = server.client.responses.create(
        model="small", input="Which number?", previous_response_id=first.id, max_output_tokens=32
    )
    third = server.client.responses.create(
        model="large", input="Are you sure?", previous_response_id=second.id, max_output_tokens=32
    )
    assert [each.model for each in (first, second, third)] == ["large", "small", "large"]
    assert third.status in ("completed", "incomplete")
    items = server.client.responses.input_items.list(third.id)
    assert asked in json.dumps([item.model_dump() for item in items])


def test_a_model_that_embeds_takes_the_place_of_one_that_writes_and_gives_it_back(server: Command) -> None:
    server.client.responses.create(model="small", input="Hi", max_output_tokens=16)
    vectors = server.client.embeddings.create(model="vectors", input=["one", "two"])
    assert len({len(each.embedding) for each in vectors.data}) == 1
    assert (states(server)["small"], states(server)["vectors"]) == ("stopped", "ready")
    server.client.responses.create(model="small", input="Hi", max_output_tokens=16)
    assert states(server)["vectors"] == "stopped"


@pytest.mark.last(1)
def test_no_process_outlives_a_server_that_is_killed(server: Command) -> None:
    server.client.responses.create(model="small", input="Hi", max_output_tokens=16)
    server.kill()

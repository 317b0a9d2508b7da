"""A trainer changes the weights under a `penstock serve`: answers, recordings, caches and metrics follow."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCreatedEvent

from penstock.pipeline.frames import GenerationFinished, TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import read_frames
from tests.support.live_server import KEY
from tests.support.noisy import write_noisy, write_untied
from tests.support.processes import wait_for
from tests.support.serve_command import Command, running

LONG = "Count from 1 to 100. " * 30
ASKED: dict[str, Any] = {
    "model": "tiny-gpt-oss",
    "input": LONG,
    "temperature": 0,
    "max_output_tokens": 100,
    "store": False,
}
ENDLESS: dict[str, Any] = {"model": "tiny-gpt-oss", "input": "Keep thinking without end.", "temperature": 0}
UPDATES = {20: "step-2", 40: "step-0"}
"""The checkpoints that an engine gets in the middle of a stream, by the number of an event."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints: a tiny model, and the same with much noise and with little."""
    folder = tmp_path_factory.mktemp("checkpoints")
    source = write_untied(folder / "step-0")
    for step, noise in ((1, 0.15), (2, 0.001)):
        write_noisy(folder / f"step-{step}", noise, source)
    return folder


@pytest.fixture(scope="module")
def fresh(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of an engine that has loaded the noisy weights from the start."""
    store = tmp_path_factory.mktemp("fresh") / "responses.sqlite3"
    with running(store, model=str(checkpoints / "step-1")) as server:
        return said(server.client.responses.create(**ASKED))


@pytest.fixture(scope="module")
def trained(fresh: str, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Command, None, None]:
    """A server whose weights a trainer may change; it starts when that of ``fresh`` has ended."""
    folder = tmp_path_factory.mktemp("trained")
    options = ("--record", str(folder / "recorded"), "--weights-from", str(checkpoints))
    with running(
        folder / "responses.sqlite3", *options, model=str(checkpoints / "step-0"), PENSTOCK_OPERATOR_KEY=KEY
    ) as server:
        yield server


def said(response: Any) -> str:
    """All texts of an answer."""
    return json.dumps([item.to_dict(mode="json")["content"] for item in response.output])


def order(server: Command, path: str, body: object = None, **query: str) -> Any:
    """Send an order of the trainer."""
    operator = server.client.with_options(base_url=server.url, api_key=KEY)
    return operator.post(path, cast_to=object, body=body, options={"params": query})


def update(server: Command, checkpoint: str, mode: str = "abort") -> None:
    """Pause the engine, load a checkpoint, name it, and go on."""
    assert order(server, "/pause", mode=mode) == {"status": "paused"}
    body = {"method": "reload_weights", "kwargs": {"weights_path": checkpoint}}
    assert order(server, "/collective_rpc", body) == {"results": [None]}
    order(server, "/update_weight_version", {"new_version": checkpoint})
    assert order(server, "/resume") == {"status": "resumed"}


def turns(server: Command, response_id: str) -> list[GenerationFinished]:
    """The recorded ends of the turns of an answer, whose spans have all their tokens."""
    file = server.recorded / response_id / "tokens.jsonl"
    wait_for(lambda: b'"End"' in file.read_bytes())
    ends, tokens = [], 0
    for frame in read_frames(file, TokenFrame):
        if isinstance(frame, TokenChunk):
            tokens += len(frame.token_ids)
        elif isinstance(frame, GenerationFinished):
            spans = frame.weights
            assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
            assert spans[-1].end == tokens
            ends.append(frame)
            tokens = 0
    return ends


def named(turns: list[GenerationFinished]) -> list[str]:
    """The versions of the weights that wrote turns, one after the other."""
    return [span.version for turn in turns for span in turn.weights]


def metrics(server: Command) -> str:
    return str(server.client.with_options(base_url=server.url).get("/metrics", cast_to=str))


def versions(server: Command) -> list[str]:
    return re.findall(r'^penstock_engine_weights\{engine="local",version="(.*)"\} 1', metrics(server), re.MULTILINE)


def written(server: Command) -> float:
    """The tokens that the engine has written so far."""
    return sum(map(float, re.findall(r"^vllm:generation_tokens_total\{.*\} (.*)", metrics(server), re.MULTILINE)))


def wait_for_tokens(server: Command) -> None:
    """Wait until the engine has written more: a client may read long after it what was written before."""
    before = written(server)
    wait_for(lambda: written(server) > before)


def test_new_weights_answer_as_those_of_a_fresh_engine(trained: Command, fresh: str) -> None:
    old, again = (trained.client.responses.create(**ASKED) for _ in range(2))
    assert said(old) == said(again) != fresh
    before = turns(trained, again.id)
    assert before[0].cached_tokens > 0
    assert set(named(before)) == {"default"}
    update(trained, "step-1")
    new, repeated = (trained.client.responses.create(**ASKED) for _ in range(2))
    assert said(new) == said(repeated) == fresh
    first, second = turns(trained, new.id), turns(trained, repeated.id)
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, before[0].cached_tokens)
    assert set(named(first)) == {"step-1"}
    wait_for(lambda: versions(trained) == ["step-1"])
    log = trained.store.with_name("serve.log").read_text()
    assert "The engine writes with weights step-1, no longer with default" in log
    update(trained, "step-0")
    back = trained.client.responses.create(**ASKED)
    assert (said(back), turns(trained, back.id)[0].cached_tokens) == (said(old), 0)


def test_stream_goes_on_with_other_weights_and_says_which_wrote_what(trained: Command) -> None:
    update(trained, "step-0")
    begun = trained.client.responses.create(**ENDLESS, background=True, stream=True)
    response_id = ""
    with begun as events:
        for count, event in enumerate(events):
            if isinstance(event, ResponseCreatedEvent):
                response_id = event.response.id
            if count in UPDATES:
                update(trained, UPDATES[count], "keep")
                wait_for_tokens(trained)
            if count == max(UPDATES) + 10:
                trained.client.responses.cancel(response_id)
    assert trained.client.responses.retrieve(response_id).status == "cancelled"
    assert named(turns(trained, response_id)) == ["step-0", *UPDATES.values()]


def test_pause_ends_running_answers_and_lets_others_wait(trained: Command) -> None:
    types = []
    with trained.client.responses.create(**ENDLESS, stream=True) as events:
        for event in events:
            types.append(event.type)
            if len(types) == 10:
                order(trained, "/pause")
    assert types[-1] == "response.failed"
    assert trained.client.with_options(base_url=trained.url, api_key=KEY).get("/is_paused", cast_to=object) == {
        "is_paused": True
    }
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(trained.client.responses.create(**ASKED)))
    asking.start()
    load = trained.client.with_options(base_url=trained.url)
    wait_for(lambda: load.get("/load", cast_to=object) == {"server_load": 1})
    assert not answers
    order(trained, "/resume")
    asking.join()
    assert answers[0].output


def test_weights_of_a_running_engine_stay(trained: Command) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": "step-1"}}
    with pytest.raises(openai.BadRequestError, match="Pause the engine first"):
        order(trained, "/collective_rpc", body)
    with pytest.raises(openai.InternalServerError, match="could not"):
        order(trained, "/init_weight_transfer_engine", {"init_info": {}})
    assert trained.client.responses.create(**ASKED).output

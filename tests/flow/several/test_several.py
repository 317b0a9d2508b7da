"""One server of several models: which of them answers, and what they share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.settings import Settings
from penstock.api.start import backends
from penstock.extensions.dialects.messages.events import PING
from penstock.extensions.models import start
from penstock.pipeline.errors import EngineOverloaded
from penstock.pipeline.protocol.events import KEEP_ALIVE
from penstock.pipeline.recordings.format import FILES, read_recording
from tests.support.api_clients import Json, wait_until
from tests.support.scripted_model import MODEL
from tests.support.several import ENGINE, SeveralServer, says, several_models, text_of

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[SeveralServer, None]:
    """A server of a large model and a small one."""
    engines = {"big": says("I am big.", "org/big", "sql"), "small": says("I am small.", context_length=400)}
    tables = {"big": {"names": ["claude-*", "sql", "large"]}}
    async with several_models(tmp_path, engines, tables) as served:
        yield served


def chat_text(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])


DIALECTS: dict[str, tuple[Json, Any]] = {
    "/v1/responses": ({"input": "Hi"}, text_of),
    "/v1/chat/completions": ({"messages": CHAT}, chat_text),
    "/v1/messages": ({"messages": CHAT, "max_tokens": 100}, lambda answer: answer["content"][-1]["text"]),
}
"""A request of each dialect that has messages, and the text of its answer."""


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize(
    ("model", "answers"),
    [("big", "big"), ("small", "small"), ("claude-opus", "big"), ("large", "big"), ("sql", "big")],
)
async def test_each_dialect_chooses_by_the_model(served: SeveralServer, path: str, model: str, answers: str) -> None:
    body, read = DIALECTS[path]
    status, answer = await served.post({**body, "model": model}, path)
    assert (status, answer["model"], read(answer)) == (200, model, f"I am {answers}.")
    (prompt,) = served.engines[answers].prompts
    assert prompt.facts.model == ("sql" if model == "sql" else served.engines[answers].models[0])


async def test_the_first_model_answers_requests_that_name_none(served: SeveralServer) -> None:
    assert await served.says(None) == "I am big."


async def test_models_are_opened_as_they_are_used(served: SeveralServer) -> None:
    _, before = await served.get("/v1/models")
    assert served.opened == []
    await served.says("small")
    await served.says("small")
    assert served.opened == ["small"]
    _, after = await served.get("/v1/models")
    states = [
        {each["id"]: (each["state"], each["max_model_len"]) for each in listed["data"]} for listed in (before, after)
    ]
    assert states[0]["small"] == ("stopped", None)
    assert states[1]["small"] == ("ready", 400)
    assert [each["id"] for each in after["data"]] == ["big", "sql", "large", "small"]


async def test_unknown_models_are_refused_with_the_nearest_name(served: SeveralServer) -> None:
    status, answer = await served.post({"input": "Hi", "model": "smaller"})
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "did you mean small?" in answer["error"]["message"]


async def test_each_model_has_its_own_context(served: SeveralServer) -> None:
    long = "word " * 600
    status, answer = await served.post({"input": long, "model": "small"})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "400" in answer["error"]["message"]
    assert await served.says("big", input=long) == "I am big."


async def test_a_stream_names_its_model(served: SeveralServer) -> None:
    events = await served.stream_events({"input": "Hi", "model": "small"})
    assert {event["response"]["model"] for event in events if "response" in event} == {"small"}


async def test_a_background_response_runs_on_its_model(served: SeveralServer) -> None:
    for model in ("small", "big"):
        ended = await served.wait_for_end(await served.start_background({"model": model}))
        assert (ended["status"], ended["model"], text_of(ended)) == ("completed", model, f"I am {model}.")


async def test_tokens_are_those_of_the_model(served: SeveralServer) -> None:
    status, answer = await served.post({"model": "small", "prompt": "Hi"}, "/tokenize")
    assert (status, answer["max_model_len"], answer["count"]) == (200, 400, 1)
    assert await served.post({"model": "small", "tokens": answer["tokens"]}, "/detokenize") == (200, {"prompt": "Hi"})


WAITING = {
    **DIALECTS,
    "/v1/messages?beta=true": (
        {"messages": CHAT, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        None,
    ),
}
"""The same, and a message whose budget of thoughts needs the engine before all else."""


@pytest.mark.parametrize("path", WAITING)
async def test_a_stream_gets_signs_of_life_until_its_model_is_open(tmp_path: Path, path: str) -> None:
    async with several_models(tmp_path, {"small": says("I am small.")}, keep_alive=0.01) as served:
        house: Any = served.scheduler.engine
        life, may_open = house.catalogue.all["small"].life, asyncio.Event()
        acquire = life.acquire

        async def acquired(wait: float | None) -> Any:
            await may_open.wait()
            return await acquire(wait)

        life.acquire = acquired
        body = {**WAITING[path][0], "model": "small", "stream": True}
        async with served.client.post(served.url + path, json=body) as answer:
            sign = await answer.content.readuntil(b"\n\n")
            assert sign in (KEEP_ALIVE, PING)
            may_open.set()
            assert b" small" in await answer.content.read()


# Leases


def leases_of(served: SeveralServer, model: str) -> int:
    house: Any = served.scheduler.engine
    return int(house.catalogue.all[model].life.running)


@pytest.mark.parametrize("end", ["completes", "is cancelled", "loses its client"])
async def test_a_response_holds_its_model_to_its_end(served: SeveralServer, end: str) -> None:
    engine = served.engines["small"]
    engine.hold(1)
    async with served.open_stream({"model": "small"}) as stream:
        await wait_until(lambda: engine.running)
        assert (leases_of(served, "small"), leases_of(served, "big")) == (1, 0)
        if end == "completes":
            engine.say_all()
            await stream.rest()
        elif end == "is cancelled":
            (run,) = served.scheduler.runs.running
            await served.cancel(run.response.id)
    await wait_until(lambda: not leases_of(served, "small"))


# Another model in place of one


async def test_another_model_answers_for_one_that_is_full(tmp_path: Path) -> None:
    engines = {"big": says("I am big.", refusal=EngineOverloaded("full")), "small": says("I am small.")}
    async with several_models(tmp_path, engines, {"big": {"instead": "small"}}) as served:
        for path, (body, read) in DIALECTS.items():
            status, answer = await served.post({**body, "model": "big"}, path)
            assert (status, answer["model"], read(answer)) == (200, "small", "I am small."), path
        events = await served.stream_events({"input": "Hi", "model": "big"})
        assert {event["response"]["model"] for event in events if "response" in event} == {"small"}
        assert not leases_of(served, "big") + leases_of(served, "small")


async def test_nothing_answers_for_one_without_another(tmp_path: Path) -> None:
    engines = {"big": says("I am big.", refusal=EngineOverloaded("full")), "small": says("I am small.")}
    async with several_models(tmp_path, engines) as served:
        status, answer = await served.post({"input": "Hi", "model": "big"})
        assert (status, answer["error"]["message"]) == (503, "full")


async def test_a_model_that_cannot_be_opened_is_a_503_and_harms_no_other(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    async with several_models(tmp_path, engines, {"big": {"engine": ["http://127.0.0.1:9"]}}) as served:
        status, answer = await served.post({"input": "Hi", "model": "big"})
        assert status == 503
        assert "'big' is not available" in answer["error"]["message"]
        assert await served.says("small") == "I am small."
        listed = {each["id"]: each["state"] for each in (await served.get("/v1/models"))[1]["data"]}
        assert listed == {"big": "failed", "small": "ready"}


async def test_another_model_answers_for_one_that_cannot_be_opened(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    tables = {"big": {"engine": ["http://127.0.0.1:9"], "instead": "small"}}
    async with several_models(tmp_path, engines, tables) as served:
        assert await served.says("big") == "I am small."


# One pipeline


ROUTE = """
from collections.abc import AsyncGenerator, AsyncIterator

from penstock.pipeline.frames import Prompt, replace
from penstock.pipeline.protocol.events import ResponseCompleted, ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse

made = []

def install(pipeline):
    made.append(pipeline)
    assert len(made) == 1

    async def route(source: AsyncIterator[CreateResponse]) -> AsyncGenerator[CreateResponse, None]:
        async for request in source:
            yield replace(request, model="small") if "easy" in str(request.input) else request

    seen = []

    async def note(source: AsyncIterator[Prompt]) -> AsyncGenerator[Prompt, None]:
        async for frame in source:
            seen.append(frame.facts.model)
            yield frame

    async def tell(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
        async for event in source:
            if isinstance(event, ResponseCompleted):
                assert seen.pop() == event.response.model
            yield event

    edited = pipeline.insert_before("normalize", "route", route)
    return edited.insert_after("render", "note", note).insert_after("persist", "tell", tell)
"""


async def test_stages_of_the_operator_are_installed_once_and_may_choose_the_model(tmp_path: Path) -> None:
    (tmp_path / "route.py").write_text(ROUTE)
    engines = {"big": says("I am big."), "small": says("I am small.")}
    plugin: dict[str, Any] = {"with": [f"{tmp_path / 'route.py'}:install"]}
    async with several_models(tmp_path, engines, **plugin) as served:
        assert await served.says("big", input="Something easy") == "I am small."
        assert await served.says("big", input="Something hard") == "I am big."
        status, answer = await served.post({"model": "big", "input": "easy"})
        assert (status, answer["model"]) == (200, "small")


async def test_each_model_has_its_own_places(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    tables = {"big": {"engine-places": 1, "engine-wait": 0.01}}
    async with several_models(tmp_path, engines, tables) as served:
        while (await served.post({"input": "Hi", "model": "big"}))[0] != 200:
            pass  # a slow machine takes longer than the wait to open it
        engines["big"].hold(1)
        async with served.open_stream({"model": "big"}):
            status, answer = await served.post({"input": "Hi", "model": "big"})
            assert (status, "it was full" in answer["error"]["message"]) == (503, True)
            assert await served.says("small") == "I am small."


async def test_each_recording_names_its_model(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    async with several_models(tmp_path, engines, record=tmp_path / "recordings") as served:
        await served.says("big")
        await served.says("small")
    name, junction = FILES["emit"]
    headers = [read_recording(folder / name, junction).header for folder in (tmp_path / "recordings").iterdir()]
    assert {(header.model, header.encoding) for header in headers} == {("big", "harmony"), ("small", "harmony")}


# Settings that change


async def test_models_change_under_running_responses(tmp_path: Path) -> None:
    engines = {name: says(f"I am {name}.") for name in ("big", "small", "new")}
    async with several_models(tmp_path, engines) as served:
        house: Any = served.scheduler.engine
        house.catalogue.take({name: house.catalogue.all[name] for name in ("big", "small")}, {})
        engines["big"].hold(1)
        async with served.open_stream({"model": "big"}) as stream:
            await wait_until(lambda: engines["big"].running)
            house.catalogue.take({"small": house.catalogue.all["small"]}, {"claude-*": "small"})
            status, answer = await served.post({"input": "Hi", "model": "big"})
            assert (status, answer["error"]["param"]) == (404, "model")
            assert await served.says("claude-x") == "I am small."
            engines["big"].say_all()
            events = (await stream.rest()).decode()
        assert "I am big." in json.dumps(events)


async def test_a_model_may_use_the_tools_of_its_table(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    tables = {"small": {"tools": ["web_search"]}}
    async with several_models(tmp_path, engines, tables) as served:
        tool = {"type": "file_search", "vector_store_ids": ["vs_1"]}
        allowed, _ = await served.post({"model": "big", "input": "Hi", "tools": [tool]})
        status, answer = await served.post({"model": "small", "input": "Hi", "tools": [tool]})
        assert (allowed == 403, status, answer["error"]["param"]) == (False, 400, "tools[0].type")
        assert answer["error"]["message"].startswith("This model may not use")


async def test_models_that_are_passed_on_are_listed_with_what_they_do(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "vectors": says("")}
    tables = {"vectors": {"engine": ["http://127.0.0.1:9"], "kind": "embed", "names": ["text-embedding-3-small"]}}
    async with several_models(tmp_path, engines, tables) as served:
        listed = {each["id"]: (each["kind"], each["state"]) for each in (await served.get("/v1/models"))[1]["data"]}
        passed_on = ("embed", "ready")
        assert listed == {"big": ("generate", "stopped"), "vectors": passed_on, "text-embedding-3-small": passed_on}
        assert (await served.get("/v1/models/vectors"))[1]["kind"] == "embed"
        status, answer = await served.post({"input": "Hi", "model": "vectors"})
        assert (status, answer["error"]["param"]) == (404, "model")


async def test_the_model_in_this_process_is_ready_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_scripted(settings: Settings) -> Any:
        return backends.start(settings.model_copy(update={"engine": [f"{ENGINE}:here"], "model": None}))

    monkeypatch.setattr(start, "start", start_scripted)
    engines = {"here": says("I am here.", context_length=400), "small": says("I am small.")}
    async with several_models(tmp_path, engines, {"here": {"model": "org/model", "engine": []}}) as served:
        listed = {each["id"]: each for each in (await served.get("/v1/models"))[1]["data"]}
        told = {name: (each["state"], each["max_model_len"]) for name, each in listed.items()}
        assert told == {"here": ("ready", 400), "small": ("stopped", None)}
        assert await served.says("here") == "I am here."


# Metrics


async def test_metrics_show_the_states_of_all_models(served: SeveralServer) -> None:
    await served.says("small")
    async with served.client.get(f"{served.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    states = {line for line in lines if line.startswith("penstock_model_state{") and line.endswith(" 1.0")}
    assert {
        'penstock_model_state{model="big",state="stopped"} 1.0',
        'penstock_model_state{model="small",state="ready"} 1.0',
    } <= states
    assert 'penstock_model_waiting{model="small"} 0.0' in lines
    started = 'penstock_model_change_seconds_count{change="starting",model="small",state="ready"}'
    assert any(line.startswith(started) for line in lines)
    tokens = 'penstock_tokens_total{model="small",type="output"}'
    assert any(line.startswith(tokens) for line in lines)


async def test_metrics_have_series_of_the_models_that_are_served_alone(tmp_path: Path) -> None:
    """A model that is passed on has a state; an engine is up while it is open; those of a gone model end."""
    tables: dict[str, Json] = {
        "vectors": {"kind": "embed", "command": MODEL},
        "away": {"engine": ["http://127.0.0.1:9"]},
    }
    async with several_models(tmp_path, {"small": says("I am small.")}, tables) as served:

        async def told(metric: str, *labels: str) -> dict[str, str]:
            async with served.client.get(f"{served.url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            named = [line.removeprefix(metric).rsplit(" ", 1) for line in lines if line.startswith(f"{metric}{{")]
            return {name: value for name, value in named if any(f'"{label}"' in name for label in labels)}

        await served.says("small")
        assert (await served.post({"model": "away", "input": "Hi"}))[0] == 503
        names = ("small", "vectors", "away")
        up = {'{engine="small"}': "1.0", '{engine="away"}': "0.0"}
        assert await told("penstock_engine_up", *names, "127.0.0.1:9") == up
        waiting = {f'{{model="{name}"}}': "0.0" for name in names}
        assert await told("penstock_model_waiting", *names) == waiting
        states = await told("penstock_model_state", "vectors", "away")
        assert {name for name, value in states.items() if value == "1.0"} == {
            '{model="vectors",state="stopped"}',
            '{model="away",state="failed"}',
        }
        served.engines["small"].is_alive = False
        catalogue: Any = served.scheduler.engine
        models = catalogue.catalogue.all
        catalogue.catalogue.take({"small": models["small"]}, {})
        assert await told("penstock_engine_up", *names) == {'{engine="small"}': "0.0"}
        assert not await told("penstock_model_state", "vectors", "away")

"""A trainer changes the weights of the engine by vLLM's routes: with its paths and bodies, and the operator's key."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from penstock.api.cli.command_line import read_settings
from penstock.api.http.auth import Keys
from penstock.api.resources.resources import check_resources
from penstock.api.settings import Settings
from penstock.extensions.rollouts.weights import LONGEST_NAME
from penstock.pipeline.errors import CannotStart, EngineFailed
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.live_server import CLIENT, KEY, bearer, live_server
from tests.support.server import Server, script
from tests.support.trained_engine import TrainedEngine

Json = dict[str, Any]


@asynccontextmanager
async def trained(tmp_path: Path, **options: Any) -> AsyncGenerator[Server[TrainedEngine], None]:
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    changes = {"weights_from": tmp_path / "checkpoints"}
    async with live_server(
        TrainedEngine(script()), tmp_path, resources=("weights",), changes=changes, **options
    ) as server:
        yield server


def real(path: Path) -> str:
    return str(path.resolve())


async def call(server: Server[Any], route: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
    method, _, path = route.partition(" ")
    async with server.client.request(
        method, server.url + path, json=body, headers=bearer() if headers is None else headers
    ) as answer:
        return answer.status, await answer.json()


RELOAD: Json = {"method": "reload_weights", "kwargs": {"weights_path": "step-2"}}

CALLS: list[tuple[str, Any, Json]] = [
    ("GET /is_paused", None, {"is_paused": False}),
    ("POST /pause?mode=keep", None, {"status": "paused"}),
    ("GET /is_paused", None, {"is_paused": True}),
    ("GET /get_world_size", None, {"world_size": 8}),
    ("GET /get_world_size?include_dp=false", None, {"world_size": 2}),
    (
        "POST /init_weight_transfer_engine",
        {"init_info": {"master_port": 29500}},
        {"message": "Weight transfer initialized"},
    ),
    ("POST /start_weight_update", None, {"message": "Weight update started"}),
    ("POST /update_weights", {"update_info": {"names": ["a"]}}, {"message": "Weights updated"}),
    ("POST /update_weights", {"update_info": [{"names": ["b"]}]}, {"message": "Weights updated"}),
    ("POST /finish_weight_update", None, {"message": "Weight update finished"}),
    ("GET /weight_info", None, {"weight_version": "default"}),
    ("POST /finish_weight_update", {"weight_version": "step 1"}, {"message": "Weight update finished"}),
    ("GET /weight_info", None, {"weight_version": "step 1"}),
    ("POST /shutdown_weight_transfer_engine", None, {"message": "Weight transfer shut down"}),
    ("POST /pause?clear_cache=false", None, {"status": "paused"}),
    ("POST /collective_rpc", RELOAD, {"results": [None] * 8}),
    ("POST /update_weight_version", {"new_version": "step 2"}, {"success": True, "new_version": "step 2"}),
    ("POST /resume", None, {"status": "resumed"}),
    ("GET /is_paused", None, {"is_paused": False}),
]
"""A trainer's requests, one after the other, with vLLM's answers."""


async def test_trainer_gets_the_answers_of_vllm(tmp_path: Path) -> None:
    async with trained(tmp_path) as server:
        for route, body, answer in CALLS:
            assert await call(server, route, body) == (200, answer), route
        assert server.engine.version == "step 2"
        assert server.engine.done == [
            ("pause", "keep", True),
            ("init_weight_transfer_engine", {"init_info": {"master_port": 29500}}),
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"names": ["a"]}}),
            ("update_weights", {"update_info": [{"names": ["b"]}]}),
            ("finish_weight_update", {}),
            ("finish_weight_update", {}),
            ("shutdown_weight_transfer_engine", {}),
            ("pause", "abort", False),
            ("reload_weights", {"weights_path": real(tmp_path / "checkpoints/step-2")}),
        ]


ROUTES = {route.partition("?")[0]: body for route, body, _ in CALLS}


@pytest.mark.parametrize("headers", [{}, bearer(CLIENT), bearer(f"{KEY}x")], ids=["none", "client", "wrong"])
async def test_only_the_key_of_the_operator_opens_the_routes(tmp_path: Path, headers: dict[str, str]) -> None:
    async with trained(tmp_path) as server:
        for route, body in ROUTES.items():
            assert (await call(server, route, body, headers))[0] == 401, route
        assert not server.engine.done


async def test_without_the_setting_there_are_no_routes(tmp_path: Path) -> None:
    async with live_server(TrainedEngine(script()), tmp_path, resources=("weights",), keys=Keys()) as server:
        for route, body in ROUTES.items():
            assert (await call(server, route, body))[0] == 404, route


@pytest.mark.parametrize(
    "route", ["POST /start_weight_update", "POST /update_weights", "POST /finish_weight_update", "POST /collective_rpc"]
)
async def test_weights_change_in_a_pause_alone(tmp_path: Path, route: str) -> None:
    async with trained(tmp_path) as server:
        status, answer = await call(server, route, ROUTES[route])
        assert (status, answer["error"]["message"]) == (400, "Pause the engine first: POST /pause.")
        assert not server.engine.done


OUTSIDE = ["..", ".", "", "../other", "link", "link/step", "missing", "file", "\0", "/", "step-2/../.."]


@pytest.mark.parametrize("path", OUTSIDE)
async def test_engine_loads_nothing_from_elsewhere(tmp_path: Path, path: str) -> None:
    async with trained(tmp_path) as server:
        (tmp_path / "other" / "step").mkdir(parents=True)
        (tmp_path / "checkpoints" / "link").symlink_to(tmp_path / "other")
        (tmp_path / "checkpoints" / "file").touch()
        server.engine.paused = True
        body = RELOAD | {"kwargs": {"weights_path": path}}
        status, answer = await call(server, "POST /collective_rpc", body)
        assert (status, answer["error"]["param"]) == (400, "kwargs.weights_path")
        assert not server.engine.done


async def test_checkpoint_may_be_given_as_a_whole_path(tmp_path: Path) -> None:
    async with trained(tmp_path) as server:
        server.engine.paused = True
        path = str(tmp_path / "checkpoints" / "step-2")
        assert (await call(server, "POST /collective_rpc", RELOAD | {"kwargs": {"weights_path": path}}))[0] == 200
        assert server.engine.done == [("reload_weights", {"weights_path": real(Path(path))})]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("POST /pause?mode=stop", None, "mode"),
        ("POST /pause?clear_cache=maybe", None, "clear_cache"),
        ("POST /collective_rpc", RELOAD | {"method": "save_sharded_state"}, "method"),
        ("POST /collective_rpc", {"method": "reload_weights"}, "kwargs"),
        ("POST /update_weight_version", {"new_version": ""}, "new_version"),
        ("POST /update_weight_version", {"new_version": "v" * (LONGEST_NAME + 1)}, "new_version"),
        ("POST /update_weight_version", {}, "new_version"),
        ("POST /update_weights", {"update_info": "all"}, "update_info"),
        ("POST /init_weight_transfer_engine", {}, "init_info"),
    ],
)
async def test_wrong_request_is_refused(tmp_path: Path, route: str, body: Any, param: str) -> None:
    async with trained(tmp_path) as server:
        server.engine.paused = True
        status, answer = await call(server, route, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert (server.engine.done, server.engine.version) == ([], "default")


async def test_trainer_reads_why_the_engine_failed(tmp_path: Path) -> None:
    async with trained(tmp_path) as server:
        server.engine.paused, server.engine.fault = True, EngineFailed("The engine could not do this: no weights.")
        status, answer = await call(server, "POST /collective_rpc", RELOAD)
        assert (status, answer["error"]["message"]) == (500, "The engine could not do this: no weights.")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--weights-from=.",), "set PENSTOCK_OPERATOR_KEY"),
        (("--weights-from=/none", KEY), "there is no such folder"),
        (("--weights-from=.", "--engine=http://127.0.0.1:9", KEY), "needs one model that vLLM runs in this process"),
    ],
)
def test_setting_that_cannot_be_met_ends_the_start(given: tuple[str, ...], words: str) -> None:
    *arguments, key = given if given[-1] == KEY else (*given, "")
    settings = with_key(read_settings(arguments), key)
    with pytest.raises(CannotStart, match=words):
        check_resources(settings, ("weights",))


def with_key(settings: Settings, key: str) -> Settings:
    return settings.model_copy(update={"operator_key": SecretStr(key) if key else None})


async def test_engine_whose_weights_stay_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="needs one model"):
        async with live_server(
            ScriptedEngine(script()), tmp_path, resources=("weights",), changes={"weights_from": tmp_path}
        ):
            pass

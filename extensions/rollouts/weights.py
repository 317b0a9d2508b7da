"""The routes by which a trainer changes the weights of the engine in this process: vLLM's, with its paths and bodies.

They answer to the key of the operator alone, and exist only if the setting ``weights_from`` names a folder.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
from aiohttp import web
from pydantic import Field

from penstock.api.http.auth import for_operators
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.query import Choice
from penstock.api.http.request_body import off_loop, receive
from penstock.api.resources.resources import ServerParts, checked
from penstock.api.settings import Settings
from penstock.pipeline.errors import CannotStart, EngineDead, EngineFailed, InvalidRequest
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.tasks import in_thread
from penstock.services.engines.engine import ChangesWeights, PauseMode, WeightWork

logger = logging.getLogger(__name__)

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")

LONGEST_NAME = 1_000
"""Characters of the name of a version."""

NEEDED = "needs one model that vLLM runs in this process: a trainer talks to any other vLLM itself"

Version = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class State(msgspec.Struct, frozen=True):
    """A change of the state of the engine."""

    status: Literal["paused", "resumed"]


class Paused(msgspec.Struct, frozen=True):
    """The state of the engine."""

    is_paused: bool


class Done(msgspec.Struct, frozen=True):
    """A step of an update."""

    message: str


class Named(msgspec.Struct, frozen=True):
    """A new name of the present weights."""

    success: bool
    new_version: str


class WeightInfo(msgspec.Struct, frozen=True):
    """The name of the present weights."""

    weight_version: str


class WorldSize(msgspec.Struct, frozen=True):
    """The number of vLLM's workers."""

    world_size: int


class Results(msgspec.Struct, frozen=True):
    """The results of vLLM's workers."""

    results: list[None]


class InitBody(Body):
    """The parameters of a transfer, which depend on its backend."""

    required = "init_info"

    init_info: dict[str, Any]


class UpdateBody(Body):
    """A part of the weights, for all workers or for each of them."""

    required = "update_info"

    update_info: dict[str, Any] | list[dict[str, Any]]


class FinishBody(Body):
    """The end of an update, with the name of the new weights."""

    weight_version: Version | None = None


class NameBody(Body):
    """The name of the present weights."""

    required = "new_version"

    new_version: Version


class Checkpoint(Body):
    """The checkpoint that the engine loads."""

    required = "weights_path"

    weights_path: str


class WorkerBody(Body):
    """A call of vLLM's workers: of all that vLLM takes, the weights of a checkpoint alone."""

    required = "method"

    method: Literal["reload_weights"]
    kwargs: Checkpoint


MODE = Choice("mode", MODES, meaning="What becomes of running generations.")
CLEARS = Choice(
    "clear_cache", ("true", "false"), meaning="Empties the prefix cache, so that no older weights remain in it."
)
REPLICAS = Choice("include_dp", ("true", "false"), meaning="Counts the workers of all replicas of the model.")

_FAULTS = (EngineFailed, EngineDead)
_REFUSALS = (InvalidRequest, *_FAULTS)


@dataclass(frozen=True)
class WeightRoutes:
    """The routes over an engine, which loads checkpoints of one ``folder`` alone."""

    engine: ChangesWeights
    folder: Path

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes."""
        return (
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.get("/weight_info", self.weight_info),
            web.get("/get_world_size", self.world_size),
            web.post("/init_weight_transfer_engine", self.init),
            web.post("/shutdown_weight_transfer_engine", self.shut_down),
            web.post("/start_weight_update", self.start),
            web.post("/update_weights", self.update),
            web.post("/finish_weight_update", self.finish),
            web.post("/update_weight_version", self.name),
            web.post("/collective_rpc", self.reload),
        )

    @for_operators
    @operation(Operation(State, query=(MODE, CLEARS), refusals=_REFUSALS))
    async def pause(self, request: web.Request) -> web.Response:
        """Pause the engine: later requests wait, and running ones end, are awaited, or halt until it goes on."""
        mode, clears = MODE.read(request), CLEARS.read(request) == "true"
        await self.engine.pause(cast("PauseMode", mode), clears_cache=clears)
        logger.info("The engine pauses (%s), %s its prefix cache", mode, "without" if clears else "with")
        return as_json(State("paused"))

    @for_operators
    @operation(Operation(State, refusals=_FAULTS))
    async def resume(self, request: web.Request) -> web.Response:
        """Go on after a pause."""
        await self.engine.resume()
        logger.info("The engine goes on")
        return as_json(State("resumed"))

    @for_operators
    @operation(Operation(Paused, refusals=_FAULTS))
    async def is_paused(self, request: web.Request) -> web.Response:
        """Tell if the engine is paused."""
        return as_json(Paused(await self.engine.is_paused()))

    @for_operators
    @operation(Operation(WeightInfo, refusals=_FAULTS))
    async def weight_info(self, request: web.Request) -> web.Response:
        """Return the version of the present weights."""
        return as_json(WeightInfo(await self.engine.present_weights()))

    @for_operators
    @operation(Operation(WorldSize, query=(REPLICAS,), refusals=(InvalidRequest,)))
    async def world_size(self, request: web.Request) -> web.Response:
        """Return the number of workers that a trainer sends weights to."""
        return as_json(WorldSize(self.engine.workers(with_replicas=REPLICAS.read(request) == "true")))

    @for_operators
    @operation(Operation(Done, InitBody, refusals=_REFUSALS))
    async def init(self, request: web.Request) -> web.Response:
        """Join the workers with a trainer that sends weights."""
        body = await off_loop(read_body, await receive(request), InitBody)
        await self.engine.in_workers("init_weight_transfer_engine", init_info=body.init_info)
        return as_json(Done("Weight transfer initialized"))

    @for_operators
    @operation(Operation(Done, refusals=_FAULTS))
    async def shut_down(self, request: web.Request) -> web.Response:
        """Release the trainer."""
        await self.engine.in_workers("shutdown_weight_transfer_engine")
        return as_json(Done("Weight transfer shut down"))

    @for_operators
    @operation(Operation(Done, refusals=_REFUSALS))
    async def start(self, request: web.Request) -> web.Response:
        """Begin an update of a paused engine."""
        await self._change("start_weight_update")
        return as_json(Done("Weight update started"))

    @for_operators
    @operation(Operation(Done, UpdateBody, refusals=_REFUSALS))
    async def update(self, request: web.Request) -> web.Response:
        """Receive a part of the weights from the trainer."""
        body = await off_loop(read_body, await receive(request), UpdateBody)
        await self._change("update_weights", update_info=body.update_info)
        return as_json(Done("Weights updated"))

    @for_operators
    @operation(Operation(Done, FinishBody, refusals=_REFUSALS))
    async def finish(self, request: web.Request) -> web.Response:
        """End an update, and name the new weights."""
        given = await receive(request)
        body = await off_loop(read_body, given, FinishBody) if given else FinishBody()
        await self._change("finish_weight_update")
        if body.weight_version is not None:
            await self.engine.name_weights(body.weight_version)
        return as_json(Done("Weight update finished"))

    @for_operators
    @operation(Operation(Named, NameBody, refusals=_REFUSALS))
    async def name(self, request: web.Request) -> web.Response:
        """Name the present weights."""
        version = (await off_loop(read_body, await receive(request), NameBody)).new_version
        await self.engine.name_weights(version)
        return as_json(Named(success=True, new_version=version))

    @for_operators
    @operation(Operation(Results, WorkerBody, refusals=_REFUSALS))
    async def reload(self, request: web.Request) -> web.Response:
        """Load the weights of a checkpoint into a paused engine."""
        body = await off_loop(read_body, await receive(request), WorkerBody)
        path = await in_thread(self._checkpoint, body.kwargs.weights_path)
        await self._change("reload_weights", weights_path=str(path))
        return as_json(Results([None] * self.engine.workers(with_replicas=True)))

    async def _change(self, work: WeightWork, **given: Any) -> None:
        """Let the workers change the weights, while none of them generates: so each token has one version."""
        if not await self.engine.is_paused():
            raise InvalidRequest("Pause the engine first: POST /pause.")
        await self.engine.in_workers(work, **given)

    def _checkpoint(self, name: str) -> Path:
        """Return the folder of a checkpoint, wherever links lead."""
        try:
            root = self.folder.resolve()
            path = (root / name).resolve()
        except (OSError, ValueError):  # a null byte, or links in a circle
            path = root = Path()
        if not (path.is_relative_to(root) and path != root and path.is_dir()):
            raise InvalidRequest(
                "This is no folder in that of --weights-from.", param="kwargs.weights_path", code="invalid_value"
            )
        return path


def check_folder(settings: Settings) -> None:
    """Raise `CannotStart` if weights cannot change as the settings say."""
    if settings.weights_from is None:
        return
    if settings.operator_key is None:
        raise CannotStart(
            "--weights-from: weights change with the key of the operator alone: set PENSTOCK_OPERATOR_KEY"
        )
    if settings.models or (settings.engine and not settings.engine_factory):
        raise CannotStart(f"--weights-from {NEEDED}")
    if not settings.weights_from.is_dir():
        raise CannotStart(f"--weights-from {settings.weights_from}: there is no such folder")


@checked(check_folder)
@asynccontextmanager
async def weights(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the routes for the length of a block, if the settings name a folder; raise `CannotStart` if they cannot."""
    folder, engine = parts.settings.weights_from, parts.scheduler.engine
    if folder is None:
        yield ()
        return
    check_folder(parts.settings)
    if not isinstance(engine, ChangesWeights):
        raise CannotStart(f"--weights-from {NEEDED}")
    yield WeightRoutes(engine, folder).routes()

"""The routes that list the models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiohttp import web

from penstock.api.http.auth import OWNER
from penstock.api.http.bodies import Model, Models
from penstock.api.http.conventions import of_several_apis
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.pagination import ends
from penstock.api.http.query import AnyText, Number, Several
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline.errors import InvalidRequest, ModelNotFound
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.services.engines.engine import engine_of, has_several, known_length, state_of
from penstock.services.model_names import is_name, resolved_name, usable_names
from penstock.stages.normalize.tool_types import types_of

GENERATE = "generate"
"""The kind of a model that writes text."""

LIMIT = Number("limit", default=0, least=1, most=1_000, meaning="The most models of a page; all by default.")
AFTER = AnyText("after_id", meaning="The name of the model after which the page begins.")
BEFORE = AnyText("before_id", meaning="The name of the model before which the page ends.")
LIFECYCLE = Several(
    "lifecycle", ("active", "deprecated", "retired"), meaning="The states of the models to list: all here are `active`."
)


@dataclass(frozen=True)
class ModelList:
    """The Models API, over the names under which an engine serves its models, and their aliases.

    An alias of one name is listed; a pattern is not, as no request asks for it.
    """

    scheduler: Scheduler
    created: int = field(default_factory=lambda: int(time.time()))
    """The time of the start of the server: names have no time of their own."""

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        return (
            web.get(f"{base}/models", self.list_models),
            web.get(f"{base}/models/{{model:.+}}", self.retrieve_model),
        )

    @of_several_apis
    @operation(Operation(Models, query=(LIMIT, AFTER, BEFORE, LIFECYCLE), refusals=(InvalidRequest,)))
    async def list_models(self, request: web.Request) -> web.Response:
        """List the models: all of them, or a page of Anthropic's API."""
        names = self._names(request[OWNER])
        if "active" not in (LIFECYCLE.read(request) or ("active",)):
            names = []
        after, before = (_place(names, parameter, request) for parameter in (AFTER, BEFORE))
        found = names[0 if after is None else after + 1 : before]
        limit = LIMIT.read(request) or len(names)
        shown = found[:limit] if before is None else found[-limit:]
        data = tuple(self._model(name, request[OWNER]) for name in shown)
        return as_json(Models(data, *ends(data), has_more=len(found) > limit))

    @of_several_apis
    @operation(Operation(Model, refusals=(ModelNotFound,)))
    async def retrieve_model(self, request: web.Request) -> web.Response:
        """Retrieve a model by its name or an alias, if it is served here."""
        name = request.match_info["model"]
        resolved_name(name, self._usable(request[OWNER]), self.scheduler.aliases)
        return as_json(self._model(name, request[OWNER]))

    @property
    def _kinds(self) -> Mapping[str, str]:
        """The names under which models are served, each with what the model does."""
        engine = self.scheduler.engine
        return engine.kinds if has_several(engine) else dict.fromkeys(engine.models, GENERATE)

    def _usable(self, owner: str) -> Sequence[str]:
        """Return the names under which the models are served that an owner may use."""
        return usable_names([*self._kinds], self.scheduler.aliases, self.scheduler.allowed(owner))

    def _names(self, owner: str) -> Sequence[str]:
        """Return the names of the models that an owner may use, and their aliases."""
        usable, aliases = self._usable(owner), self.scheduler.aliases
        return list(dict.fromkeys((*usable, *(each for each in aliases if is_name(each) and aliases[each] in usable))))

    def _model(self, name: str, owner: str) -> Model:
        scheduler = self.scheduler
        served = scheduler.served(name)
        if served is None:  # its answers are passed on
            return self._passed_on(name)
        engine, created_at = engine_of(scheduler.engine, served), datetime.fromtimestamp(self.created, UTC)
        longest = known_length(engine)
        return Model(
            *(
                name,
                self.created,
                longest,
                name,
                created_at.isoformat(),
                longest,
                longest,
                getattr(engine, "root", None),
            ),
            state=state_of(scheduler.engine, served),
            input_modalities=("text", "image") if scheduler.sees_images(served) else ("text",),
            tools=types_of(scheduler.tools_of(owner)),
        )

    def _passed_on(self, name: str) -> Model:
        created_at, state = datetime.fromtimestamp(self.created, UTC), state_of(self.scheduler.engine, name)
        return Model(
            *(name, self.created, None, name, created_at.isoformat(), None, None), state=state, kind=self._kinds[name]
        )


def _place(names: Sequence[str], parameter: AnyText, request: web.Request) -> int | None:
    """Return the place of the model that a parameter names; raise `InvalidRequest` if it is not in the list."""
    name = parameter.read(request)
    if name is not None and name not in names:
        raise InvalidRequest(f"There is no model {shortened(name)!r} in this list.", param=parameter.name)
    return None if name is None else names.index(name)

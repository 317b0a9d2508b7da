"""The models whose requests are passed on unread: the one that a request is for, and the servers that answer for it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from pydantic import SecretStr

from penstock.api.settings import Settings
from penstock.extensions.models.catalogue import Model
from penstock.extensions.models.engines import ManyEngines
from penstock.pipeline.errors import InvalidRequest, ModelNotFound
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.services.model_names import in_words, is_allowed, is_name, meant_by, resolved_name, served_name

ANY, GENERATE = "any", "generate"
"""The kind of a server that answers all routes, and the kind of a model whose answers penstock reads."""

_SCORING = frozenset({"score", "rerank", "embed"})

ROUTES: Mapping[str, frozenset[str]] = {
    "/v1/embeddings": frozenset({"embed"}),
    "/v2/embed": frozenset({"embed"}),
    "/v1/score": _SCORING,
    "/score": _SCORING,
    "/v1/rerank": _SCORING,
    "/v2/rerank": _SCORING,
    "/rerank": _SCORING,
    "/classify": frozenset({"classify"}),
    "/pooling": frozenset({"pool", "embed", "classify"}),
    "/v1/audio/speech": frozenset({"audio"}),
    "/v1/audio/transcriptions": frozenset({"audio"}),
    "/v1/audio/translations": frozenset({"audio"}),
    "/v1/images/generations": frozenset({"image"}),
    "/v1/images/edits": frozenset({"image"}),
}
"""The routes, each with the kinds of the models that answer it, besides `ANY`.

Those of vLLM; those of OpenAI that vLLM-Omni has, too; and Cohere's.
"""

LEFT_OUT_SECONDS = 5.0
"""Seconds for which a server is tried after the others once it has refused a connection."""


class Place(Protocol):
    """The servers of one model."""

    def servers(self) -> AbstractAsyncContextManager[Sequence[str]]:
        """Open the place for the length of one request; yield the URLs of its servers, in the order to try them."""
        ...

    def leave_out(self, url: str) -> None:
        """Note that a server has refused a connection."""
        ...


@dataclass(eq=False)
class Replicas:
    """Servers at several URLs, which take turns."""

    urls: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    _turn: int = 0
    _out_until: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def servers(self) -> AsyncGenerator[Sequence[str], None]:
        """Yield the URLs, the next one first, and those last that have refused a connection."""
        now = self.clock()
        begin, self._turn = self._turn, (self._turn + 1) % len(self.urls)
        in_turn = (*self.urls[begin:], *self.urls[:begin])
        yield sorted(in_turn, key=lambda url: self._out_until.get(url, now) > now)

    def leave_out(self, url: str) -> None:
        """Have a server wait behind the others for some seconds."""
        self._out_until[url] = self.clock() + LEFT_OUT_SECONDS


@dataclass(frozen=True)
class Leased:
    """The server of a model that is loaded as it is used."""

    model: str
    engines: ManyEngines

    @asynccontextmanager
    async def servers(self) -> AsyncGenerator[Sequence[str], None]:
        """Yield its URL, while the model stays loaded."""
        async with self.engines.leased(self.model) as url:
            yield (url,)

    def leave_out(self, url: str) -> None:
        """Do nothing: a model with a lease is up, or starts again."""


@dataclass(frozen=True)
class Target:
    """A model, its other names (patterns among them), its kind, and the ``place`` of those that this server passes on.

    Without a ``name``, its server has models of its own, and gets the names of all clients.
    """

    name: str
    kind: str
    place: Place | None = None
    key: str = field(default="", repr=False)
    names: Sequence[str] = ()
    instead: str | None = None
    """The name of the model that answers if this one cannot."""

    def fits(self, path: str) -> bool:
        """True if the model answers a route."""
        return self.place is not None and (self.kind == ANY or self.kind in ROUTES[path])

    def servers(self) -> AbstractAsyncContextManager[Sequence[str]]:
        """Open the place of a model that fits, for the length of one request."""
        assert self.place is not None
        return self.place.servers()

    def leave_out(self, url: str) -> None:
        """Note that a server has refused a connection."""
        if self.place is not None:
            self.place.leave_out(url)


@dataclass(frozen=True)
class Targets:
    """All models of a server."""

    named: Mapping[str, Target] = field(default_factory=dict)
    unnamed: Target | None = None
    """The server of ``--embeddings``."""

    def fit(self, path: str) -> bool:
        """True if a model answers a route."""
        return any(target.fits(path) for target in self._all)

    def of(self, model: str | None, path: str, allowed: Collection[str] | None = None) -> Target:
        """Return the target of a request that names a ``model``, or none, from a client who may use some names.

        The names are patterns; None allows all.  Raises `ModelNotFound` or `InvalidRequest`.
        """
        usable = self._usable(allowed)
        fitting = [name for name, target in usable.items() if target.fits(path)]
        others = self.unnamed if self.unnamed and self.unnamed.fits(path) else None
        if others and not is_allowed(model or "", allowed):
            others = None
        if model is None:
            return self._only(fitting, others, path)
        name = served_name(model, usable, _aliases(usable.values()))
        if name is None:
            if others:
                return others
            if not fitting:
                raise ModelNotFound(f"This server has no model for {path} that this client may use.", param="model")
            name = resolved_name(model, fitting, _aliases(usable[each] for each in fitting))
        if not usable[name].fits(path):
            raise InvalidRequest(
                f"The model {shortened(model)!r} is of the kind {usable[name].kind!r}, which does not answer {path}.",
                param="model",
            )
        return usable[name]

    def in_turn(self, target: Target, allowed: Collection[str] | None = None) -> Iterator[Target]:
        """Yield a target, and then those that answer a client who may use these names if it cannot."""
        yield target
        if (other := self._usable(allowed).get(target.instead or "")) is not None:
            yield from self.in_turn(other, allowed)

    def _usable(self, allowed: Collection[str] | None) -> Mapping[str, Target]:
        meant = meant_by(allowed or (), self.named, _aliases(self.named.values()))
        return {name: target for name, target in self.named.items() if name in meant or _is_allowed(target, allowed)}

    def _only(self, fitting: Sequence[str], others: Target | None, path: str) -> Target:
        candidates = [*(self.named[name] for name in fitting), *([others] if others else [])]
        match candidates:
            case [only]:
                return only
            case []:
                raise ModelNotFound(f"This server has no model for {path} that this client may use.", param="model")
            case _:
                raise InvalidRequest(f"Name the model: {in_words(fitting)}.", param="model")

    @property
    def _all(self) -> Iterable[Target]:
        return chain(self.named.values(), (self.unnamed,) if self.unnamed else ())


def _aliases(targets: Iterable[Target]) -> dict[str, str]:
    """Return the other names of models, each with its own one: a name counts before all patterns."""
    owned = [(pattern, target.name) for target in targets for pattern in target.names]
    return dict(sorted(owned, key=lambda each: not is_name(each[0])))


def _is_allowed(target: Target, allowed: Collection[str] | None) -> bool:
    return any(is_allowed(name, allowed) for name in (target.name, *target.names))


class Directory:
    """The targets of a server, whose models may change while it runs.

    An ``engine`` of another make than `ManyEngines` stands for the models of the ``settings`` that generate.
    """

    def __init__(self, settings: Settings, engine: object) -> None:
        self._settings = settings
        self._engines = engine if isinstance(engine, ManyEngines) else None
        self._given = {name: Model(name, table, settings.of_model(name)) for name, table in settings.models.items()}
        self._known: Mapping[str, Model] | None = None
        self._targets = Targets()

    @property
    def paths(self) -> Sequence[str]:
        """The routes that a model answers, or might answer once the models have changed."""
        return [path for path in ROUTES if self._settings.models or self.targets.fit(path)]

    @property
    def targets(self) -> Targets:
        """The targets of the models that are served now."""
        models = self._engines.catalogue.all if self._engines else self._given
        if models is not self._known:
            self._known = models
            self._targets = Targets({name: self._target(model) for name, model in models.items()}, self._unnamed())
        return self._targets

    def _target(self, model: Model) -> Target:
        return Target(
            model.name,
            model.table.kind,
            self._place(model),
            key=_text(model.settings.engine_key),
            names=model.table.names,
            instead=model.table.instead,
        )

    def _place(self, model: Model) -> Place | None:
        if model.table.kind == GENERATE:
            return None
        if model.table.command:
            return Leased(model.name, self._engines) if self._engines else None
        return Replicas([url.rstrip("/").removesuffix("/v1") for url in model.settings.engine])

    def _unnamed(self) -> Target | None:
        url = self._settings.embeddings
        return Target("", "embed", Replicas((url,)), key=_text(self._settings.embeddings_key)) if url else None


def _text(key: SecretStr | None) -> str:
    return key.get_secret_value() if key else ""

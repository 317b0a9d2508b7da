"""The routes that list the prompts of the operator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.query import AnyText
from penstock.api.resources.resources import BASE, ServerParts
from penstock.pipeline.errors import PromptNotFound
from penstock.services.prompts import Prompts, Template

VERSION = AnyText("version", meaning="The version; the latest one by default.")


class Prompt(msgspec.Struct, frozen=True):
    """A version of a prompt, with all versions that there are."""

    id: str
    version: str
    versions: tuple[str, ...]
    variables: tuple[str, ...]
    model: str | None
    instructions: str | None
    object: Literal["prompt"] = "prompt"


class PromptList(msgspec.Struct, frozen=True):
    """The latest versions of all prompts, on one page."""

    data: tuple[Prompt, ...]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False
    object: Literal["list"] = "list"


@dataclass(frozen=True)
class PromptRoutes:
    """The routes over the prompts."""

    prompts: Prompts

    def routes(self, base: str) -> Sequence[web.RouteDef]:
        """Return the routes under ``base``."""
        return (
            web.get(f"{base}/prompts", self.list_prompts),
            web.get(f"{base}/prompts/{{prompt_id}}", self.retrieve_prompt),
        )

    @operation(Operation(PromptList))
    async def list_prompts(self, request: web.Request) -> web.Response:
        """List the latest version of each prompt of the operator."""
        listed = tuple(self._shown(self.prompts.find(prompt_id)) for prompt_id in sorted(self.prompts.templates))
        first, last = (listed[0].id, listed[-1].id) if listed else (None, None)
        return as_json(PromptList(listed, first, last))

    @operation(Operation(Prompt, query=(VERSION,), refusals=(PromptNotFound,)))
    async def retrieve_prompt(self, request: web.Request) -> web.Response:
        """Retrieve a prompt, in its latest version or in another one."""
        return as_json(self._shown(self.prompts.find(request.match_info["prompt_id"], VERSION.read(request))))

    def _shown(self, template: Template) -> Prompt:
        versions = tuple(map(str, sorted(self.prompts.templates[template.id])))
        given, variables = template.given, tuple(sorted(template.variables))
        return Prompt(
            template.id,
            version=str(template.version),
            versions=versions,
            variables=variables,
            model=given.model,
            instructions=given.instructions,
        )


@asynccontextmanager
async def prompts(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the routes of the prompts for the length of a block."""
    yield PromptRoutes(parts.prompts).routes(BASE)

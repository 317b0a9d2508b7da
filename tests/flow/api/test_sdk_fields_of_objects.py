"""The verdict of each field of a body or query that makes no answer, and that the server keeps to it.

These are the requests about conversations, files, vector stores, containers, stored responses and stored chats, as
openai-python's types have them.  A new version of the SDK with fields that stand in no table here fails.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import md5
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pytest
from aiohttp import FormData
from openai.types import FilePurpose
from openai.types.containers.file_create_params import FileCreateParams as AddedFile
from openai.types.file_create_params import FileCreateParams

from penstock.extensions.tools.sandbox.probe import Sandbox
from tests.support.api_clients import openai_client
from tests.support.sdk_types import BodyTypes, Probe, fields_of
from tests.support.server import ScriptedServer
from tests.support.tool_servers import answer_markup, tool_server

pytestmark = pytest.mark.io

Json: TypeAlias = Any

RESOURCES = ("batches", "containers", "files", "uploads", "vector_stores")
UNKNOWN = "of_tomorrow"
"""A field that no type has."""


@dataclass(frozen=True)
class Door:
    """A route, the type of its body or query, and the verdict of each field."""

    route: str
    of_sdk: str
    """The type, with its module, in openai-python, or in anthropic-python if ``sdk`` says so."""
    taken: Mapping[str, str]
    """The fields of each object that are done, or refused."""
    idle: Mapping[str, str] = field(default_factory=dict)
    """The fields of each object that have no effect, with the reason."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The probes that end with an error, by its ``param``: fields, values, or objects with all of their fields."""
    without: frozenset[str] = frozenset()
    """Fields of the body that have a table of their own."""
    unfit: frozenset[str] = frozenset()
    """Fields that are tried as a part of others alone, as not each value of them goes with what the others ask for."""

    sdk: str = "openai"

    @property
    def types(self) -> BodyTypes:
        module, _, name = self.of_sdk.rpartition(".")
        body = getattr(import_module(f"{self.sdk}.types.{module}"), name)
        return BodyTypes(body, BY_FIELD, {}, {}, "", UNKNOWN)

    @property
    def body(self) -> str:
        return self.of_sdk.rpartition(".")[2]

    def probes(self) -> Iterator[Probe]:
        """Yield each probe of the type, but for the fields that have a table of their own."""
        for probe in self.types.probes(set()):
            if not probe.value.keys() & self.without and not {probe.name, probe.field} & self.unfit:
                yield probe

    def expected(self, probe: Probe) -> str | None:
        """Return the ``param`` of the error; None if the probe is taken."""
        of_type = probe.field.partition(".")[0]
        named = probe.name.partition(":")[2]
        for name in (probe.name, probe.field, of_type, named):
            if name in self.refused:
                return self.refused[name]
        return None


SUN = b"Sun."

BY_FIELD: Mapping[str, Json] = {
    "model": "tiny",
    "limit": 5,
    "max_chunk_size_tokens": 200,
    "chunk_overlap_tokens": 100,
    "metadata": {"a": "b"},
    "seconds": 3_600,
    "md5": md5(SUN, usedforsecurity=False).hexdigest(),
}
"""Values of fields, where not any text or number will do."""

CHUNKING = {
    "AutoFileChunkingStrategyParam": "type",
    "StaticFileChunkingStrategyObjectParam": "static type",
    "StaticFileChunkingStrategyParam": "chunk_overlap_tokens max_chunk_size_tokens",
}
EXPIRY = {"ExpiresAfter": "anchor days"}
SKILLS = ("SkillReferenceParam", "InlineSkillParam", "InlineSkillSourceParam")
NETWORKS = ("ContainerNetworkPolicyAllowlistParam", "ContainerNetworkPolicyDomainSecretParam")
PAGE = "after limit order"
HEADERS = "betas workspace_id"
"""Fields of Anthropic's types that are headers; a server of one's own has one workspace."""

DOORS = [
    Door(
        "POST /v1/conversations",
        "conversations.conversation_create_params.ConversationCreateParams",
        {"ConversationCreateParams": "items metadata"},
        without=frozenset({"items"}),
    ),
    Door(
        "POST /v1/conversations/{conversation}",
        "conversations.conversation_update_params.ConversationUpdateParams",
        {"ConversationUpdateParams": "metadata"},
    ),
    Door(
        "GET /v1/conversations/{conversation}/items",
        "conversations.item_list_params.ItemListParams",
        {"ItemListParams": f"include {PAGE}"},
        refused={"ItemListParams.after": "after"},
    ),
    Door(
        "POST /v1/batches",
        "batch_create_params.BatchCreateParams",
        {
            "BatchCreateParams": "completion_window endpoint input_file_id metadata output_expires_after",
            "OutputExpiresAfter": "anchor seconds",
        },
        refused={
            f"BatchCreateParams.endpoint=/v1/{path}": "endpoint"
            for path in ("embeddings", "moderations", "images/generations", "images/edits", "videos")
        },
    ),
    Door(
        "GET /v1/batches",
        "batch_list_params.BatchListParams",
        {"BatchListParams": "after limit"},
        refused={"BatchListParams.after": "after"},
    ),
    Door(
        "POST /v1/uploads",
        "upload_create_params.UploadCreateParams",
        {
            "UploadCreateParams": "bytes expires_after filename mime_type purpose",
            "ExpiresAfter": "anchor seconds",
        },
        refused={"UploadCreateParams.purpose=fine-tune": "purpose"},
    ),
    Door(
        "POST /v1/uploads/{upload}/complete",
        "upload_complete_params.UploadCompleteParams",
        {"UploadCompleteParams": "md5 part_ids"},
    ),
    Door(
        "GET /v1/files",
        "file_list_params.FileListParams",
        {"FileListParams": f"purpose {PAGE}"},
        refused={"FileListParams.after": "after"},
    ),
    Door(
        "POST /v1/vector_stores",
        "vector_store_create_params.VectorStoreCreateParams",
        {
            "VectorStoreCreateParams": "chunking_strategy expires_after file_ids metadata name",
            **CHUNKING,
            **EXPIRY,
        },
        {"VectorStoreCreateParams.description": "no answer of the API has it, and no model reads it"},
    ),
    Door(
        "POST /v1/vector_stores/{vector_store}",
        "vector_store_update_params.VectorStoreUpdateParams",
        {"VectorStoreUpdateParams": "expires_after metadata name", **EXPIRY},
    ),
    Door(
        "POST /v1/vector_stores/{vector_store}/search",
        "vector_store_search_params.VectorStoreSearchParams",
        {
            "VectorStoreSearchParams": "filters max_num_results query ranking_options rewrite_query",
            "ComparisonFilter": "key type value",
            "CompoundFilter": "filters type",
            "RankingOptions": "ranker score_threshold",
        },
        refused={
            "VectorStoreSearchParams.rewrite_query=true": "rewrite_query",
            **{f"ComparisonFilter.type={several}": "filters" for several in ("in", "nin")},
        },
        unfit=frozenset({"ComparisonFilter.value", "CompoundFilter.filters"}),
    ),
    Door(
        "GET /v1/vector_stores",
        "vector_store_list_params.VectorStoreListParams",
        {"VectorStoreListParams": f"before {PAGE}"},
        refused={f"VectorStoreListParams.{name}": name for name in ("after", "before")},
    ),
    Door(
        "POST /v1/vector_stores/{vector_store}/files",
        "vector_stores.file_create_params.FileCreateParams",
        {"FileCreateParams": "attributes chunking_strategy file_id", **CHUNKING},
    ),
    Door(
        "POST /v1/vector_stores/{vector_store}/files/{file}",
        "vector_stores.file_update_params.FileUpdateParams",
        {"FileUpdateParams": "attributes"},
        {"FileUpdateParams.vector_store_id": "the SDK writes it into the path"},
    ),
    Door(
        "GET /v1/vector_stores/{vector_store}/files",
        "vector_stores.file_list_params.FileListParams",
        {"FileListParams": f"before filter {PAGE}"},
        refused={f"FileListParams.{name}": name for name in ("after", "before")},
    ),
    Door(
        "POST /v1/vector_stores/{vector_store}/file_batches",
        "vector_stores.file_batch_create_params.FileBatchCreateParams",
        {
            "FileBatchCreateParams": "attributes chunking_strategy file_ids files",
            "File": "attributes chunking_strategy file_id",
            **CHUNKING,
        },
    ),
    Door(
        "GET /v1/vector_stores/{vector_store}/file_batches/{batch}/files",
        "vector_stores.file_batch_list_files_params.FileBatchListFilesParams",
        {"FileBatchListFilesParams": f"before filter {PAGE}"},
        {"FileBatchListFilesParams.vector_store_id": "the SDK writes it into the path"},
        {f"FileBatchListFilesParams.{name}": name for name in ("after", "before")},
    ),
    Door(
        "POST /v1/containers",
        "container_create_params.ContainerCreateParams",
        {
            "ContainerCreateParams": "expires_after file_ids memory_limit name network_policy skills",
            "ExpiresAfter": "anchor minutes",
            "ContainerNetworkPolicyDisabledParam": "type",
            "ContainerNetworkPolicyAllowlistParam": "allowed_domains domain_secrets type",
            "ContainerNetworkPolicyDomainSecretParam": "domain name value",
            "SkillReferenceParam": "skill_id type version",
            "InlineSkillParam": "description name source type",
            "InlineSkillSourceParam": "data media_type type",
        },
        refused={
            **dict.fromkeys(SKILLS, "skills"),
            **dict.fromkeys(NETWORKS, "network_policy.type"),
            **{f"ContainerCreateParams.memory_limit={size}": "memory_limit" for size in ("16g", "64g")},
            f"ContainerNetworkPolicyDisabledParam.{UNKNOWN}": f"network_policy.{UNKNOWN}",
        },
    ),
    Door(
        "GET /v1/containers",
        "container_list_params.ContainerListParams",
        {"ContainerListParams": f"name {PAGE}"},
        refused={"ContainerListParams.after": "after"},
    ),
    Door(
        "GET /v1/containers/{container}/files",
        "containers.file_list_params.FileListParams",
        {"FileListParams": PAGE},
        refused={"FileListParams.after": "after"},
    ),
    Door(
        "GET /v1/responses/{response}",
        "responses.response_retrieve_params.ResponseRetrieveParamsBase",
        {"ResponseRetrieveParamsBase": "include include_obfuscation starting_after"},
    ),
    Door(
        "GET /v1/responses/{response}/input_items",
        "responses.input_item_list_params.InputItemListParams",
        {"InputItemListParams": f"include {PAGE}"},
        refused={"InputItemListParams.after": "after"},
    ),
    Door(
        "GET /v1/chat/completions",
        "chat.completion_list_params.CompletionListParams",
        {"CompletionListParams": f"metadata model {PAGE}"},
        refused={"CompletionListParams.after": "after"},
    ),
    Door(
        "POST /v1/chat/completions/{chat}",
        "chat.completion_update_params.CompletionUpdateParams",
        {"CompletionUpdateParams": "metadata"},
    ),
    Door(
        "GET /v1/chat/completions/{chat}/messages",
        "chat.completions.message_list_params.MessageListParams",
        {"MessageListParams": PAGE},
        refused={"MessageListParams.after": "after"},
    ),
    Door(
        "GET /v1/files",
        "beta.file_list_params.FileListParams",
        {"FileListParams": f"ids limit page scope_id {HEADERS}"},
        refused={"FileListParams.page": "page", "FileListParams.scope_id": "scope_id"},
        unfit=frozenset(f"FileListParams.{name}" for name in HEADERS.split()),
        sdk="anthropic",
    ),
    Door(
        "GET /v1/models",
        "model_list_params.ModelListParams",
        {"ModelListParams": "after_id before_id lifecycle limit workspace_id"},
        refused={"ModelListParams.after_id": "after_id", "ModelListParams.before_id": "before_id"},
        unfit=frozenset({"ModelListParams.workspace_id"}),
        sdk="anthropic",
    ),
]
"""The routes; an ``after`` or ``before`` that is not in the list is refused, so it has an effect."""

ROUTES = [f"{door.route} of {door.sdk}" for door in DOORS]


@pytest.fixture
async def served(tmp_path: Path, sandbox: Sandbox) -> AsyncGenerator[ScriptedServer, None]:
    async with tool_server(tmp_path, [answer_markup()], sandbox=sandbox, resources=RESOURCES) as served:
        yield served


async def stored_ids(served: ScriptedServer) -> dict[str, str]:
    """Make an object of each kind; return their ids by the names in the routes."""
    async with openai_client(served.url) as sdk:
        file = (await sdk.files.create(file=("a.txt", SUN), purpose="user_data")).id
        upload = await sdk.uploads.create(bytes=4, filename="a.txt", mime_type="text/plain", purpose="user_data")
        part = await sdk.uploads.parts.create(upload.id, data=SUN)
    made = {
        "file": file,
        "upload": upload.id,
        "part": part.id,
        "conversation": (await served.create_conversation()).rpartition("/")[2],
    }
    chat = {"messages": [{"role": "user", "content": "Hi"}], "store": True}
    for name, path, body in (
        ("vector_store", "/v1/vector_stores", {}),
        ("container", "/v1/containers", {"name": "x"}),
        ("response", "/v1/responses", {"input": "Hi"}),
        ("chat", "/v1/chat/completions", chat),
        ("batch", "/v1/vector_stores/{vector_store}/file_batches", {"file_ids": [file]}),
    ):
        status, answer = await served.post(body, path.format(**made))
        assert status == 200, answer
        made[name] = answer["id"]
    return made


def filled(value: Json, made: Mapping[str, str]) -> Json:
    """Return a value with the id of the file, where the SDK asks for one."""
    if not isinstance(value, dict):
        return value
    known = {
        "part_ids": [made["part"]],
        "file_id": made["file"],
        "file_ids": [made["file"]],
        "vector_store_id": made["vector_store"],
    }
    return {
        key: known.get(key)
        or ([filled(each, made) for each in inner] if isinstance(inner, list) else filled(inner, made))
        for key, inner in value.items()
    }


def in_query(value: Json) -> dict[str, Any]:
    """Return the query that the SDK writes for an object."""
    query: dict[str, Any] = {}
    for name, given in value.items():
        if isinstance(given, dict):
            query |= {f"{name}[{key}]": inner for key, inner in given.items()}
        else:
            query[name] = str(given).lower() if isinstance(given, bool) else given
    return query


OF_SDK: Mapping[str, Mapping[str, str]] = {"openai": {}, "anthropic": {"anthropic-version": "2023-06-01"}}
"""The headers by which a shared route knows whose API is meant, by the SDK."""


async def asked(served: ScriptedServer, route: str, value: Json, headers: Mapping[str, str]) -> tuple[int, Json]:
    method, _, path = route.partition(" ")
    if method == "POST":
        return await served.post(value, path)
    async with served.client.get(served.url + path, params=in_query(value), headers=headers) as answer:
        return answer.status, await answer.json()


def blamed(answer: Json) -> str | None:
    """Return the ``param`` of an error; Anthropic's errors have it in their text."""
    error = answer.get("error") or {}
    found = re.search(r"\(at (\S+)\)$", error.get("message", ""))
    return found[1] if found else error.get("param")


@pytest.mark.parametrize("door", DOORS, ids=ROUTES)
async def test_server_keeps_to_the_verdict_of_every_field(
    served: ScriptedServer, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """A field that no type has, at the top or below it, is a line in the log."""
    caplog.set_level(logging.INFO)
    made, wrong = await stored_ids(served), []
    for probe in door.probes():
        caplog.clear()
        body = filled(probe.value, made)
        if door.body == "FileBatchCreateParams" and "files" not in body:
            body["file_ids"] = [made["file"]]
        status, answer = await asked(served, door.route.format(**made), body, OF_SDK[door.sdk])
        param = door.expected(probe)
        is_logged = any("Ignored unknown" in line and UNKNOWN in line for line in caplog.messages)
        if (status != 200, blamed(answer)) != (param is not None, param) or (
            not param and is_logged != (probe.field.endswith(UNKNOWN))
        ):
            wrong.append(f"{probe.name}: {status} {answer.get('error')} {caplog.messages} {json.dumps(body)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("door", DOORS, ids=ROUTES)
def test_every_field_of_the_sdk_has_a_verdict(door: Door) -> None:
    verdicts = {name: set(fields.split()) for name, fields in door.taken.items()}
    for name in door.idle:
        of_sdk, of_field = name.split(".")
        verdicts.setdefault(of_sdk, set()).add(of_field)
    found = door.types.objects(())
    if door.without:
        found = {door.body: found[door.body]}
    assert found == verdicts


# Forms


@pytest.mark.parametrize("purpose", get_args(FilePurpose))
async def test_purposes_of_files(served: ScriptedServer, purpose: str) -> None:
    assert fields_of(FileCreateParams).keys() == {"expires_after", "file", "purpose"}
    form = FormData({"purpose": purpose, "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    form.add_field("file", b"Sun.", filename="a.txt")
    async with served.client.post(f"{served.url}/v1/files", data=form) as answered:
        answer = await answered.json()
    if purpose == "fine-tune":
        assert (answered.status, answer["error"]["param"]) == (400, "purpose")
        return
    assert (answered.status, answer["purpose"]) == (200, purpose)
    assert answer["expires_at"] - answer["created_at"] == 3600


async def test_files_of_containers(served: ScriptedServer) -> None:
    assert fields_of(AddedFile).keys() == {"file", "file_id"}
    made = await stored_ids(served)
    path = f"/v1/containers/{made['container']}/files"
    form = FormData()
    form.add_field("file", b"Sun.", filename="b.txt")
    async with served.client.post(served.url + path, data=form) as answered:
        assert (await answered.json())["bytes"] == 4
    status, copied = await served.post({"file_id": made["file"]}, path)
    assert (status, copied["path"].rpartition("/")[2]) == (200, "a.txt")

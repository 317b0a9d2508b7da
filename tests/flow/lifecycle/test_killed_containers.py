"""A server that is killed while code runs in one of its containers: nothing is left, and clients learn of the end."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from uuid import uuid4

import aiohttp
import psutil
import pytest

from penstock.extensions.tools.sandbox.folder import PREFIX
from tests.support.sandboxes import available, lives
from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import both_if_thorough
from tests.support.tool_servers import CODE_TOOL, in_container


@pytest.fixture
async def sandbox() -> None:
    await available("python")


async def make(server: ServerProcess, name: str) -> str:
    """Make a container with a file of this name, and return its id."""
    _, made = await server.post({"name": "mine"}, "/v1/containers")
    form = aiohttp.FormData()
    form.add_field("file", b"1,2", filename=name)
    async with server.client.post(f"{server.url}/v1/containers/{made['id']}/files", data=form) as answer:
        assert answer.status == 200
    return str(made["id"])


def folders_with(name: str) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{name}"))


async def running_code(server: ServerProcess, container_id: str) -> list[psutil.Process]:
    """Have the model run code in a container, and return the processes of its sandbox."""
    await server.start_background({"tools": in_container(container_id)})
    async with asyncio.timeout(120):
        while not psutil.Process(server.pid).children(recursive=True):
            await asyncio.sleep(0.05)
    started: list[psutil.Process] = psutil.Process(server.pid).children(recursive=True)
    return started


@pytest.mark.usefixtures("sandbox")
@both_if_thorough
async def test_killed_server_leaves_no_container(store_at: str, tmp_path: Path) -> None:
    name = f"{uuid4()}.csv"
    async with running_process(store_at, tmp_path, "code", "--sandbox") as server:
        container_id = await make(server, name)
        processes = await running_code(server, container_id)
        assert folders_with(name)
        await server.kill()
        await asyncio.to_thread(psutil.wait_procs, processes, 120)
        assert not [*filter(lives, processes)]
        await server.start()
        assert folders_with(name) == []
        status, found = await server.get(f"/v1/containers/{container_id}")
        assert (status, found["status"]) == (200, "expired")
        assert (await server.get(f"/v1/containers/{container_id}/files"))[0] == 404
        status, refused = await server.post({"input": "Hi", "tools": in_container(container_id)})
        assert (status, refused["error"]["code"]) == (404, "container_not_found")
        body = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": container_id}
        history = [{"role": "user", "content": "Hi"}, {**body, "status": "completed", "outputs": []}]
        async with server.open_stream({"input": history, "tools": [CODE_TOOL]}) as stream:
            opened = (await stream.upto(b"code_interpreter_call.in_progress")).decode()
        (added,) = [line for line in opened.splitlines() if "output_item.added" in line and line.startswith("data: ")]
        assert json.loads(added.removeprefix("data: "))["item"]["container_id"] not in ("", container_id)

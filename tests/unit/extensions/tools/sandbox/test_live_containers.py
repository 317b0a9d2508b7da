"""Containers: their life, their folder, and the calls of several responses in one of them."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import to_builtins

from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.sandbox.container import ContainerHost
from penstock.extensions.tools.sandbox.folder import PREFIX, Folder, sweep
from penstock.extensions.tools.sandbox.live_containers import OpenContainer, OpenContainers
from penstock.extensions.tools.sandbox.plan import Kind
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.python import MOST_IMAGES, PythonHost
from penstock.pipeline import frames
from penstock.pipeline.protocol.params.request import OUTPUTS
from penstock.pipeline.protocol.tools import ContainerUse
from penstock.services.containers import NO_OWNER_LIMITS, FolderFull, NoSuchFile, OwnerLimits, TooManyContainers
from penstock.services.slots import Slots
from penstock.services.tools import ContainerFiles, ToolResult
from tests.support.sandboxes import available
from tests.support.scripted_tools import another_conversation
from tests.support.stores import open_store
from tests.support.tool_servers import data_url, png

pytestmark = pytest.mark.io

PNG = repr(png())


@pytest.fixture
async def containers(python_sandbox: Sandbox, container_sandbox: Sandbox) -> AsyncIterator[OpenContainers]:
    sandboxes: dict[Kind, Sandbox] = {"python": python_sandbox, "container": container_sandbox}
    opened = OpenContainers(Slots(4), sandboxes=sandboxes)
    yield opened
    await opened.close()


def request(response_id: str, use: ContainerUse | None = None, owner: str = "") -> frames.ResolvedRequest:
    uses = dict.fromkeys(("python", "container"), to_builtins(use)) if use else {}
    asking = another_conversation(response_id)
    origin = frames.Origin(owner)
    return frames.with_facts(asking, options=uses, include=(OUTPUTS,), origin=origin)


async def code(
    containers: OpenContainers, text: str, asking: frames.ResolvedRequest, seconds: float = 120
) -> ToolResult:
    session = PythonHost(containers).session(asking)
    try:
        return await session.run("python", text, seconds)
    finally:
        await session.close()


async def shell(containers: OpenContainers, script: str, asking: frames.ResolvedRequest) -> str:
    session = ContainerHost(containers).session(asking)
    try:
        return (await session.run("exec", json.dumps({"cmd": ["bash", "-lc", script]}), 120)).result
    finally:
        await session.close()


SHARED = ContainerUse("cntr_a")


async def test_variables_and_files_outlive_a_response(containers: OpenContainers) -> None:
    await code(containers, "x = 5\nopen('a', 'w').write('kept')", request("resp_1", SHARED))
    later = await code(containers, "x, open('a').read()", request("resp_2", SHARED))
    assert later.result == "(5, 'kept')\n"
    assert "NameError" in (await code(containers, "x", request("resp_3"))).result


async def test_python_and_shell_share_the_folder(containers: OpenContainers) -> None:
    await code(containers, "open('a', 'w').write('of Python')", request("resp_1"))
    assert await shell(containers, "cat a; echo of the shell > b", request("resp_1")) == "of Python"
    assert (await code(containers, "open('b').read()", request("resp_1"))).result == "'of the shell\\n'\n"


async def test_calls_of_several_responses_run_one_after_another(containers: OpenContainers) -> None:
    count = "import time\nn = globals().get('n', 0)\ntime.sleep(0.05)\nn += 1\nn"
    outcomes = await asyncio.gather(*(code(containers, count, request(f"resp_{n}", SHARED)) for n in range(4)))
    assert sorted(outcome.result for outcome in outcomes) == ["1\n", "2\n", "3\n", "4\n"]


async def test_files_outlive_the_process(containers: OpenContainers) -> None:
    await code(containers, "x = 1\nopen('a', 'w').write('kept')", request("resp_1"))
    ended = await code(containers, "import os\nos.closerange(3, 100)", request("resp_1"))
    assert "All variables are lost" in (ended.error or "")
    assert (await code(containers, "open('a').read()", request("resp_1"))).result == "'kept'\n"


async def test_folder_over_its_limit_is_emptied(python_sandbox: Sandbox) -> None:
    limits = replace(python_sandbox.plan.limits, disk=4 << 20)
    containers = OpenContainers(Slots(4), sandboxes={"python": Sandbox(replace(python_sandbox.plan, limits=limits))})
    many = "import time\nfor n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(30)"
    try:
        ended = await code(containers, many, request("resp_1"))
        assert "All variables and files are lost" in (ended.error or "")
        assert (await code(containers, "import os; os.listdir()", request("resp_1"))).result == "[]\n"
    finally:
        await containers.close()


async def test_idle_container_expires(containers: OpenContainers) -> None:
    await code(containers, "x = 1", request("resp_1"))
    (container,) = containers.of("")
    container.known = replace(container.known, ttl=0.05)
    async with containers.used(container):
        pass
    async with asyncio.timeout(120):
        while containers.get(container.known.id, ""):
            await asyncio.sleep(0.01)
    assert container.ending
    await container.ending
    assert not container.folder.path.exists()
    assert "NameError" in (await code(containers, "x", request("resp_1"))).result


async def test_named_container_is_not_made_anew(containers: OpenContainers) -> None:
    named = request("resp_1", ContainerUse("cntr_gone", is_own=False))
    assert "the container has ended" in ((await code(containers, "1", named)).error or "")
    assert not containers.of("")


async def test_container_of_another_owner_is_unknown(containers: OpenContainers) -> None:
    await code(containers, "x = 1", request("resp_1", SHARED, owner="one"))
    assert containers.get("cntr_a", "one")
    assert containers.get("cntr_a", "other") is None


async def test_oldest_idle_container_makes_room(containers: OpenContainers) -> None:
    made = [await containers.create(f"cntr_{n}", "", "", 60, None) for n in range(containers.most)]
    async with containers.used(made[0]):
        await containers.create("cntr_new", "", "", 60, None)
    assert containers.get("cntr_0", "")
    assert containers.get("cntr_1", "") is None
    assert len(containers.of("")) == containers.most


async def test_owner_has_at_most_half(containers: OpenContainers) -> None:
    share = containers.most // 2
    for n in range(share + 1):
        await containers.create(f"cntr_{n}", "key", "", 60, None)
    assert len(containers.of("key")) == share
    containers.limits_of = lambda _: OwnerLimits(number=1)
    await containers.create("cntr_last", "key", "", 60, None)
    assert len(containers.of("key")) == share
    await asyncio.gather(*(containers.end(each) for each in containers.of("key")[1:]))
    await containers.create("cntr_only", "key", "", 60, None)
    assert [each.known.id for each in containers.of("key")] == ["cntr_only"]


async def test_owner_has_a_limit_of_disk_of_its_own(containers: OpenContainers) -> None:
    containers.limits_of = lambda owner: OwnerLimits(disk=1 << 20) if owner == "key" else NO_OWNER_LIMITS
    writing = "open('a', 'wb').write(bytes(2 << 20))"
    assert "too large" in (await code(containers, writing, request("resp_1", owner="key"))).result
    assert (await code(containers, writing, request("resp_2", owner="other"))).result == f"{2 << 20}\n"
    upload = await containers.create("cntr_1", "key", "", 60, None)
    async with upload.uploading() as file:
        with pytest.raises(FolderFull):
            await file.write(bytes((1 << 20) + 1))


async def test_container_is_refused_or_waited_for_if_all_are_in_use(containers: OpenContainers) -> None:
    containers.limits_of = lambda _: OwnerLimits(number=1)
    first = await containers.create("cntr_1", "key", "", 60, None)
    async with containers.used(first):
        with pytest.raises(TooManyContainers):
            await containers.create("cntr_2", "key", "", 60, None)
        waiting = asyncio.create_task(code(containers, "1", request("resp_2", owner="key")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
    assert (await waiting).result == "1\n"
    assert [each.known.id for each in containers.of("key")] == ["cntr_2"]


async def test_deleting_a_container_ends_the_call_in_it(containers: OpenContainers) -> None:
    running = asyncio.create_task(code(containers, "import time; time.sleep(60)", request("resp_1"), 600))
    while not (found := containers.of("")) or not found[0].processes:
        await asyncio.sleep(0.01)
    await containers.end(found[0])
    assert "has ended" in ((await running).error or "")
    assert not found[0].folder.path.exists()


async def test_memory_limit_is_that_of_the_container(containers: OpenContainers) -> None:
    big = request("resp_1", ContainerUse("cntr_big", memory_limit="1g"))
    assert (await code(containers, "len(bytearray(768 << 20)) >> 20", big)).result == "768\n"
    assert "MemoryError" in (await code(containers, "bytearray(768 << 20)", request("resp_2"))).result


async def test_images_that_a_call_writes_are_outputs(containers: OpenContainers) -> None:
    write = f"open('a.png', 'wb').write({PNG})\nopen('b.png', 'w').write('no image')\nopen('c.txt', 'w').close()"
    written = await code(containers, write, request("resp_1"))
    assert written.data == frames.CodeOutputs(({"type": "image", "url": data_url(png())},))
    again = await code(containers, "1", request("resp_1"))
    assert again.data == frames.CodeOutputs(({"type": "logs", "logs": "1\n"},))


async def test_large_and_many_images_are_left_out(containers: OpenContainers) -> None:
    write = (
        f"for n in range(12): _ = open(f'{{n}}.png', 'wb').write({PNG})\n"
        f"_ = open('z.png', 'wb').write({PNG} + bytes(3 << 20))"
    )
    written = await code(containers, write, request("resp_1"))
    assert written.data == frames.CodeOutputs(({"type": "image", "url": data_url(png())},) * MOST_IMAGES)


async def test_figures_are_saved_and_shown() -> None:
    """The packages of these tests have matplotlib, unlike those of most machines."""
    import matplotlib as plots  # noqa: PLC0415

    packages = Path(plots.__file__).parent.parent
    sandbox = await available("python", packages=packages)
    limits = replace(sandbox.plan.limits, memory=2 << 30)
    containers = OpenContainers(Slots(4), sandboxes={"python": Sandbox(replace(sandbox.plan, limits=limits))})
    try:
        drawn = await code(
            containers, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()", request("resp_1"), 120
        )
        assert "The figure is in" in drawn.result, drawn
        assert "Warning" not in drawn.result
        assert isinstance(drawn.data, frames.CodeOutputs)
        assert [output["type"] for output in drawn.data.outputs] == ["logs", "image"]
        assert drawn.data.outputs[1]["url"].startswith("data:image/png;base64,iVBOR")
        (container,) = containers.of("")
        assert [file.path for file in await container.files()] == ["figure_1_1.png"]
    finally:
        await containers.close()


async def test_session_tells_which_files_may_be_cited(containers: OpenContainers) -> None:
    session = PythonHost(containers).session(request("resp_1"))
    await session.run(
        "python", "import os\nos.mkdir('d')\nopen('d/a b.csv', 'w').close()\nopen('.hidden', 'w').close()", 120
    )
    (container,) = containers.of("")
    assert session.files == ContainerFiles("cntr_1", container.home, ("d/a b.csv",))
    await session.close()


async def test_uploaded_file_is_there_for_code(containers: OpenContainers) -> None:
    container = await containers.create("cntr_1", "", "", 60, None)
    async with container.uploading() as upload:
        await upload.write(b"a,b\n")
        await upload.finish("data.csv")
    assert (await code(containers, "open('data.csv').read()", request("resp_1"))).result == "'a,b\\n'\n"
    assert (await code(containers, "open('data.csv', 'a').write('1')", request("resp_1"))).error is None
    assert [data async for data in container.content("data.csv")] == [b"a,b\n1"]
    assert container.uploaded == {"data.csv"}


async def test_broken_upload_leaves_nothing(containers: OpenContainers) -> None:
    container = await containers.create("cntr_1", "", "", 60, None)
    with pytest.raises(FolderFull):
        async with container.uploading() as upload:
            await upload.write(bytes(container.plan.limits.disk + 1))
    for name in ("../a", "", "a\nb", "x" * 300):
        with pytest.raises(FolderFull):
            async with container.uploading() as upload:
                await upload.finish(name)
    assert os.listdir(container.folder.path) == []  # noqa: PTH208 - a hidden file would count


async def test_content_of_a_file_that_is_none_is_refused(containers: OpenContainers) -> None:
    await shell(containers, "mkfifo pipe; ln -s /etc/passwd link; mkdir folder", request("resp_1"))
    (container,) = containers.of("")
    assert await container.files() == []
    for path in ("pipe", "link", "folder", "../secret", "link/x", "nothing"):
        with pytest.raises(NoSuchFile):
            async for _ in container.content(path):
                pass


async def test_stored_files_are_put_into_the_folder_once(containers: OpenContainers, tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "folder" / "store.sqlite3")) as store:
        containers.store, files = store, store.part(StoredFiles)
        async with files.uploading("") as upload:
            await upload.write(b"1,2")
            file = await upload.finish("a.csv", "user_data")
        use = ContainerUse("cntr_a", file_ids=(file.id,))
        assert (await code(containers, "open('a.csv').read()", request("resp_1", use))).result == "'1,2'\n"
        assert await files.delete(file.id, "")
        assert (await code(containers, "open('a.csv').read()", request("resp_2", use))).result == "'1,2'\n"
        gone = ContainerUse("cntr_b", file_ids=(file.id,))
        assert "No such File object" in ((await code(containers, "1", request("resp_3", gone))).error or "")
        await containers.close()


@pytest.fixture
def left() -> Path:
    """The folder of a killed server."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


async def test_folders_of_killed_servers_are_swept(left: Path) -> None:
    """The kernel gives back the lock of a folder when its server is killed."""
    mine = Folder(drops_user=os.geteuid() == 0)
    await sweep()
    exist = [path.exists() for path in (left, mine.path)]
    await mine.remove()
    assert exist == [False, True]


async def test_container_whose_client_leaves_while_it_is_recorded_expires(
    containers: OpenContainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding = asyncio.Event()

    class Slow:
        async def add(self, _: object) -> None:
            adding.set()
            await asyncio.Event().wait()

        async def touch(self, *_: object) -> None:
            """Do nothing."""

        end = touch

    monkeypatch.setattr(OpenContainers, "_ledger", Slow())
    making = asyncio.create_task(containers.create("cntr_1", "", "", 60.0, None))
    await adding.wait()
    making.cancel()
    await asyncio.wait([making])
    made = containers.get("cntr_1", "")
    assert made
    assert (made.users, made.expiry is None) == (0, False)


async def test_cancelled_upload_closes_its_file_once_its_thread_no_longer_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another file or connection gets the descriptor: the rest of the bytes would go there."""
    source, file = os.pipe()
    sent, begun = b"x" * 2**20, list[str]()

    async def files() -> list[Any]:
        return []

    folder: Any = SimpleNamespace(begin=lambda: (file, "hidden"), abandon=begun.append)
    plan: Any = SimpleNamespace(limits=SimpleNamespace(disk=2**30))
    container: Any = OpenContainer(SimpleNamespace(), folder, plan, used_at=0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(container, "files", files)

    async def upload() -> None:
        async with container.uploading() as upload:
            await upload.write(sent)

    uploading = asyncio.create_task(upload())
    try:
        received = await asyncio.to_thread(os.read, source, 1)
        uploading.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert os.fstat(file)
        while piece := await asyncio.to_thread(os.read, source, 2**16):
            received += piece
        await asyncio.wait([uploading])
        assert (len(received), begun, uploading.cancelled()) == (len(sent), ["hidden"], True)
    finally:
        os.close(source)

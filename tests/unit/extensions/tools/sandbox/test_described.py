"""The words by which the model knows a sandbox, each compared with what that sandbox does."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from penstock.extensions.tools.sandbox.container import ContainerHost
from penstock.extensions.tools.sandbox.live_containers import OpenContainers
from penstock.extensions.tools.sandbox.plan import Kind, Mode
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.python import PythonHost
from penstock.services.containers import HOME
from penstock.services.slots import Slots
from penstock.services.tools import ContainerFiles
from tests.support.sandboxes import available
from tests.support.scripted_tools import NO_CONVERSATION

pytestmark = pytest.mark.io

HOSTS: dict[Kind, type[PythonHost] | type[ContainerHost]] = {"python": PythonHost, "container": ContainerHost}
KINDS: tuple[Kind, ...] = ("python", "container")
SECONDS = 1.5
SOCKET = "import socket; socket.socket()"


def without_drive(sandbox: Sandbox) -> Sandbox:
    """A machine on which the link cannot be made."""
    return Sandbox(replace(sandbox.plan, uses_link=False))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
async def sandbox(kind: Kind, mode: Mode) -> Sandbox:
    return await available(kind, (mode,))


def hosted(kind: Kind, sandbox: Sandbox) -> PythonHost | ContainerHost:
    return HOSTS[kind](OpenContainers(Slots(8), call_seconds=SECONDS, sandboxes={kind: sandbox}))


async def described(host: PythonHost | ContainerHost) -> str:
    return (await host.declaration(NO_CONVERSATION, 10)).description


def writing(kind: Kind, path: str) -> str:
    code = f"with open({path!r}, 'w') as file: file.write('kept')"
    return code if kind == "python" else json.dumps({"cmd": ["sh", "-c", f"echo kept > {path}"]})


def reading(kind: Kind, path: str) -> str:
    return f"open({path!r}).read()" if kind == "python" else json.dumps({"cmd": ["cat", path]})


async def test_named_folder_keeps_files(kind: Kind, sandbox: Sandbox) -> None:
    """Also for the next response in the container, and by the name alone."""
    host = hosted(kind, sandbox)
    (folder,) = re.findall(r"The drive at '(.+?)' can be used to save", await described(host))
    first, second = host.session(NO_CONVERSATION), host.session(NO_CONVERSATION)
    assert (await first.run("", writing(kind, f"{folder}/r.csv"), 60)).error is None
    assert first.files == ContainerFiles(first.files.container_id if first.files else "", HOME, ("r.csv",))
    for path in (f"{folder}/r.csv", "r.csv"):
        assert "kept" in (await second.run("", reading(kind, path), 60)).result
    await host.close()


async def test_drive_is_not_named_where_there_is_none(kind: Kind, mode: Mode, sandbox: Sandbox) -> None:
    if mode == "bubblewrap":
        assert without_drive(sandbox).has_home
        return
    host = hosted(kind, without_drive(sandbox))
    said = await described(host)
    assert HOME not in said
    assert "The working folder can be used to save and persist user files: open them by their names" in said
    session = host.session(NO_CONVERSATION)
    assert (await session.run("", writing(kind, "r.csv"), 60)).error is None
    assert "kept" in (await session.run("", reading(kind, "r.csv"), 60)).result
    await host.close()


async def test_call_ends_after_the_named_seconds(kind: Kind, sandbox: Sandbox) -> None:
    host = hosted(kind, sandbox)
    (named,) = re.findall(r"after ([\d.]+) seconds", await described(host))
    assert float(named) == SECONDS
    endless = "while True: pass" if kind == "python" else '{"cmd": ["sleep", "600"]}'
    session = host.session(NO_CONVERSATION)
    await session.run("", writing(kind, "started"), 60)  # the start of a sandbox is a part of its first call
    ended = await session.run("", endless, float(named))
    assert f"ran longer than {named} seconds" in (ended.error or "") or "took too long" in ended.result
    await host.close()


async def test_network_is_as_described(kind: Kind, sandbox: Sandbox) -> None:
    host = hosted(kind, sandbox)
    said = await described(host)
    assert ("Internet access for this session is disabled." in said, "UNKNOWN" in said) == (True, False)
    code = SOCKET if kind == "python" else json.dumps({"cmd": [sandbox.plan.interpreter, "-c", SOCKET]})
    session = host.session(NO_CONVERSATION)
    assert re.search(r"PermissionError|OSError", (await session.run("", code, 60)).result)
    await host.close()


async def test_output_has_the_named_folder(kind: Kind, sandbox: Sandbox) -> None:
    host = hosted(kind, sandbox)
    asked = "import os; print(os.getcwd())" if kind == "python" else '{"cmd": ["/bin/pwd", "-P"]}'
    assert (await host.session(NO_CONVERSATION).run("", asked, 60)).result.strip() == HOME
    await host.close()

"""The image without an engine, built and run: as another user, with read-only files, and with working sandboxes."""

from __future__ import annotations

import errno
import json
import os
import tarfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from penstock.pipeline.distribution import DISTRIBUTION, own_version
from tests.support.containers import TOOLS, Builder, Container, Image, running
from tests.support.paths import HARMONY, ROOT
from tests.support.processes import PATIENCE, free_port
from tests.support.stated import IMAGE, MB, Stated

DEPLOY = ROOT / "deploy"
SERVICE: Mapping[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gpu"]
WRITABLE = "/var/lib/penstock"
MAKES_NAMESPACES = ("clone", "clone3", "mount", "pivot_root", "setns", "sethostname", "umount2", "unshare")
NAMESPACES = 0x7E020000
"""The flags of clone() for namespaces."""

PROBE = """
import asyncio
from penstock.extensions.tools.sandbox.probe import Sandbox, probe
for kind in ("python", "container"):
    found = asyncio.run(probe(kind))
    print(kind, found.plan.mode if isinstance(found, Sandbox) else "off")
"""

Start: TypeAlias = Callable[..., AbstractContextManager[Container]]


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    builder = Builder(tmp_path_factory.mktemp("image"))
    with builder.kept():
        builder.base()
        yield builder.build("plain")


@pytest.fixture
def start(image: Image, tmp_path: Path) -> Start:
    """Start a container whose home is a folder of the test."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, *map(int, image.config["User"].split(":")))
    return partial(
        running, image, tmp_path / f"penstock-{os.getpid()}", mounts={home: WRITABLE, HARMONY: "/recordings"}
    )


def called(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def test_server_answers_and_ends_in_a_read_only_container(image: Image, start: Start) -> None:
    port = free_port()
    check = image.config["Healthcheck"]["Test"]
    assert check[0] == "CMD"
    served = (*image.config["Entrypoint"], "serve", "--engine", "replay:/recordings")
    with start(SERVICE, served, environment={"PENSTOCK_PORT": str(port)}) as container:
        container.wait_until_healthy(check[1:])
        answer = called(port, "/v1/responses", {"input": "Say hello."})
        assert answer["status"] == "completed"
        assert called(port, f"/v1/responses/{answer['id']}") == answer
        assert container.execute("sh", "-c", "id -u; cat /proc/1/comm").split() == ["10001", "tini"]
        assert (
            container.execute(
                "sh", "-c", "for d in / /opt/penstock /usr/lib /etc; do test -w $d && echo $d; done; true"
            )
            == ""
        )
        assert container.stop() == 0, container.log


def test_image_says_what_it_is(image: Image) -> None:
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in image.config["Labels"].items()}
    assert (labels["title"], labels["version"], labels["licenses"]) == (DISTRIBUTION, own_version(), "Apache-2.0")


def test_page_states_what_the_image_adds_to_debian(image: Image) -> None:
    with tarfile.open(TOOLS / "debian.tar") as debian:
        known = {image.files / name for name in debian.getnames()}
    added = {Path(folder, name) for folder, _, names in os.walk(image.files) for name in names} - known
    size = sum({(file.st_dev, file.st_ino): file.st_blocks * 512 for file in map(Path.lstat, added)}.values())
    stated = Stated("deploy/README.md", IMAGE, lambda: float(size), MB)
    assert stated.holds(size), f"{stated.stated / MB} MB are stated, and {size / MB:.0f} MB measured"


def sandboxes(start: Start, *security: str) -> dict[str, str]:
    """Return the mode of each kind of sandbox in a container with these options."""
    service = {**SERVICE, "security_opt": security}
    with start(service, ("tini", "--", "python", "-c", PROBE), environment={}) as container:
        assert container.process.wait(PATIENCE) == 0, container.log
        return dict(line.split() for line in container.log.splitlines())


def test_sandboxes_are_strong_with_the_options_of_compose(start: Start) -> None:
    assert sandboxes(start, *SERVICE["security_opt"]) == {"python": "bubblewrap", "container": "bubblewrap"}


def test_sandboxes_without_a_proc_of_their_own_are_weaker(start: Start) -> None:
    security = [option for option in SERVICE["security_opt"] if not option.startswith("systempaths")]
    assert sandboxes(start, *security) == {"python": "landlock", "container": "off"}


def test_sandboxes_without_namespaces_are_weaker(start: Start, tmp_path: Path) -> None:
    """Docker's own profile is like this one, but for the calls that make namespaces."""
    profile = json.loads((DEPLOY / "seccomp.json").read_text())
    (rule,) = profile["syscalls"]
    rule["names"] = [name for name in rule["names"] if name not in MAKES_NAMESPACES]
    threads = {"index": 0, "value": NAMESPACES, "op": "SCMP_CMP_MASKED_EQ"}
    profile["syscalls"] += [
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [threads]},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
    ]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    security = [option for option in SERVICE["security_opt"] if not option.startswith("seccomp")]
    options = (*security, f"seccomp={tmp_path / 'profile.json'}")
    assert sandboxes(start, *options) == {"python": "landlock", "container": "off"}

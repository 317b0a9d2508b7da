"""Images that are built without Docker, and containers of them, by the programs that ``make test-image`` unpacks."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE

TOOLS = ROOT / ".cache" / "image"
LAYERS = TOOLS / "layers"
MOST_LAYERS = 100
"""Layers of former builds that are kept; the first build makes about ten, and one of changed code half as many."""
DEBIAN = "docker.io/library/debian:bookworm-slim"
CERTIFICATES = "/run/certificates.crt"

MASKED = ["acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats"]
READ_ONLY = ["bus", "fs", "irq", "sys", "sysrq-trigger"]
"""Parts of /proc that Docker hides, and keeps from being written, without ``systempaths=unconfined``."""


def output_of(*command: str | Path, folder: Path = ROOT) -> str:
    """Return the output of a command; it must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Builder:
    """Images, whose layers are kept for the next build, and what is mounted in a folder."""

    folder: Path

    def buildah(self, *arguments: str | Path) -> str:
        return output_of("buildah", "--root", LAYERS, "--runroot", self.folder / "mounted", *arguments).strip()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remove the containers at the end of a block, and the layers if there are too many."""
        try:
            yield
        finally:
            self.buildah("umount", "--all")
            self.buildah("rm", "--all")
            if len(self.buildah("images", "--all", "--quiet").split()) > MOST_LAYERS:
                shutil.rmtree(LAYERS)

    def base(self) -> None:
        """Make the image that `deploy/Dockerfile` begins with, from the packages of Debian, unless it is kept."""
        if self.buildah("images", "--quiet", "--filter", f"reference={DEBIAN}"):
            return
        container = self.buildah("from", "scratch")
        self.buildah("add", "-q", container, TOOLS / "debian.tar", "/")
        self.buildah("commit", "-q", "--rm", container, DEBIAN)

    def build(self, target: str) -> Image:
        """Build a stage of `deploy/Dockerfile`, with the settings that pip has here."""
        mounted = ["--volume", f"{self._pip()}:/etc/pip.conf:ro"]
        if certificates := self._chosen().get("cert"):
            mounted += ["--volume", f"{certificates}:{CERTIFICATES}:ro"]
        deploy = ROOT / "deploy"
        files: list[str | Path] = ["--ignorefile", deploy / "Dockerfile.dockerignore", "--file", deploy / "Dockerfile"]
        how = ["--quiet", "--format", "docker", "--isolation", "chroot", "--pull-never", "--layers", *mounted]
        self.buildah("bud", *how, *files, "--target", target, "--tag", target, ROOT)
        container = self.buildah("from", "--pull-never", target)
        inspected = json.loads(self.buildah("inspect", container))
        return Image(Path(self.buildah("mount", container)), inspected["Docker"]["config"])

    def _pip(self) -> Path:
        file = self.folder / "pip.conf"
        chosen = self._chosen() | ({"cert": CERTIFICATES} if "cert" in self._chosen() else {})
        file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in chosen.items())]))
        return file

    @staticmethod
    def _chosen() -> dict[str, str]:
        """Return pip's settings of this machine about indexes on the network."""
        listed = output_of(sys.executable, "-m", "pip", "config", "list").splitlines()
        pairs = (line.partition("=")[::2] for line in listed)
        chosen = {name.rpartition(".")[2]: value.strip("'\"") for name, value in pairs}
        names = ("cert", "extra-index-url", "index-url", "trusted-host")
        return {name: chosen[name] for name in names if name in chosen and "file:" not in chosen[name]}


@dataclass(frozen=True)
class Image:
    """An image: its files, and how it runs by default."""

    files: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Container:
    """A container that runs, on the network of the machine."""

    bundle: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.bundle / "log").read_text()

    def execute(self, *command: str) -> str:
        return output_of(*self._runc, "exec", self.bundle.name, *command)

    def wait_until_healthy(self, check: Sequence[str]) -> None:
        """Call the image's health check until it passes."""
        until = time.monotonic() + PATIENCE
        while subprocess.run(
            [*self._runc, "exec", self.bundle.name, *check], capture_output=True, check=False
        ).returncode:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < until, self.log
            time.sleep(0.2)

    def stop(self) -> int:
        """Send it SIGTERM, and return its exit status."""
        if self.process.poll() is None:
            output_of(*self._runc, "kill", self.bundle.name, "TERM")
        return self.process.wait(PATIENCE)

    def remove(self) -> None:
        subprocess.run([*self._runc, "delete", "--force", self.bundle.name], capture_output=True, check=False)
        self.process.wait(PATIENCE)

    @cached_property
    def _runc(self) -> tuple[str, ...]:
        return ("runc", "--root", str(self.bundle.parent / "running"))


@contextmanager
def running(
    image: Image,
    bundle: Path,
    service: Mapping[str, Any],
    command: Sequence[str],
    mounts: Mapping[Path, str],
    environment: Mapping[str, str],
) -> Iterator[Container]:
    """Run a container with the limits of a service of `deploy/compose.yaml`, or of one that is like it."""
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(_specified(image, service, command, mounts, environment)))
    with (bundle / "log").open("wb") as log:
        process = subprocess.Popen(
            ["runc", "--root", bundle.parent / "running", "run", "--bundle", bundle, bundle.name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    container = Container(bundle, process)
    try:
        yield container
    finally:
        container.remove()


def _specified(
    image: Image,
    service: Mapping[str, Any],
    command: Sequence[str],
    mounts: Mapping[Path, str],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return the specification that Docker hands to runc for these options."""
    options = dict(option.replace(":", "=", 1).split("=", 1) for option in service["security_opt"])
    user, group = map(int, image.config["User"].split(":"))
    confined = "systempaths" not in options
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
        "maskedPaths": [f"/proc/{name}" for name in MASKED if confined],
        "readonlyPaths": [f"/proc/{name}" for name in READ_ONLY if confined],
    }
    if "seccomp" in options:
        linux["seccomp"] = json.loads(Path(ROOT / "deploy" / options["seccomp"]).read_text())
    assert service["cap_drop"] == ["ALL"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": group},
            "args": list(command),
            "env": [*image.config["Env"], *(f"{name}={value}" for name, value in environment.items())],
            "cwd": image.config["WorkingDir"],
            "noNewPrivileges": options["no-new-privileges"] == "true",
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted")},
        },
        "root": {"path": str(image.files), "readonly": service["read_only"]},
        "hostname": "penstock",
        "mounts": [
            _mount("/proc", "proc"),
            _mount("/dev", "tmpfs", "mode=755"),
            _mount("/dev/pts", "devpts", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
            _mount("/dev/shm", "tmpfs", "noexec", "mode=1777"),
            _mount("/sys", "sysfs", "ro"),
            *(_mount(path, "tmpfs", *kept.split(",")) for path, kept in (line.split(":") for line in service["tmpfs"])),
            *(_mount(inside, "bind", "rbind", source=str(outside)) for outside, inside in mounts.items()),
        ],
        "linux": linux,
    }


def _mount(path: str, kind: str, *options: str, source: str = "none") -> dict[str, Any]:
    return {"destination": path, "type": kind, "source": source, "options": [*options, "nosuid"]}

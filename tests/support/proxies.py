"""Real proxies with the configurations of deploy/proxies; the programs are those that ``make test-deploy`` unpacks."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from tests.support.api_clients import ApiClient
from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port

TOOLS = ROOT / ".cache/deploy"
CONFIGURATIONS = ROOT / "deploy/proxies"
NAME = "llm.example.com"
"""The name of the server in all configurations."""
CLIENT = "127.0.0.9"
"""The address from which clients of a proxy come."""

PROGRAMS = {
    "nginx": TOOLS / "nginx/usr/sbin/nginx",
    "caddy": TOOLS / "caddy/bin/caddy",
    "envoy": TOOLS / "envoy/envoy/_bin/envoy",
}
UNPACKED = [name for name, program in PROGRAMS.items() if program.exists()]


def filled(file: str, *replaced: tuple[str, str | Path]) -> str:
    """Return a configuration of deploy/proxies, with places of the test in place of those of a real machine."""
    text = (CONFIGURATIONS / file).read_text()
    for ours, theirs in replaced:
        assert ours in text, f"{file} does not name {ours}"
        text = text.replace(ours, str(theirs))
    return text


def _nginx(folder: Path, upstream: str, port: int) -> list[str | Path]:
    server = filled(
        "nginx.conf",
        (f"/etc/nginx/{NAME}.crt", folder / "crt"),
        (f"/etc/nginx/{NAME}.key", folder / "key"),
        ("127.0.0.1:8000", upstream),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("/var/log/nginx/penstock.log", folder / "log"),
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    main = f"daemon off; pid {folder}/pid; error_log stderr; events {{}} http {{ {paths} {server} }}"
    (folder / "nginx.conf").write_text(main)
    return [PROGRAMS["nginx"], "-p", folder, "-e", "stderr", "-c", folder / "nginx.conf"]


def _caddy(folder: Path, upstream: str, port: int) -> list[str | Path]:
    own = f"{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls {folder / 'crt'} {folder / 'key'}"
    server = filled("Caddyfile", ("127.0.0.1:8000", upstream), (f"\n{NAME} {{", f"\n{own}"))
    (folder / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{server}")
    return [PROGRAMS["caddy"], "run", "--adapter", "caddyfile", "--config", folder / "Caddyfile"]


def _envoy(folder: Path, upstream: str, port: int) -> list[str | Path]:
    host, _, number = upstream.partition(":")
    server = filled(
        "envoy.yaml",
        (f"/etc/envoy/{NAME}.crt", folder / "crt"),
        (f"/etc/envoy/{NAME}.key", folder / "key"),
        ("address: 127.0.0.1, port_value: 8000", f"address: {host}, port_value: {number}"),
        ("address: 0.0.0.0, port_value: 443", f"address: 127.0.0.1, port_value: {port}"),
    )
    (folder / "envoy.yaml").write_text(server)
    options = ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"]
    return [PROGRAMS["envoy"], "-c", folder / "envoy.yaml", *options]


COMMANDS: dict[str, Callable[[Path, str, int], list[str | Path]]] = {"nginx": _nginx, "caddy": _caddy, "envoy": _envoy}


class _Here(AbstractResolver):
    """A resolver that finds every name on this machine."""

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": 2, "proto": 0, "flags": 0}]

    async def close(self) -> None:
        pass


def make_certificate(folder: Path) -> None:
    """Make a certificate of `NAME` and its key."""
    options = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={NAME}")
    names = ("-addext", f"subjectAltName=DNS:{NAME}")
    files = ("-keyout", folder / "key", "-out", folder / "crt")
    subprocess.run(["openssl", "req", *options, *names, *files], check=True, capture_output=True)


@asynccontextmanager
async def running_proxy(name: str, upstream: str, folder: Path) -> AsyncGenerator[ApiClient, None]:
    """Run a proxy before the server at the URL ``upstream`` for the length of a block; yield a client of the proxy."""
    make_certificate(folder)
    port = free_port()
    command = COMMANDS[name](folder, upstream.removeprefix("http://"), port)
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *map(str, command), stdout=log, stderr=log, env=environment, cwd=folder
        )
    try:
        await _wait_for(port, process, folder / "log")
        tls = ssl.create_default_context(cafile=str(folder / "crt"))
        connector = aiohttp.TCPConnector(ssl=tls, resolver=_Here(), local_addr=(CLIENT, 0), limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield ApiClient(f"https://{NAME}:{port}", session)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE)


async def _wait_for(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(PATIENCE):
        while process.returncode is None:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"the proxy has ended: {await asyncio.to_thread(log.read_text, errors='replace')}")

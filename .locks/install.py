"""Install packages into the environment of this Python: ``python .locks/install.py ARGUMENTS OF PIP INSTALL``.

uv installs in seconds what takes pip minutes.  It gets the places and certificates with which pip is configured, so one
configuration holds for both.  PyTorch's CPU build is not on the default package index, and uv knows its address:
``--torch-backend cpu`` installs it from there, unless the caller has named places.  Where uv fails, pip installs.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

UV = "uv==0.13.9"
PLACES = ("extra-index-url", "find-links", "no-index")
"""The settings of pip that name places for packages that the index lacks."""
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""The options of uv for settings of pip that have values."""
SECTIONS = ("global", "install", ":env:")
"""The sections of pip's settings, each of which overrides those before it."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def settings_of_pip() -> dict[str, str]:
    """Return pip's settings: those of its files, and over them those of the environment."""
    listed = subprocess.run((*PIP, "config", "list"), capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        found.get(section, {})[name] = str(ast.literal_eval(value))
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def options_of_uv(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield uv's options for pip's settings."""
    for name, option in OPTIONS.items():
        for value in settings.get(name, "").split():
            yield from (option, value)
    if settings.get("no-index", "0").lower() not in ("0", "false", "no"):
        yield "--no-index"
    if "extra-index-url" in settings:
        yield from ("--index-strategy", "unsafe-best-match")  # as pip chooses: the best version of all places


def main() -> int:
    """Install, and return the status of the installer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch-backend")
    options, arguments = parser.parse_known_args()
    if has_uv() and with_uv(arguments, options.torch_backend) == 0:
        return 0
    return subprocess.run((*PIP, "install", "-qq", *arguments), check=False).returncode


def has_uv() -> bool:
    """Install uv, and return True if it is there."""
    with suppress(PackageNotFoundError):
        if version("uv") == UV.removeprefix("uv=="):
            return True  # pip needs seconds to see that
    return subprocess.run((*PIP, "install", "-qq", UV), check=False).returncode == 0


def with_uv(arguments: list[str], torch_backend: str | None) -> int:
    """Install with uv, and return its status."""
    options, environment = options_for_uv(torch_backend)
    command = (sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable)
    return subprocess.run((*command, *options, *arguments), env=environment, check=False).returncode


def options_for_uv(torch_backend: str | None) -> tuple[list[str], dict[str, str]]:
    """Return uv's options for the settings of pip, with PyTorch's own index, and uv's environment."""
    settings, environment = settings_of_pip(), dict(os.environ)
    options = list(options_of_uv(settings))
    if torch_backend and not any(name in settings for name in PLACES):
        options += ("--torch-backend", torch_backend)
    if "cert" in settings:
        environment.setdefault("SSL_CERT_FILE", settings["cert"])
    return options, environment


if __name__ == "__main__":
    sys.exit(main())

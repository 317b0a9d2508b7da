"""The files of a model that this process would load, looked at before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.pipeline.errors import CannotStart

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
"""The ends of the names of files of weights."""

_FORMATS: Final = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "pt", "mistral", "gguf", "bitsandbytes"})
"""The formats of vLLM's ``--load-format`` that need such files in the folder of the model."""


def model_files(model: str, options: Sequence[str] = ()) -> str:
    """Describe the files of a model; raise `CannotStart` if vLLM could not load them with its ``options``."""
    path = Path(model)
    if path.is_file():
        return f"{_gibibytes([path])} of weights in {path}"
    if path.is_dir():
        return _in_folder(path, options)
    if path.is_absolute() or model.startswith((".", "~")) or (model.count("/") > 1 and ":" not in model):
        raise CannotStart(f"{model}: there is no such folder")
    cached = _in_cache(model)
    weights = _weights(cached) if cached else []
    if not weights:
        return f"{model} is downloaded when the server starts"
    return f"{_gibibytes(weights)} of weights in {cached}"


def _in_folder(folder: Path, options: Sequence[str]) -> str:
    weights = _weights(folder)
    if not weights and _value("load-format", options, "auto") in _FORMATS:
        raise CannotStart(f"{folder}: there are no weights in {folder}")
    named = _value("hf-config-path", options) or any(file.suffix == ".gguf" for file in weights)
    if not named and not (folder / "params.json").exists():
        _check_config(folder / "config.json")
    return f"{_gibibytes(weights)} of weights in {folder}"


def _check_config(file: Path) -> None:
    """Raise `CannotStart` if a config does not say which model it is for."""
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise CannotStart(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise CannotStart(f"{file}: it is no JSON") from error
    if not isinstance(config, dict) or not ({"model_type", "architectures"} & config.keys()):
        raise CannotStart(f"{file}: it has neither model_type nor architectures")


def _value(option: str, options: Sequence[str], default: str = "") -> str:
    """Return the last value of an option of vLLM, which may be typed with underscores, and with ``=``."""
    found = default
    for at, typed in enumerate(options):
        name, equals, value = typed.partition("=")
        if name.replace("_", "-") == f"--{option}":
            found = value if equals else next(iter(options[at + 1 : at + 2]), default)
    return found


def _weights(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.suffix in WEIGHTS]


def _gibibytes(files: Sequence[Path]) -> str:
    return f"{sum(file.stat().st_size for file in files) / 2**30:.1f} GiB"


def _in_cache(model: str) -> Path | None:
    """Return the folder of a downloaded model, which may lack files; None if there is none."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - it comes with vLLM
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):  # the address of a bucket is no name, too
        return None

"""The outputs in mlx-lm's own tests of its parsers of calls, and what the parsers make of them.

The tests run in a process of their own, under the plug-in `mlx_recorder`.  They need no MLX.  A parser gets what stands
between the marks of its calls, and says nothing of other texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.oracles.case import Case, Reading, model_of, numbered, tool_of
from tests.oracles.recorded import recorded, run_recorded
from tests.oracles.sources import MLX

FAMILIES = {
    "function_gemma": "functiongemma",
    "gemma4": "gemma4",
    "glm47": "glm45",
    "json_tools": "hermes",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "longcat": "longcat",
    "minicpm5": "minicpm5",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "muse_spark": "muse_glimmer",
    "pythonic": "lfm2",
    "qwen3_coder": "qwen3_coder",
}
"""The family of each parser."""


def cases() -> Iterator[Case]:
    """Yield each output with the marks of its calls."""
    found = _records()
    names = numbered(f"{each['parser']} {each['test'].rpartition('::')[2]}" for each in found)
    for each, name in zip(found, names, strict=True):
        family = FAMILIES[each["parser"]]
        yield Case(
            oracle="mlx-lm",
            family=family,
            name=name,
            text=_marked(each["text"], *each["marks"]),
            expected=(Reading(None, None, tuple(map(tuple, each["calls"]))),),
            chat=model_of((None, family)),
            tools=tuple(map(tool_of, each["tools"])),
        )


def _marked(text: str, start: str, end: str) -> str:
    """Return the text as the model writes it: the marks that a test leaves out are those that the server strips."""
    is_whole = text.lstrip().startswith(start.split(maxsplit=1)[0])  # as a mark that names the function
    return text if is_whole else f"{start}{text}{end}"


def _records() -> list[dict[str, Any]]:
    """Run mlx-lm's tests, once for a release, and return what each has shown."""
    kept = recorded(MLX, "mlx_recorder")
    if kept is None:
        folder = MLX.folder()
        paths = f"{Path(__file__).parent}:{folder}"
        run_recorded(MLX, "mlx_recorder", folder, {"PYTHONPATH": paths}, "tests/test_tool_parsing.py")
        kept = recorded(MLX, "mlx_recorder")
        assert kept is not None
    return kept

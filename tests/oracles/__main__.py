"""Compare how penstock reads the output of chat models with what the tests of other servers say.

So are the parsers that their chat templates select (``templates.toml``), and the prompts that penstock renders with
them (``rendering.toml``).  A difference needs an explanation in ``differences.toml``, and an explanation needs a
difference.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from tests.oracles import llama_cpp_tests, mlx_tests, rendering, sglang_detectors, templates, vllm_tests
from tests.oracles.case import Case, Reading
from tests.oracles.sources import CACHE, LLAMA_CPP, MLX, SGLANG, VLLM

ORACLES = {
    "vllm": f"vLLM {VLLM.version}",
    "llama.cpp": f"llama-cpp-python {LLAMA_CPP.version}",
    "sglang": f"SGLang {SGLANG.version}",
    "mlx-lm": f"mlx-lm {MLX.version}",
}
"""The oracles, and their releases."""
RENDERER = "vllm-rs"
"""The oracle of prompts: see `rendering`."""
VERDICTS = ("ours", "theirs", "arguable")
DIFFERENCES = Path(__file__).with_name("differences.toml")
COUNTS = Path(__file__).with_name("counts.csv")
REPORT = CACHE / "report.json"
BROKEN = CACHE / "broken.json"

Key: TypeAlias = tuple[str, str, str]
"""An oracle, a family, and the name of a case."""


def main() -> int:
    """Print the tables, write the reports, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make oracles ARGS=", description=__doc__)
    parser.add_argument("--oracle", choices=(*ORACLES, RENDERER), help="this one alone")
    parser.add_argument("--family", help="this family alone; of vllm-rs, the templates whose names contain this")
    parser.add_argument("--write", action="store_true", help=f"write {COUNTS.name}, for the page of parsers")
    only = parser.parse_args()
    is_whole = not (only.oracle or only.family)
    if only.write and not is_whole:
        parser.error("--write needs all oracles and families")
    warnings.simplefilter("ignore")  # vLLM's imports warn, and its parsers log what they cannot read
    logging.disable()
    is_right = only.oracle == RENDERER or _compare_outputs(only.oracle, only.family, writes=only.write)
    if is_whole or only.oracle == RENDERER:
        lines, is_explained = rendering.report(only.family or "")
        print(*lines, sep="\n")
        is_right = is_right and is_explained
    return int(not is_right)


def _compare_outputs(oracle: str | None, family: str | None, *, writes: bool) -> bool:
    """Print the table of outputs, and return True if it is as it should be."""
    known = {
        key: verdict for key, verdict in explanations().items() if oracle in (None, key[0]) and family in (None, key[1])
    }
    counts: dict[str, Counter[str]] = {}
    unexplained, gone, broken = [], [], []
    for case in _cases(oracle, family):
        key = (case.oracle, case.family, case.name)
        seen = case.seen()
        agrees = len(seen) == 1 and case.accepts(seen[0])
        verdict = known.pop(key, "")
        if agrees and verdict:
            gone.append(key)
        if not agrees and not verdict:
            unexplained.append(described(case, seen))
        if arguments := case.broken() if case.oracle != "sglang" else []:  # its outputs are those of the others
            broken.append({"oracle": case.oracle, "family": case.family, "case": case.name, "arguments": arguments})
        count = counts.setdefault(case.family, Counter())
        count.update([case.oracle, "agree" if agrees else verdict or "unexplained"])
    print(*_table(counts), sep="\n")
    REPORT.write_text(json.dumps(unexplained, indent=1, ensure_ascii=False))
    BROKEN.write_text(json.dumps(broken, indent=1, ensure_ascii=False))
    print(f"{len(unexplained)} unexplained differences: {REPORT}")
    print(f"{len(broken)} outputs with a completed call whose arguments are no JSON object: {BROKEN}")
    for key in (*gone, *known):
        print(f"{DIFFERENCES.name} explains a difference that is none: {key}")
    is_right = not (unexplained or broken or gone or known)
    return is_right and (oracle is not None or family is not None or _are_as_written(counts, writes=writes))


def _are_as_written(counts: dict[str, Counter[str]], *, writes: bool) -> bool:
    """Print what is wrong with the templates and the file of counts; return True if nothing is."""
    wrong = list(templates.unexplained())
    print(*wrong, f"{len(wrong)} templates that are not read as {templates.DATA.name} says", sep="\n")
    for name, reason in sglang_detectors.WITHOUT_CASES.items():
        print(f"SGLang's detector {name} has no cases: {reason}")
    unlisted = list(sglang_detectors.unlisted())
    print(*unlisted, sep="\n")
    if writes:
        COUNTS.write_text(_as_csv(counts))
    if is_old := COUNTS.read_text() != _as_csv(counts):
        print(f"{COUNTS.name} has other counts: --write writes them, and test_parsers_page.py --regen the page")
    return not (wrong or unlisted or is_old)


def _cases(oracle: str | None, family: str | None) -> Iterator[Case]:
    stated = {"vllm": vllm_tests.cases, "llama.cpp": llama_cpp_tests.cases}
    wanted = (name for name in stated if oracle in (None, "sglang", name))
    cases = [case for name in wanted for case in stated[name]() if family in (None, case.family)]
    if oracle in (None, "sglang"):
        cases += sglang_detectors.cases(cases)
    if oracle in (None, "mlx-lm"):
        cases += (case for case in mlx_tests.cases() if family in (None, case.family))
    yield from (case for case in cases if oracle in (None, case.oracle))


def explanations() -> dict[Key, str]:
    """Return the verdict of each difference that has one."""
    found: dict[Key, str] = {}
    for each in tomllib.loads(DIFFERENCES.read_text()).get("difference", ()):
        assert each["verdict"] in VERDICTS
        assert each["reason"]
        for name in each["cases"]:
            key = (each["oracle"], each["family"], name)
            assert key not in found, key
            found[key] = each["verdict"]
    return found


def described(case: Case, seen: Iterable[Reading]) -> dict[str, Any]:
    """Return all that one needs to see a difference."""
    return {
        "family": case.family,
        "oracle": case.oracle,
        "case": case.name,
        "parsers": case.chat.parser_names if case.chat else ("harmony",),
        "text": case.text,
        "prompt_end": case.prompt[-300:],
        "variables": dict(case.variables),
        "tools": [{"name": tool.name, "parameters": tool.parameters} for tool in case.tools],
        "reason": case.reason,
        "expected": [asdict(each) for each in case.expected],
        "seen": [asdict(each) for each in seen],
    }


def _table(counts: dict[str, Counter[str]]) -> Iterator[str]:
    columns = (*ORACLES, "agree", *VERDICTS, "unexplained")
    yield f"{'family':20s}" + "".join(f"{column:>12s}" for column in columns)
    total = Counter[str]()
    for family, count in sorted(counts.items()):
        total.update(count)
        yield f"{family:20s}" + "".join(f"{count[column] or '':>12}" for column in columns)
    yield f"{'all':20s}" + "".join(f"{total[column]:12d}" for column in columns)


def _as_csv(counts: Mapping[str, Counter[str]]) -> str:
    """Return the table for the page: what is not explained counts as ours."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("family", *ORACLES.values(), "agree", *VERDICTS))
    for family, count in sorted(counts.items()):
        known = count + Counter(ours=count["unexplained"])
        rows.writerow((family, *(known[each] for each in (*ORACLES, "agree", *VERDICTS))))
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())

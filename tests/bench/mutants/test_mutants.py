from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.mutants.choose import PER_FOLDER, PER_FUNCTION, Mutant, chosen, mutants_of, mutated, product

ROOT = Path(__file__).parents[3]

SAMPLE = '''
"""A sample."""

import logging
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from sample import Shape

logger = logging.getLogger(__name__)
LIMIT = 10 + 1


class Sample:
    """A class."""

    size: int = 3

    def read(self, at: "int | None" = 7) -> str:
        """Read."""
        assert at != 5
        logger.warning("at %s", at + 1)
        self.at: "int | str" = cast("int | str", at)
        if isinstance(at, int | str):
            return f"text {self.at}"
        raise ValueError(at)  # noqa: TRY004


def total(numbers: list[int]) -> int:
    """Add."""
    result = 0
    for number in numbers[: len(numbers)]:
        if number < 0 or not number:
            continue
        result += number * 2
    return result
'''

READ = {"isinstance(at, int | str) -> not isinstance(at, int | str)", "return f'text {self.at}' -> return ''"}
TOTAL = {
    "0 -> 1",
    "2 -> 3",
    "len(numbers) -> len(numbers) + 1",
    "number < 0 or not number -> not (number < 0 or not number)",
    "number < 0 or not number -> number < 0 and (not number)",
    "number < 0 -> number <= 0",
    "not number -> number",
    "continue -> break",
    "result += number * 2 -> result -= number * 2",
    "result += number * 2 -> pass",
    "number * 2 -> number // 2",
    "return result -> return 0",
}
CHANGES = {
    "x = 1.5": {"1.5 -> 2.5"},
    "x = True": {"True -> False"},
    "x = 'a'": {"'a' -> 'a~'"},
    "x = b'a'": {"b'a' -> b'a~'"},
    "x = a if b else c": {"b -> not b"},
    "x = b[: len(a)]": {"len(a) -> len(a) + 1"},
    "x = [a for a in b if a]": {"a -> not a"},
    "x = a == b": {"a == b -> a != b"},
    "x = a < b <= c": {"a < b <= c -> a <= b <= c", "a < b <= c -> a < b < c"},
    "x = a ** b": set(),
    "x = None": set(),
    "x = b[a:]": {"a: -> a + 1:"},
    "x[a] = b": {"x[a] = b -> pass"},
    "del x": {"del x -> pass"},
    "await x": {"await x -> pass"},
    "return": set(),
    "return None": set(),
    "assert_never(x)": set(),
    "x = 1  # pragma: no cover": set(),
    "match x:\n        case {'a': 1} if b:\n            pass": {"b -> not b"},
}


def changes(source: str, function: str = "") -> set[str]:
    return {f"{mutant.old} -> {mutant.new}" for mutant in of(source) if function in mutant.function}


def of(source: str, path: str = "stages/parse/sample.py") -> list[Mutant]:
    return list(mutants_of(source, "parse", path))


@pytest.fixture(scope="module")
def everything() -> list[Mutant]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return product(Path())


def test_functions_are_mutated_and_all_else_is_left_alone() -> None:
    assert {mutant.function for mutant in of(SAMPLE)} == {"Sample.read", "total"}
    assert changes(SAMPLE, "Sample.read") == READ
    assert changes(SAMPLE, "total") == TOTAL


@pytest.mark.parametrize("statement", CHANGES)
def test_each_kind_of_node_has_its_changes(statement: str) -> None:
    assert changes(f"async def f():\n    {statement}\n") == CHANGES[statement]


@pytest.mark.parametrize(
    ("returns", "expected"),
    [("str | None", "None"), ("dict[str, int]", "{}"), ("tuple[int, ...]", "()"), ("bool", "not x"), ("Shape", "None")],
)
def test_returned_value_is_replaced_by_the_empty_one_of_its_type(returns: str, expected: str) -> None:
    assert changes(f"def f(x) -> {returns}:\n    return x\n") == {f"return x -> return {expected}"}


def test_every_mutant_compiles_and_differs_from_the_source_and_from_the_others() -> None:
    mutants = of(SAMPLE)
    trees = [mutated(SAMPLE, mutant) for mutant in mutants]
    for tree in trees:
        compile(tree, "sample.py", "exec")
    assert len({ast.unparse(tree) for tree in trees} | {ast.unparse(ast.parse(SAMPLE))}) == len(mutants) + 1


def test_chosen_mutants_of_the_product_compile_and_differ(everything: list[Mutant]) -> None:
    for mutant in chosen(everything, 2):
        source = (ROOT / mutant.path).read_text("utf-8")
        tree = mutated(source, mutant)
        compile(tree, mutant.path, "exec")
        assert ast.unparse(tree) != ast.unparse(ast.parse(source))


def test_ids_survive_new_lines_and_new_names_of_modules() -> None:
    moved = "# A line.\n\n" + SAMPLE.replace("def total", "def another() -> None:\n    return\n\n\ndef total")
    assert [mutant.id for mutant in of(moved, "stages/parse/renamed.py")] == [mutant.id for mutant in of(SAMPLE)]


def test_mutants_that_are_alike_are_numbered_in_their_function() -> None:
    source = "def f():\n    return g(0, 0)\n\ndef h():\n    return g(0)\n"
    assert [mutant.id for mutant in of(source) if mutant.kind == "constant"] == [
        "parse f: 0 -> 1 #0",
        "parse f: 0 -> 1 #1",
        "parse h: 0 -> 1 #0",
    ]
    assert "g(0, 1)" in ast.unparse(mutated(source, of(source)[2]))


def test_ids_are_unique_in_the_product(everything: list[Mutant]) -> None:
    assert max(Counter(mutant.id for mutant in everything).values()) == 1


def test_choice_is_spread_over_folders_kinds_and_functions(everything: list[Mutant]) -> None:
    choice = chosen(everything)
    of_folder = Counter(mutant.folder for mutant in choice)
    assert set(of_folder.values()) == {PER_FOLDER}
    for folder in of_folder:
        assert len({mutant.kind for mutant in choice if mutant.folder == folder}) >= 5
    assert max(Counter((mutant.path, mutant.function) for mutant in choice).values()) <= PER_FUNCTION


def test_choice_depends_on_the_seed_alone(everything: list[Mutant]) -> None:
    assert chosen(everything) == chosen(everything[::-1])
    assert chosen(everything) != chosen(everything, seed=1)


TOY = """
def least(numbers):
    best, at = numbers[0], 0
    while at < len(numbers):
        if numbers[at] < best:
            best = numbers[at]
        at += 1
    return best
"""
TOY_TESTS = """
import toy

def test_one():
    assert toy.least([2]) == 2

def test_three():
    assert toy.least([2, 1, 3]) == 1

def test_wrong():
    assert toy.least([1]) == 2
"""
TOY_TRIALS = """
import json
import sys
from collections import deque
from pathlib import Path
from tests.bench.mutants import judge
from tests.bench.mutants.choose import mutants_of

groups = [["test_toy.py::test_one"], ["test_toy.py::test_three"]]
mutants = {mutant.id: mutant for mutant in mutants_of(Path("toy.py").read_text(), "parse", "toy.py")}
trials = [judge.Trial(name, mutants[name], groups) for name in sys.argv[2:]]
trials.append(judge.Trial("the product", None, [["test_toy.py::test_three", "test_toy.py::test_wrong"]]))
found = dict(judge.verdicts(deque(trials), {}, 2))
judge.LEAST = 2.0
found |= judge.verdicts(deque([judge.Trial("endless", mutants[sys.argv[1]], groups)]), {}, 1)
print(json.dumps({name: [verdict.outcome, *verdict.tests] for name, verdict in found.items()}))
"""


def test_verdicts_on_a_toy_are_killed_timed_out_or_survived(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TOY_TESTS)
    expected = {
        "parse least: return best -> return None #0": ["killed", "test_toy.py::test_one"],
        "parse least: numbers[at] < best -> not numbers[at] < best #0": ["killed", "test_toy.py::test_three"],
        "parse least: numbers[at] < best -> numbers[at] <= best #0": ["survived"],
        "the product": ["killed", "test_toy.py::test_wrong"],
        "endless": ["timed out", "test_toy.py::test_one"],
    }
    command = [sys.executable, "-c", TOY_TRIALS, "parse least: at += 1 -> pass #0", *list(expected)[:3]]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == expected


def test_warm_process_imports_nothing_of_the_product() -> None:
    program = "import tests.bench.mutants.__main__, tests.bench.mutants.judge as judge; judge.warm()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("place", ["stages/emit/emit.py", "api/http/sse.py", "stages/persist.py"])
def test_module_of_the_product_is_loaded_with_its_mutant(place: str) -> None:
    """The finder knows a module by its file, whatever its name is when it is imported."""
    program = f"""
import sys
from importlib import import_module
from pathlib import Path
from tests.bench.mutants.choose import mutants_of
from tests.bench.mutants.judge import MutatingFinder, MutatingLoader
mutant = next(iter(mutants_of(Path({place!r}).read_text(), "any", {place!r})))
sys.meta_path.insert(0, MutatingFinder(mutant))
module = import_module("penstock." + {place!r}.removesuffix(".py").replace("/", "."))
assert isinstance(module.__loader__, MutatingLoader)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)

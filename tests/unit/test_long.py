"""The list of long tests."""

from pathlib import Path

from tests.support.long import MANY, OF_STORES, STAYING, STEP, long_tests
from tests.support.paths import ROOT


def test_every_rule_of_a_long_test_stays_in_a_short_one() -> None:
    for path, staying in STAYING.items():
        assert (ROOT / path).exists()
        assert (ROOT / staying).exists()
        assert not {staying, *(parent.as_posix() for parent in Path(staying).parents)} & STAYING.keys()


def test_test_on_postgresql_is_long_unless_it_is_of_the_store() -> None:
    ids = [
        f"{path}::test_x[{store}]"
        for path in ("tests/flow/a.py", f"{OF_STORES}/a.py")
        for store in ("sqlite", "postgres")
    ]
    assert long_tests(ids) == {"tests/flow/a.py::test_x[postgres]"}


def test_some_variants_of_each_test_stay() -> None:
    few, many = (
        [f"tests/a.py::{name}[{number}]" for number in range(count)]
        for name, count in (("few", MANY - 1), ("many", MANY))
    )
    long = long_tests([*few, *many])
    assert long.isdisjoint(few)
    assert len(many) - len(long) == MANY / STEP

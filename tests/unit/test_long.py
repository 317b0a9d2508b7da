"""The list of long tests."""

from pathlib import Path

from tests.support.long import STAYING
from tests.support.paths import ROOT


def test_every_rule_of_a_long_test_stays_in_a_short_one() -> None:
    for path, staying in STAYING.items():
        assert (ROOT / path).exists()
        assert (ROOT / staying).exists()
        assert not {staying, *(parent.as_posix() for parent in Path(staying).parents)} & STAYING.keys()

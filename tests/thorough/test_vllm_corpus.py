"""vLLM's own tests as a reference: penstock makes of each output what vLLM makes of it, or a table says why not.

``SDIST_OF_VLLM`` names the folder of vLLM's unpacked sdist.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from penstock.stages.models.chat.parsers import UnknownParser
from tests.thorough.differences import BY_DESIGN, DEFECTS, UNREAD
from tests.thorough.vllm_corpus import Case, model_of, recorded_cases

pytestmark = [pytest.mark.vllm, pytest.mark.io, pytest.mark.slow]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Cases that can be read here."""
    found = recorded_cases(Path(os.environ["SDIST_OF_VLLM"]), tmp_path_factory.mktemp("vllm"))
    assert len(found) > 1500
    unread = {case.names for case in found if not starts(case)}
    assert unread == UNREAD.keys()
    return [case for case in found if case.names not in unread]


def starts(case: Case) -> bool:
    try:
        model_of(case.parsers)
    except UnknownParser:
        return False
    return True


def test_outputs_are_read_as_vllm_reads_them(cases: list[Case]) -> None:
    """A difference that is gone must leave the table, and so must a test that vLLM no longer has."""
    known = Counter[tuple[str, str]]()
    for table in (BY_DESIGN, DEFECTS):
        for outputs in table.values():
            known.update(outputs)
    found = Counter((case.names, case.test) for case in cases if not case.agrees())
    assert (dict(found - known), dict(known - found)) == ({}, {})


def test_sizes_of_chunks_make_no_difference(cases: list[Case]) -> None:
    assert [case.text for case in cases if len({case.read(size=size) for size in (1, 3, 10**6)}) > 1] == []

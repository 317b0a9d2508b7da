"""The load over fake engines: each turn of a conversation goes to one engine, however it is continued."""

from __future__ import annotations

from pathlib import Path

from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.affinity.__main__ import chosen, servers
from tests.bench.affinity.load import TURNS, WAYS, Load
from tests.support.fake_vllm import LIGHT_ANSWER, FakeVllm, running_fakes


async def test_load_goes_to_one_engine_per_conversation(tmp_path: Path) -> None:
    fakes = [FakeVllm(load_encoding().encode_markup(LIGHT_ANSWER), cached_tokens=60) for _ in range(3)]
    async with running_fakes(*fakes), servers([fake.url for fake in fakes], tmp_path) as both:
        load = Load("fakes", both, 2 * len(WAYS), at_once=2)
        with chosen(0) as choice:
            row = await load.run()
    assert choice == "home always"
    assert len(load.prompted) == sum(len(fake.prompts) for fake in fakes) == 2 * len(WAYS) * TURNS
    assert all(len(fake.prompts) % TURNS == 0 for fake in fakes)
    assert {cached for _, _, cached in load.prompted} == {60}
    assert row.startswith("2 | ")

"""Files of vector stores that a killed server was reading: another server reads them, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.extensions.tools.search.vector_stores import StoredVectorStores
from tests.support.server_process import running_process
from tests.support.stores import open_store
from tests.support.vector_stores import uploaded

FILES = 4
TEXT = "\n".join(f"Line {number} of a long report on otters." for number in range(20_000))
ENDING = "The last word is armadillo."


async def test_other_server_goes_on_where_one_was_killed(store_at: str, tmp_path: Path) -> None:
    stale = ("--stale-after", "1")
    async with open_store(store_at) as store:
        files = [await uploaded(store, f"{number}.txt", f"{TEXT}\n{ENDING}") for number in range(FILES)]
    async with open_store(store_at) as store, running_process(store_at, tmp_path, "quick", *stale) as first:
        _, made = await first.post({"file_ids": files}, "/v1/vector_stores")
        one = f"/v1/vector_stores/{made['id']}"
        async with asyncio.timeout(120):
            while not (await store.context.read("select count(*) from vector_store_chunks"))[0][0]:
                await asyncio.sleep(0.01)
        await first.kill()
        assert (await store.part(StoredVectorStores).get(made["id"], "")).counts.of("in_progress")  # type: ignore[union-attr]
        async with running_process(store_at, tmp_path, "quick", *stale) as second, asyncio.timeout(240):
            while (answer := (await second.get(one))[1])["status"] == "in_progress":
                await asyncio.sleep(0.1)
            assert answer["file_counts"] == {
                "in_progress": 0, "completed": FILES, "failed": 0, "cancelled": 0, "total": FILES
            }  # fmt: skip
            ((chunks,),) = await store.context.read("select count(*) from vector_store_chunks")
            listed, _ = await second.get(f"{one}/files")
            assert listed == 200
            found = await store.part(StoredVectorStores).get(made["id"], "")
            assert found
            assert found.counts.chunks == chunks
            _, results = await second.post({"query": "armadillo", "max_num_results": 50}, f"{one}/search")
            assert sorted({result["file_id"] for result in results["data"]}) == sorted(files)
            await second.ask("DELETE", one)
            while (await store.context.read("select count(*) from vector_store_chunks"))[0][0]:
                await asyncio.sleep(0.05)

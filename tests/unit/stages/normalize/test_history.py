from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.pipeline.errors import InvalidRequest, PreviousResponseNotFound, PreviousResponseUnfinished
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.pairs import callers_of
from penstock.pipeline.protocol.response import ResponseStatus
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from tests.support.request_bodies import WEATHER
from tests.support.requests import answer, normalize, store_answer, user_message

THOUGHT = wire.Reasoning("rs_10000", content=(wire.ReasoningText("They ask about weather."),), status="completed")
CALL = wire.FunctionCall("fc_10001", "call_10001", "get_weather", '{"city":"Oslo"}', "completed")
RAIN = {"type": "function_call_output", "call_id": "call_10001", "output": "rain"}


@pytest.mark.defect("V12", "19")
async def test_history_has_all_items_of_the_chain(store: Store) -> None:
    await store_answer(store, "1", THOUGHT, CALL, input="How is Oslo?", tools=[WEATHER])
    second = await store_answer(store, "2", answer("Rain."), previous_response_id="resp_1", input=[RAIN])
    third = await normalize(store, "3", previous_response_id="resp_2", input="And Rome?")
    output = wire.FunctionCallOutput("fco_2i0000", "call_10001", "rain", "completed")
    assert second.history == (user_message("msg_1i0000", "How is Oslo?"), THOUGHT, CALL)
    assert second.facts.input == (output,)
    assert third.history == (*second.history, output, answer("Rain."))
    assert third.facts.input == (user_message("msg_3i0000", "And Rome?"),)
    assert third.facts.response.previous_response_id == "resp_2"


@pytest.mark.defect("46", "V16")
async def test_branches_are_isolated(store: Store) -> None:
    await store_answer(store, "1", answer("Hello."), input="Hi")
    root = (user_message("msg_1i0000", "Hi"), answer("Hello."))
    for name in ("a", "b"):
        branch = await store_answer(store, name, answer(name), previous_response_id="resp_1", input=f"to {name}")
        assert branch.history == root
    for name in ("a", "b"):
        child = await normalize(store, f"{name}1", previous_response_id=f"resp_{name}", input="Go on")
        assert child.history == (*root, user_message(f"msg_{name}i0000", f"to {name}"), answer(name))


@pytest.mark.defect("V11")
async def test_continuation_has_its_own_parameters(store: Store) -> None:
    before: dict[str, Any] = {"instructions": "Rhyme.", "tools": [WEATHER], "reasoning": {"effort": "high"}}
    await store_answer(store, "1", answer("Hello."), input="Hi", temperature=0, metadata={"order": "17"}, **before)
    fresh = (await normalize(store, "2", previous_response_id="resp_1", input="Go on")).facts.response
    assert (fresh.instructions, fresh.tools, fresh.reasoning.effort) == (None, (), None)
    assert (fresh.temperature, fresh.metadata) == (1.0, {})
    other = (
        await normalize(store, "2", previous_response_id="resp_1", input="Go on", instructions="Sing.")
    ).facts.response
    assert other.instructions == "Sing."


async def test_continuation_needs_no_input(store: Store) -> None:
    """The model may go on by itself."""
    await store_answer(store, "1", answer("Hello."), input="Hi")
    resolved = await normalize(store, "2", previous_response_id="resp_1")
    assert resolved.facts.input == ()
    assert len(resolved.history) == 2


@pytest.mark.parametrize("missing", ["resp_0", "", "msg_1"])
async def test_unknown_previous_response_is_refused(store: Store, missing: str) -> None:
    """Clients act on the code of the error."""
    await store_answer(store, "1", answer("Hello."), input="Hi")
    with pytest.raises(PreviousResponseNotFound) as caught:
        await normalize(store, "2", previous_response_id=missing, input="Go on")
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "previous_response_not_found", "previous_response_id")


USER = {"role": "user", "content": "Hi"}
OWN_CALL = {"type": "function_call", "call_id": "call_2", "name": "clock", "arguments": "{}"}
OWN_OUTPUT = {"type": "function_call_output", "call_id": "call_2", "output": "noon"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "call_2", "name": "clock", "input": "now"}
OK = {"type": "exit", "exit_code": 0}
DELETE = {"type": "delete_file", "path": "a"}
LOCAL = {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"], "env": {}}}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "noon"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([RAIN], None),
        ([OWN_CALL, RAIN, OWN_OUTPUT], None),
        ([OWN_OUTPUT], "input[0].call_id"),
        ([USER, RAIN, OWN_OUTPUT], "input[2].call_id"),
        ([OWN_OUTPUT, OWN_CALL], "input[0].call_id"),
        ([CUSTOM_CALL, OWN_CALL, OWN_OUTPUT, CUSTOM_OUTPUT, RAIN], None),
        ([CUSTOM_CALL, OWN_OUTPUT], "input[1].call_id"),
        ([OWN_CALL, CUSTOM_OUTPUT], "input[1].call_id"),
    ],
)
async def test_output_needs_an_earlier_call(store: Store, items: list[Any], param: str | None) -> None:
    await store_answer(store, "1", CALL, input="How is Oslo?")
    if param is None:
        resolved = await normalize(store, "2", previous_response_id="resp_1", input=items)
        assert len(resolved.facts.input) == len(items)
        return
    with pytest.raises(InvalidRequest, match="call_2") as caught:
        await normalize(store, "2", previous_response_id="resp_1", input=items)
    assert caught.value.param == param


SHELL_CALL = {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}}
SHELL_OUTPUT = {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a", "stderr": "", "outcome": OK}]}
PATCH_CALL = {"type": "apply_patch_call", "call_id": "p", "status": "completed", "operation": DELETE}
PATCH_OUTPUT = {"type": "apply_patch_call_output", "call_id": "p", "status": "completed"}
ASYNC_CALL = {**OWN_CALL, "async": True}
LOCAL_OUTPUT = {"type": "function_call_output", "call_id": "l", "output": "a"}


@pytest.mark.parametrize(
    ("call", "output"),
    [
        (OWN_CALL, OWN_OUTPUT),
        (CUSTOM_CALL, CUSTOM_OUTPUT),
        (LOCAL, LOCAL_OUTPUT),
        (SHELL_CALL, SHELL_OUTPUT),
        (PATCH_CALL, PATCH_OUTPUT),
    ],
    ids=lambda item: item["type"],
)
async def test_second_output_of_a_call_is_refused(store: Store, call: Any, output: Any) -> None:
    await store_answer(store, "1", answer("Hello."), input=[call, output])
    sent: dict[str, Any] = {"input": [call, output, output]}
    stored: dict[str, Any] = {"previous_response_id": "resp_1", "input": [USER, output]}
    for request, position in ((sent, 2), (stored, 1)):
        with pytest.raises(InvalidRequest, match=f"{output['call_id']}' has an output already") as caught:
            await normalize(store, "2", **request)
        assert caught.value.param == f"input[{position}].call_id"
    await normalize(store, "2", input=[call, output, call, output])


async def test_calls_of_one_id_have_an_output_each(store: Store) -> None:
    resolved = await normalize(store, input=[OWN_CALL, OWN_CALL, OWN_OUTPUT, OWN_OUTPUT])
    assert callers_of(resolved.items) == {2: 0, 3: 1}
    await normalize(store, input=[ASYNC_CALL, OWN_OUTPUT, USER, OWN_OUTPUT])


async def test_output_that_is_sent_again_by_its_id_is_no_second_one(store: Store) -> None:
    await store_answer(store, "1", answer("Hello."), input=[OWN_CALL, OWN_OUTPUT])
    resolved = await normalize(store, "2", previous_response_id="resp_1", input=[{"id": "fco_1i0001"}, USER])
    assert [item.id for item in resolved.facts.input] == ["msg_2i0001"]


CUT_CALL = {**OWN_CALL, "status": "incomplete"}


@pytest.mark.parametrize(
    ("items", "unanswered"),
    [
        ([USER], "function call call_10001"),
        ([], "function call call_10001"),
        ([RAIN, OWN_CALL], "function call call_2"),
        ([RAIN, OWN_CALL, OWN_OUTPUT, OWN_CALL, USER], "function call call_2"),
        ([RAIN, CUSTOM_CALL, USER], "custom tool call call_2"),
        ([RAIN, LOCAL, USER], "local shell call l"),
        ([RAIN, OWN_CALL, CUSTOM_CALL, CUSTOM_OUTPUT, USER], "function call call_2"),
        ([RAIN, CUT_CALL, USER], None),
        ([RAIN, {**OWN_CALL, "async": True}, USER], None),
    ],
)
async def test_call_without_an_output_is_refused(store: Store, items: list[Any], unanswered: str | None) -> None:
    await store_answer(store, "1", CALL, input="How is Oslo?")
    if unanswered is None:
        await normalize(store, "2", previous_response_id="resp_1", input=items)
        return
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, "2", previous_response_id="resp_1", input=items)
    assert (caught.value.message, caught.value.param) == (f"No tool output found for {unanswered}.", "input")


@pytest.mark.defect("V16")
@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
async def test_unfinished_or_failed_response_cannot_be_continued(store: Store, status: ResponseStatus) -> None:
    await store_answer(store, "1", answer("Hello."), status=status, input="Hi")
    with pytest.raises(PreviousResponseUnfinished, match=f"'resp_1' is {status}") as caught:
        await normalize(store, "2", previous_response_id="resp_1", input="Go on")
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "previous_response_unfinished", "previous_response_id")


async def test_truncated_response_can_be_continued(store: Store) -> None:
    cut = wire.Message("msg_cut", "incomplete", "assistant", (wire.OutputText("Hel"),), "final_answer")
    await store_answer(store, "1", cut, status="incomplete", input="Hi")
    resolved = await normalize(store, "2", previous_response_id="resp_1", input="Go on")
    assert resolved.history == (user_message("msg_1i0000", "Hi"), cut)


async def test_chain_continues_without_deleted_responses(store: Store) -> None:
    await store_answer(store, "1", answer("Hello."), input="Hi")
    await store_answer(store, "2", answer("Rain."), previous_response_id="resp_1", input="How is Oslo?")
    assert await store.delete("resp_1", "")
    resolved = await normalize(store, "3", previous_response_id="resp_2", input="And Rome?")
    assert resolved.history == (user_message("msg_2i0000", "How is Oslo?"), answer("Rain."))


async def test_history_brings_its_tokens(store: Store) -> None:
    await store_answer(store, "1", THOUGHT, CALL, input="How is Oslo?", tools=[WEATHER], tokens={"fc_10001": (7, 8)})
    await store_answer(
        store, "2", answer("Rain."), previous_response_id="resp_1", input=[RAIN], tokens={"msg_Rain.": (9,)}
    )
    third = await normalize(store, "3", previous_response_id="resp_2", input="And Rome?")
    assert third.tokens == {"fc_10001": (7, 8), "msg_Rain.": (9,)}
    assert (await normalize(store, "4", input="Hi")).tokens == {}


# Items by reference


async def test_references_bring_stored_items(store: Store) -> None:
    await store_answer(store, "1", THOUGHT, CALL, input="How is Oslo?", tools=[WEATHER])
    references = [{"id": "msg_1i0000"}, {"type": "item_reference", "id": "rs_10000"}, {"type": None, "id": "fc_10001"}]
    resolved = await normalize(store, "2", input=[*references, RAIN])
    output = wire.FunctionCallOutput("fco_2i0003", "call_10001", "rain", "completed")
    assert resolved.facts.input == (user_message("msg_1i0000", "How is Oslo?"), THOUGHT, CALL, output)
    assert resolved.history == ()


async def test_unknown_reference_is_refused(store: Store) -> None:
    await store_answer(store, "1", THOUGHT, input="Hi", store=True)
    items = [{"id": "rs_10000"}, {"type": "item_reference", "id": "rs_2"}, {"id": "rs_3"}]
    with pytest.raises(InvalidRequest, match="Item with id 'rs_2' not found") as caught:
        await normalize(store, "2", input=items)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, None, "input[1].id")


class CountingStore(Store):
    """A store with two items that records the ids of each lookup."""

    def __init__(self) -> None:
        super().__init__(NullDatabase())
        self.lookups: list[list[str]] = []

    async def items(self, ids: Sequence[str], owner: str) -> dict[str, wire.Item]:
        self.lookups.append(list(ids))
        return {"a": THOUGHT, "b": CALL}


async def test_references_cost_one_look_at_the_store() -> None:
    store = CountingStore()
    assert (await normalize(store, input=[{"id": "b"}, RAIN, {"id": "a"}])).facts.input == (
        CALL,
        wire.FunctionCallOutput("fco_1i0001", "call_10001", "rain", "completed"),
        THOUGHT,
    )
    await normalize(store, input=[USER])
    assert store.lookups == [["b", "a"]]


async def test_item_is_referred_to_once() -> None:
    """A short body cannot repeat a long item: the second reference is refused."""
    with pytest.raises(InvalidRequest, match="Duplicate item found with id 'a'") as caught:
        await normalize(CountingStore(), input=[{"id": "a"}, USER, {"id": "b"}, {"id": "a"}])
    assert (caught.value.status, caught.value.param) == (400, "input[3].id")


async def test_repeated_ids_are_renamed(store: Store) -> None:
    """The first item with an id keeps it, unless a reference or the history has it."""
    await store_answer(store, "1", THOUGHT, CALL, input="How is Oslo?")
    fakes = [{**USER, "id": "__fake_id__"}, {**USER, "id": "__fake_id__"}]
    first = await store_answer(store, "2", input=[{**USER, "id": "rs_10000"}, *fakes, {"id": "rs_10000"}])
    assert [item.id for item in first.facts.input] == ["msg_2i0000", "__fake_id__", "msg_2i0002", "rs_10000"]
    second = await normalize(store, "3", previous_response_id="resp_2", input=fakes)
    assert [item.id for item in second.facts.input] == ["msg_3i0000", "msg_3i0001"]


async def test_reference_to_the_history_adds_nothing(store: Store) -> None:
    await store_answer(store, "1", THOUGHT, CALL, input="How is Oslo?")
    items = [{"id": "rs_10000"}, {"id": "fc_10001"}, RAIN]
    resolved = await normalize(store, "2", previous_response_id="resp_1", input=items)
    assert [item.id for item in resolved.facts.input] == ["fco_2i0002"]
    with pytest.raises(InvalidRequest, match="call_2") as caught:
        await normalize(store, "2", previous_response_id="resp_1", input=[*items, OWN_OUTPUT])
    assert caught.value.param == "input[3].call_id"

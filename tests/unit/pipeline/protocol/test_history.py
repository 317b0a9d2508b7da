from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.protocol.history import opening
from penstock.pipeline.protocol.items import Compaction, InputImage, Item, Message, OutputText, Reasoning
from tests.support.requests import user_message

ANSWER = Message("msg_a", "completed", "assistant", (OutputText("Hello!"),))
THOUGHT = Reasoning("rs_1", ())

given_messages = st.lists(
    st.builds(
        lambda text, role: replace(user_message("msg_1", text), role=role),
        st.text(),
        st.sampled_from(["user", "developer"]),
    ),
    max_size=4,
).map(lambda messages: [*messages, user_message("msg_u", "Hi")])
outputs = st.sampled_from([ANSWER, THOUGHT, Compaction("cmp_1", "sealed")])


@given(given_messages, outputs, st.lists(st.one_of(outputs, st.just(user_message("msg_2", "Go on")))))
def test_opening_ends_at_the_first_output(first: list[Item], output: Item, more: list[Item]) -> None:
    assert opening([*first, output, *more], "resp_2") == opening(first, "resp_1")


@given(given_messages)
def test_opening_does_not_depend_on_ids(first: list[Item]) -> None:
    renamed = [replace(item, id=f"msg_{number}") for number, item in enumerate(first)]
    assert opening(renamed, "resp_1") == opening(first, "resp_1")


def test_openings_differ_by_all_that_the_model_reads() -> None:
    asked = user_message("msg_1", "Hi")
    images = [(replace(asked, content=(InputImage(f"data:image/png;base64,{end}"),)),) for end in "ab"]
    compacted = [(Compaction("cmp_1", sealed), asked) for sealed in ("one", "other")]
    developers = (replace(asked, role="developer"), asked)
    others: list[tuple[Item, ...]] = [(user_message("msg_1", "Hello"),), (ANSWER, asked), (asked, asked)]
    all_: list[tuple[Item, ...]] = [(asked,), developers, *others, *images, *compacted]
    assert len({opening(items, "resp_1") for items in all_}) == len(all_)


def test_response_without_items_opens_with_its_id() -> None:
    assert opening((), "resp_1") == "resp_1"


def test_only_the_first_of_very_many_items_make_an_opening() -> None:
    many = [user_message("msg_1", str(number)) for number in range(1_000)]
    assert opening([*many, user_message("msg_1", "More")], "resp_1") == opening(many, "resp_1")
    assert opening(many[:2], "resp_1") != opening(many[:3], "resp_1")

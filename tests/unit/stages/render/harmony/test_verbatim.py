"""Output of the engine keeps its tokens if they spell the same messages as a new encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from msgspec.structs import replace
from openai_harmony import Role

from penstock.pipeline.frames import (
    GenerationFinished,
    ItemClosed,
    ItemTokens,
    Prompt,
    TokenChunk,
    TokenIds,
    with_facts,
)
from penstock.pipeline.protocol.items import Call, CustomToolCall, Item, Message, OutputText
from penstock.stages.emit.emit import ResponseWriter
from penstock.stages.models.harmony.vocabulary import END, HarmonyEncoding, load_encoding
from penstock.stages.render.harmony.render import RenderHarmony
from tests.support.event_streams import final
from tests.support.examples import examples
from tests.support.harmony import (
    approval,
    code_call,
    conversation,
    custom_output,
    decision,
    encode_by_letters,
    mcp_call,
    message,
    output,
    reasoning,
    reference_encoding,
    shell_call,
    web_call,
    wellformed_completions,
)
from tests.support.parsed_output import (
    CLIENT_TOOLS,
    EVERY_TOOL,
    any_harmony_tokens,
    cut_chunks,
    parse_harmony,
    parse_harmony_frames,
    turn_started,
)

NEXT = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|>"
CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "long"}<|call|>'
CALLED_AHEAD = ' to=functions.f<|channel|>commentary json<|message|>{"a": "long"}<|call|>'
ANSWER = "<|channel|>final<|message|>So it is.<|return|>"
ASKED = message("user", "Hi")
APPROVAL = approval("write")


@dataclass
class Turn:
    """A finished turn: its output items, and the tokens of items that have them."""

    output: Sequence[Item]
    tokens: Mapping[str, TokenIds]

    @property
    def results(self) -> list[Item]:
        """An output for each call of the turn."""
        return [
            (custom_output if isinstance(item, CustomToolCall) else output)("done", item.call_id)
            for item in self.output
            if isinstance(item, Call)
        ]


def turn(token_ids: Sequence[int]) -> Turn:
    """Parse the engine's tokens into a finished turn."""
    finished = GenerationFinished("stop", 0, 0.0)
    frames = parse_harmony_frames(
        load_encoding(), [turn_started(tools=CLIENT_TOOLS), *cut_chunks(list(token_ids), (), likely=False), finished]
    )
    writer = ResponseWriter()
    emitted = [told for frame in frames for told in writer.feed(frame)]
    tokens = {frame.item_id: frame.token_ids for frame in emitted if isinstance(frame, ItemTokens)}
    return Turn(final(list(writer.finish())).output, tokens)


def rendered(*then: Item, history: Sequence[Item] = (), tokens: Mapping[str, TokenIds] | None = None) -> Prompt:
    request = conversation(*then, history=history, tools=CLIENT_TOOLS)
    return RenderHarmony(load_encoding()).prompt(
        with_facts(replace(request, tokens=tokens or {}), wants_raw_messages=True)
    )


def continued(shown: Turn, *then: Item) -> tuple[int, ...]:
    """The token ids of the prompt after a turn with known tokens."""
    return rendered(*then, history=[ASKED, *shown.output], tokens=shown.tokens).token_ids


def laid_out(shown: Turn, *then: Item) -> tuple[int, ...]:
    """The token ids of the prompt after a turn with unknown tokens."""
    return rendered(*then, history=[ASKED, *shown.output]).token_ids


FIRST = rendered(ASKED).token_ids
"""The prompt of the first turn.  In the next prompt, the output of the turn follows it."""


@pytest.mark.parametrize(
    "text",
    [
        f"{THOUGHT}{NEXT}{CALLED}",
        f"{THOUGHT}{NEXT}{CALLED_AHEAD}",
        f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{CALLED}",
        "<|channel|>commentary to=functions.g code<|message|>ls -l<|call|>",
        "<|channel|>commentary to=team.h<|constrain|>json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f<|message|><|call|>",
    ],
)
def test_prompt_after_a_call_has_the_engines_tokens(text: str, encoding: HarmonyEncoding) -> None:
    for generated in (encoding.encode_markup(text), encode_by_letters(text)):
        seen = (*FIRST, *generated)
        shown = turn(generated)
        following = continued(shown, *shown.results)
        assert following[: len(seen)] == seen
        assert encoding.decode(following[len(seen) :]).count("<|message|>") == len(shown.results)


def test_tokens_of_two_calls_in_a_turn_stay_each_before_its_output(encoding: HarmonyEncoding) -> None:
    first = f"{CALLED.replace('<|call|>', '<|end|>')}"
    second = f"{NEXT}{THOUGHT}{NEXT}{CALLED}"
    shown = turn([*encode_by_letters(first), *encode_by_letters(second)])
    read = encoding.encode_markup("<|start|>functions.f to=assistant<|channel|>commentary<|message|>done<|end|>")
    expected = (*FIRST, *encode_by_letters(first), *read, *encode_by_letters(second), *read)
    assert continued(shown, *shown.results)[: len(expected)] == expected


def test_continued_answer_keeps_its_tokens(encoding: HarmonyEncoding) -> None:
    answer = tuple(encode_by_letters(ANSWER))
    shown = turn([*encoding.encode_markup(THOUGHT + NEXT), *answer])
    following = continued(shown, message("user", "And?"))
    assert following[len(FIRST) :][: len(answer)] == (*answer[:-1], END)
    assert encoding.decode(following) == encoding.decode(laid_out(shown, message("user", "And?")))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (ANSWER, "<|end|>"),
        (ANSWER.replace("<|return|>", "<|call|>"), "<|end|>"),
        (ANSWER.replace("<|return|>", "<|endoftext|>"), "<|end|>"),
        (ANSWER.replace("<|return|>", "<|end|>"), "<|end|>"),
        (CALLED, "<|call|>"),
        (CALLED.replace("<|call|>", "<|end|>"), "<|end|>"),
        (CALLED.replace("<|call|>", "<|return|>"), "<|call|>"),
    ],
)
def test_end_of_turn_token_is_normalized(written: str, read: str, encoding: HarmonyEncoding) -> None:
    generated = tuple(encode_by_letters(written))
    following = continued(turn(generated))
    assert following[len(FIRST) :] == (*generated[:-1], *encoding.encode_markup(read + NEXT))


@pytest.mark.parametrize(
    "text",
    [
        CALLED.replace("commentary", "analysis"),
        CALLED.replace("functions.f", "f"),
        CALLED.replace("functions.f", "functions.fjson"),
        CALLED.replace("functions.f", "assistant"),
        CALLED_AHEAD.replace("commentary", "commentary to=functions.f"),
        CALLED.replace("<|constrain|>json", "<|constrain|>response"),
        ANSWER.replace("final", " final"),
        ANSWER.replace("final", "final to=user"),
        f"assistant{ANSWER}",
    ],
)
def test_wrong_header_is_written_anew(text: str) -> None:
    """The model does not read its own mistakes again."""
    shown = turn(encode_by_letters(text))
    assert shown.tokens
    assert continued(shown, *shown.results) == laid_out(shown, *shown.results)


def test_changed_text_is_encoded_anew(encoding: HarmonyEncoding) -> None:
    shown = turn(encoding.encode_markup(ANSWER))
    (answer,) = shown.output
    assert isinstance(answer, Message)
    changed = Turn([replace(answer, content=(OutputText("So."),))], shown.tokens)
    assert continued(changed) == laid_out(changed)


def test_dropped_reasoning_stays_dropped(encoding: HarmonyEncoding) -> None:
    shown = turn(encoding.encode_markup(f"{THOUGHT}{NEXT}{CALLED}"))
    answered = turn(encoding.encode_markup(f"{THOUGHT}{NEXT}{ANSWER}"))
    renamed = [replace(item, id=f"{item.id}b") for item in answered.output]
    tokens = {**shown.tokens, **{f"{name}b": ids for name, ids in answered.tokens.items()}}
    history = [ASKED, *shown.output, *shown.results, *renamed]
    prompt = encoding.decode(rendered(message("user", "And?"), history=history, tokens=tokens).token_ids)
    assert "Hm." not in prompt
    assert prompt == encoding.decode(rendered(message("user", "And?"), history=history).token_ids).replace(
        " to=functions.f<|channel|>commentary json", "<|channel|>commentary to=functions.f <|constrain|>json"
    )


WRITTEN: dict[str, tuple[str, Item]] = {
    "an mcp call": (
        '<|channel|>commentary to=docs.read <|constrain|>json<|message|>{ "a": 1}',
        mcp_call("read", '{ "a": 1}'),
    ),
    "an approval": ("<|channel|>commentary to=docs.write json<|message|>{}", APPROVAL),
    "code": ("<|channel|>analysis to=python code<|message|>print( 1)", code_call("print( 1)", "1")),
    "code ahead": (" to=python<|channel|>analysis code<|message|>print( 1)", code_call("print( 1)", "1")),
    "a search": (
        '<|channel|>analysis to=browser.search code<|message|>{"query":"x", "topn": 3}',
        web_call(type="search", query="x"),
    ),
    "a page": (
        ' to=browser.open<|channel|>analysis <|constrain|>json<|message|>{ "id": 3, "cursor": 1}',
        web_call(type="open_page", url="https://a.example/"),
    ),
    "a find": (
        "<|channel|>analysis to=browser.find<|message|>{}",
        web_call(type="find_in_page", url="https://a.example/", pattern=""),
    ),
    "a shell": (
        '<|channel|>analysis to=container.exec code<|message|>{"cmd":["bash","-lc","ls"], "workdir": "/"}',
        shell_call("ls"),
    ),
    "a shell of the client's": (
        '<|channel|>commentary to=functions.shell json<|message|>{"commands": ["ls"], "timeout_ms": null}',
        shell_call("ls", here=False),
    ),
}
"""Output of the model, and the item that is parsed from it."""


@pytest.mark.parametrize(("written", "item"), WRITTEN.values(), ids=WRITTEN)
def test_calls_of_every_kind_keep_their_tokens(written: str, item: Item, encoding: HarmonyEncoding) -> None:
    generated = tuple(encode_by_letters(f"{written}<|call|>"))
    refusal = [decision(APPROVAL, approve=False)]
    prompt = rendered(item, *refusal, tokens={item.id: generated})
    start = tuple(encoding.encode_markup(NEXT))
    assert any(prompt.token_ids[at : at + len(generated)] == generated for at in range(len(prompt.token_ids)))
    spelled = encoding.decode((*start, *generated))
    assert spelled in encoding.decode(prompt.token_ids)
    assert prompt.raw_messages is not None
    assert prompt.raw_messages[2]["content"][0]["text"] == written.partition("<|message|>")[2]


@pytest.mark.parametrize("kind", ["an mcp call", "code", "a search", "a page", "a shell", "a shell of the client's"])
def test_call_on_another_channel_is_written_anew(kind: str, encoding: HarmonyEncoding) -> None:
    written, item = WRITTEN[kind]
    right, wrong = ("commentary", "analysis") if "commentary" in written else ("analysis", "commentary")
    prompt = rendered(item, tokens={item.id: tuple(encode_by_letters(f"{written.replace(right, wrong)}<|call|>"))})
    text = encoding.decode(prompt.token_ids)
    header, _, arguments = written.partition("<|message|>")
    recipient = header.partition("to=")[2].split("<")[0].split(" ")[0]
    assert f"{NEXT} to={recipient}<|channel|>{right} " in text
    assert f"<|message|>{arguments}<|call|>" in text


def test_prompt_after_a_server_side_call_has_the_engines_tokens(encoding: HarmonyEncoding) -> None:
    generated = tuple(
        encode_by_letters(f"{THOUGHT}{NEXT}<|channel|>analysis to=python code<|message|>print( 1)<|call|>")
    )
    frames = parse_harmony_frames(
        encoding, [turn_started(tools=EVERY_TOOL), TokenChunk(generated), GenerationFinished("stop", 0, 0.0)]
    )
    closed = [frame.token_ids for frame in frames if isinstance(frame, ItemClosed)]
    items: list[Item] = [reasoning("Hm."), code_call("print( 1)", "1")]
    prompt = rendered(ASKED, *items, tokens={item.id: ids for item, ids in zip(items, closed, strict=True)})
    seen = (*FIRST, *generated)
    assert prompt.token_ids[: len(seen)] == seen
    assert encoding.decode(prompt.token_ids[len(seen) :]) == (
        f"<|start|>python to=assistant<|channel|>analysis<|message|>1<|end|>{NEXT}"
    )


def test_tokens_for_another_tool_are_ignored(encoding: HarmonyEncoding) -> None:
    item = web_call(type="open_page", url="https://a.example/")
    tokens = tuple(encoding.encode_markup('<|channel|>analysis to=browser.search code<|message|>{"query":"x"}<|call|>'))
    for known in (tokens, tokens[:3], ()):
        assert rendered(item, tokens={item.id: known}).token_ids == rendered(item).token_ids


def test_input_items_are_encoded_anew(encoding: HarmonyEncoding) -> None:
    shown = turn(encode_by_letters(ANSWER))
    sent = [replace(item, id="msg_sent") for item in shown.output]
    assert rendered(*sent, tokens=shown.tokens).token_ids == rendered(*sent).token_ids


@given(wellformed_completions())
def test_known_tokens_have_the_same_messages(completion: str) -> None:
    shown = turn(load_encoding().encode_markup(completion))
    known, unknown = (
        [
            {name: value for name, value in message.to_dict().items() if name != "content_type"}
            for message in reference_encoding().parse_messages_from_completion_tokens(
                prompt[len(FIRST) : -2], Role.ASSISTANT
            )
        ]
        for prompt in (continued(shown, *shown.results), laid_out(shown, *shown.results))
    )
    assert known == unknown


@given(any_harmony_tokens())
@examples(300)
def test_any_known_tokens_have_the_same_messages(token_ids: list[int]) -> None:
    shown = turn(token_ids)
    known, unknown = (
        [
            (item.kind, item.name, item.namespace, item.text, item.repairs)
            for item in parse_harmony(load_encoding(), [prompt[len(FIRST) : -2]], tools=CLIENT_TOOLS)
        ]
        for prompt in (continued(shown), laid_out(shown))
    )
    assert known == unknown
    assert not any(repairs for *_, repairs in known)


def test_truncation_counts_known_tokens() -> None:
    shown = turn(encode_by_letters(ANSWER.replace("it is", "it is " * 200)))
    request = conversation(message("user", "?"), history=[ASKED, *shown.output], tools=CLIENT_TOOLS, truncation="auto")
    room = len(RenderHarmony(load_encoding()).prompt(request).token_ids) + 200
    render = RenderHarmony(load_encoding(), room)
    assert "So it is" in load_encoding().decode(render.prompt(request).token_ids)
    prompt = render.prompt(replace(request, tokens=shown.tokens))
    assert "So it is" not in load_encoding().decode(prompt.token_ids)
    assert len(prompt.token_ids) + 100 <= room


def test_raw_messages_do_not_depend_on_known_tokens() -> None:
    shown = turn(encode_by_letters(f"{THOUGHT}{NEXT}{CALLED}"))
    history = [ASKED, *shown.output]
    prompts = [rendered(*shown.results, history=history, tokens=tokens) for tokens in (shown.tokens, {})]
    assert prompts[0].raw_messages == prompts[1].raw_messages
    assert prompts[0].token_ids != prompts[1].token_ids

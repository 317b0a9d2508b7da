"""Chat models without vLLM: the same prompts and items as with it, for the families that penstock reads itself."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.cli.__main__ import main
from penstock.pipeline.errors import CannotStart, InvalidRequest
from penstock.pipeline.frames import ParsedFrame, Prompt, ResolvedRequest, TokenChunk, TokenFrame
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import read_frames
from penstock.stages.models.chat.load import ChatModelsNeedVllm, ChatOptions, WrongChatOptions, read_config
from penstock.stages.models.chat.model import ChatModel, ContentPiece, OutputParser, Piece, ReasoningPiece
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS
from penstock.stages.models.chat.standalone import ModelFiles, OwnParsers, load_from_files
from penstock.stages.models.chat.thoughts import ThoughtForm, ThoughtsFirst
from penstock.stages.parse.chat.parse import ParseChat
from penstock.stages.render.chat.render import RenderChat
from tests.support.chat_families import FAMILIES, expected_items, family_model, family_of
from tests.support.event_streams import final, read_sse, run_stage
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.parsed_output import parsed_items, turn_started
from tests.support.paths import CHAT, ROOT, TINY_QWEN
from tests.support.processes import free_port, running_process

pytestmark = pytest.mark.vllm

READ = [
    case
    for case in sorted(CHAT.glob("*/"))
    for family in [FAMILIES[family_of(case.name)]]
    if family.tools in (None, *OWN_CALLS) and family.reasoning in (None, *OWN_THOUGHTS)
]
WHOLE = [case for case in READ if (case / "prompt.jsonl").exists()]


def own_model(name: str) -> ChatModel:
    family, model = FAMILIES[name], family_model(name)
    return replace(model, parsers=own_parsers(model, family.reasoning, family.tools))


def own_parsers(model: ChatModel, reasoning: str | None, calls: str | None) -> OwnParsers:
    return OwnParsers(model.vocabulary, OWN_THOUGHTS.get(reasoning or ""), OWN_CALLS.get(calls or ""))


@pytest.mark.parametrize("folder", READ, ids=lambda folder: folder.name)
async def test_items_equal_those_of_vllm(folder: Path) -> None:
    frames = list(read_frames(folder / "tokens.jsonl", TokenFrame))
    parsed: list[ParsedFrame] = await run_stage(ParseChat(own_model(family_of(folder.name))), frames)
    items = [(item.name if "Call" in item.kind else "", item.text.strip()) for item in parsed_items(parsed)]
    meant = [(item.name, item.text.strip()) for item in expected_items(folder.name)]
    assert [(name, as_json(text)) for name, text in items] == [(name, as_json(text)) for name, text in meant]


def as_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def own_tiny_qwen(**options: Any) -> ChatModel:
    return load_from_files(ModelFiles(str(TINY_QWEN)), ChatOptions(**options))


@pytest.mark.parametrize("folder", WHOLE, ids=lambda folder: folder.name)
async def test_prompts_equal_those_of_vllm(folder: Path) -> None:
    render = RenderChat(own_tiny_qwen(), context_length=4096)
    requests = list(read_frames(folder / "conversation.jsonl", ResolvedRequest))
    (prompt,) = await run_stage(render, requests)
    (meant,) = read_frames(folder / "prompt.jsonl", Prompt)
    assert (prompt.token_ids, prompt.stop_token_ids) == (meant.token_ids, meant.stop_token_ids)


def test_files_say_what_the_config_of_vllm_says(tmp_path: Path) -> None:
    files, config = ModelFiles(str(TINY_QWEN)), read_config(str(TINY_QWEN))
    assert files.model_type == config.model_config.hf_config.model_type
    assert files.sampling == config.model_config.get_diff_sampling_param()
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert ModelFiles(str(tmp_path)).speaks_harmony
    assert ModelFiles(str(tmp_path)).sampling == {}


def test_folder_without_a_config_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="cannot be read"):
        load_from_files(ModelFiles(str(tmp_path)), ChatOptions())


def test_options_are_those_of_a_model_with_vllm() -> None:
    hello = [{"role": "user", "content": "Hello."}]
    source = "{{ messages[0].content | tojson }}{{ name }}"
    model = own_tiny_qwen(chat_template=source, reasoning_parser="none", default_chat_template_kwargs={"name": "Ada"})
    assert model.template.render(hello, [], model.variables).text == '"Hello."Ada'
    assert (model.parsers.thinking, model.parser_names) == (None, ("hermes",))
    parts = own_tiny_qwen(chat_template=source, chat_template_content_format="openai")
    assert parts.template.render(hello, [], {}).text == '[{"type": "text", "text": "Hello."}]'
    with pytest.raises(InvalidRequest, match="No tools on Sundays"):
        parts.template.render(hello, [], {}, source="{{ raise_exception('No tools on Sundays') }}")
    with pytest.raises(WrongChatOptions, match=r"--chat-template: .*lost\.jinja"):
        own_tiny_qwen(chat_template="lost.jinja")


def test_tools_that_no_family_calls_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    files = ModelFiles(str(TINY_QWEN))
    files.tokenizer.chat_template = "{{ tools }}{{ messages }}"
    with caplog.at_level(logging.WARNING):
        load_from_files(files, ChatOptions())
    assert [record.getMessage() for record in caplog.records] == [
        "No tool-call parser: its template has tools, but shows no known way to call them; --tool-call-parser names one"
    ]


def test_parser_that_only_vllm_has_ends_the_start() -> None:
    with pytest.raises(ChatModelsNeedVllm, match=r"only vLLM has .* beam .* pip install 'vllm"):
        own_tiny_qwen(tool_call_parser="beam")


def test_missing_transformers_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ChatModelsNeedVllm, match="nor transformers with jinja2"):
        own_tiny_qwen()


@pytest.mark.parametrize(
    ("prompt", "output", "thought"),
    [
        ("", "<think>a</think>b", "a"),
        ("<think>\n", "a</think>b", "a"),
        ("<think>\n\n</think>\n\n", "b", ""),
        ("<think>old</think>Hi<|im_end|>\n<|im_start|>assistant\n", "a</think>b", "a"),
    ],
)
def test_prompt_shows_if_the_output_begins_with_a_thought(prompt: str, output: str, thought: str) -> None:
    model = own_tiny_qwen()
    parser = model.parsers.start(turn_started(prompt=tuple(model.vocabulary.encode(prompt))), [])
    pieces = [piece for token in model.vocabulary.encode(output) for piece in fed(model, parser, token)]
    pieces += parser.finish(cut=False)
    assert "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)) == thought
    assert "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece)) == "b"


def fed(model: ChatModel, parser: OutputParser, token: int) -> Sequence[Piece]:
    return parser.feed(token, model.vocabulary.decode([token]))


PARTS = ["<think>", "</think>", "<tool_call>", "<", "</th", "a", " ", "\n", "ink>"]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.sampled_from([True, False, None]))
def test_thoughts_lose_no_text_in_any_pieces(words: list[str], is_open: bool | None) -> None:
    text = "".join(words)
    whole, pieced = (spoken(ThoughtsFirst(ThoughtForm(), is_open=is_open), parts) for parts in ([text], words))
    assert whole == pieced
    assert without_marks("".join(said for _, said in whole)).lstrip() == without_marks(text).lstrip()


def without_marks(text: str) -> str:
    while (rest := text.replace("</think>", "").replace("<think>", "")) != text:
        text = rest
    return text


def spoken(syntax: ThoughtsFirst, parts: Iterable[str]) -> list[tuple[type, str]]:
    """The thoughts and the texts, in turn."""
    said: list[tuple[type, str]] = []
    for piece in [piece for part in parts for piece in syntax.feed(part)] + list(syntax.finish()):
        assert isinstance(piece, ReasoningPiece | ContentPiece)
        before = said.pop()[1] if said and said[-1][0] is type(piece) else ""
        said.append((type(piece), before + piece.text))
    return said


# Without vLLM and PyTorch


def test_tokens_are_replayed_without_vllm(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = CHAT / "tiny_qwen_thinking_off"
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.chdir(ROOT)  # the recording has the model's folder relative to it
    monkeypatch.setattr("sys.argv", ["penstock", "replay", "--sse", str(folder), "--from", "parse"])
    main()
    replayed = capsysbinary.readouterr()
    assert b"cannot be parsed" not in replayed.err
    assert final(read_sse(replayed.out)) == msgspec.json.decode((folder / "response.json").read_bytes(), type=Response)


JSON = "application/json"
BLOCKED = """
import sys
sys.modules |= dict.fromkeys(("vllm", "torch"))  # an import raises ModuleNotFoundError
from penstock.api.cli.__main__ import main
main()
"""


@pytest.mark.io
@pytest.mark.slow
async def test_server_needs_neither_vllm_nor_pytorch(tmp_path: Path) -> None:
    case = CHAT / "tiny_qwen_thinking_off"
    chunks = read_frames(case / "tokens.jsonl", TokenFrame)
    tokens = [token for chunk in chunks if isinstance(chunk, TokenChunk) for token in chunk.token_ids]
    engine, port = FakeVllm(tokens, names=("tiny_qwen",), markers=[1, 2, 3], root=str(TINY_QWEN)), free_port()
    options = ["--engine", engine.url, "--port", str(port), "--store", str(tmp_path / "store.sqlite3")]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "serve.log"

    def answer() -> Any:
        request = json.loads((case / "request.json").read_text()) | {"stream": False}
        sent = urllib.request.Request(f"{url}/v1/responses", json.dumps(request).encode(), {"Content-Type": JSON})
        command = [sys.executable, "-c", BLOCKED, "serve", *options]
        with running_process(command, f"{url}/health", log), urllib.request.urlopen(sent) as received:
            return json.load(received)

    async with running_fakes(engine):
        output = (await asyncio.to_thread(answer))["output"]
    meant = json.loads((case / "response.json").read_text())["output"]
    assert [without_ids(item) for item in output] == [without_ids(item) for item in meant]
    (prompt,) = read_frames(case / "prompt.jsonl", Prompt)
    assert engine.prompts[-1]["token_ids"] == list(prompt.token_ids)
    assert "The tool-call parser is hermes" in log.read_text()


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}

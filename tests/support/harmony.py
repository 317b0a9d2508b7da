"""Items of conversations, their Harmony prompts by openai_harmony, and grammars of Harmony output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, count
from typing import Any, Literal, TypeVar

import openai_harmony as reference
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.tiktoken import lltokenizer_from_encoding
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.pipeline.frames import RequestFacts, ResolvedRequest, Sampling
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.response import Effort, ReasoningOptions, Response
from penstock.pipeline.protocol.tools import FunctionTool, HostedTool, Tool, Toolset
from penstock.stages.models.harmony import vocabulary
from penstock.stages.models.harmony.typescript import NamedTool, tools_section
from penstock.stages.render.harmony.grammar import grammar
from penstock.stages.render.harmony.messages import harmony_conversation


@st.composite
def wellformed_completions(draw: st.DrawFn) -> str:
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(lambda t: "<|" not in t)
    headers = [
        "<|channel|>analysis",
        "<|channel|>commentary",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        " to=functions.f<|channel|>commentary json",
    ]
    messages = draw(st.lists(st.tuples(st.sampled_from(headers), text), min_size=1, max_size=5))
    return "<|end|><|start|>assistant".join(f"{header}<|message|>{text}" for header, text in messages) + "<|return|>"


DATE = "2026-03-14"
SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_tokens=100)
_numbers = count()

Nested = TypeVar("Nested", bound=items.Item)

PROGRAM = HostedTool("program", "program", spoken="python")
"""The tool for programs as gpt-oss calls it, if the request has no Python."""


def conversation(
    *given: items.Item,
    history: Sequence[items.Item] = (),
    instructions: str | None = None,
    tools: Sequence[Tool] | Toolset = (),
    effort: Effort | None = None,
    text_format: Mapping[str, Any] | None = None,
    verbosity: str | None = None,
    truncation: Literal["auto", "disabled"] = "disabled",
    sampling: Sampling = SAMPLING,
) -> ResolvedRequest:
    """A request with ``items`` as its input."""
    toolset = tools if isinstance(tools, Toolset) else Toolset(tuple(tools))
    response = Response(
        id="resp_1",
        created_at=1_773_446_400,
        status="in_progress",
        model="gpt-oss-20b",
        previous_response_id=None,
        instructions=instructions,
        tools=(),
        tool_choice="auto",
        truncation=truncation,
        parallel_tool_calls=True,
        text={"format": text_format or {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})},
        top_p=SAMPLING.top_p,
        temperature=SAMPLING.temperature,
        reasoning=ReasoningOptions(effort=effort, summary=None),
        max_output_tokens=SAMPLING.max_tokens,
        store=False,
        metadata={},
        safety_identifier=None,
        prompt_cache_key=None,
    )
    return ResolvedRequest(RequestFacts(response, given, sampling, DATE, toolset), tuple(history))


def message(role: items.Role, *texts: str, phase: items.Phase | None = None) -> items.Message:
    part = items.OutputText if role == "assistant" else items.InputText
    return items.Message(
        id=f"msg_{next(_numbers)}",
        status="completed",
        role=role,
        content=tuple(part(text) for text in texts),
        phase=phase or UNSET,
    )


def reasoning(*texts: str) -> items.Reasoning:
    return items.Reasoning(id=f"rs_{next(_numbers)}", content=tuple(items.ReasoningText(text) for text in texts))


def call(
    name: str,
    arguments: str,
    call_id: str = "call_1",
    status: items.ItemStatus = "completed",
    namespace: str | UnsetType = UNSET,
) -> items.FunctionCall:
    return items.FunctionCall(f"fc_{next(_numbers)}", call_id, name, arguments, status, namespace)


def output(text: str | tuple[items.InputPart, ...], call_id: str = "call_1") -> items.FunctionCallOutput:
    return items.FunctionCallOutput(id=f"fco_{next(_numbers)}", call_id=call_id, output=text, status="completed")


def custom_call(
    name: str, text: str, call_id: str = "call_1", namespace: str | UnsetType = UNSET
) -> items.CustomToolCall:
    return items.CustomToolCall(f"ctc_{next(_numbers)}", call_id, name, text, "completed", namespace)


def custom_output(text: str | tuple[items.InputText, ...], call_id: str = "call_1") -> items.CustomToolCallOutput:
    return items.CustomToolCallOutput(f"ctco_{next(_numbers)}", call_id, text, "completed")


def mcp_call(
    name: str,
    arguments: str = "{}",
    output: str | None = "done",
    *,
    label: str = "docs",
    status: items.CallStatus = "completed",
    error: dict[str, Any] | None = None,
) -> items.McpCall:
    return items.McpCall(f"mcp_{next(_numbers)}", label, name, arguments, status, output, error)


def approval(name: str, arguments: str = "{}", *, label: str = "docs") -> items.McpApprovalRequest:
    return items.McpApprovalRequest(f"mcpr_{next(_numbers)}", label, name, arguments)


def decision(
    request: items.McpApprovalRequest, *, approve: bool, reason: str | None = None
) -> items.McpApprovalResponse:
    return items.McpApprovalResponse(f"mcpa_{next(_numbers)}", request.id, approve, reason)


def code_call(code: str, *logs: str, status: items.CallStatus = "completed") -> items.CodeInterpreterCall:
    """A code interpreter call, with its logs if there are any."""
    outputs = tuple({"type": "logs", "logs": text} for text in logs) or None
    return items.CodeInterpreterCall(f"ci_{next(_numbers)}", code, "cntr_1", status, outputs)


def web_call(status: items.CallStatus = "completed", **action: Any) -> items.WebSearchCall:
    return items.WebSearchCall(f"ws_{next(_numbers)}", status, action)


def shell_call(*commands: str, call_id: str = "call_1", here: bool = True, **action: Any) -> items.ShellCall:
    """A shell call; it runs in the sandbox if ``here``, else at the client."""
    environment = {"type": "container_reference" if here else "local"}
    number = f"sh_{next(_numbers)}"
    return items.ShellCall(number, call_id, {"commands": list(commands), **action}, "completed", environment)


def shell_output(*output: dict[str, Any], call_id: str = "call_1") -> items.ShellCallOutput:
    return items.ShellCallOutput(f"sho_{next(_numbers)}", call_id, output, "completed")


def program(code: str, call_id: str = "call_p") -> items.Program:
    number = f"prog_{next(_numbers)}"
    return items.Program(number, call_id=call_id, code=code, fingerprint=items.fingerprint_of(code))


def program_output(text: str, call_id: str = "call_p") -> items.ProgramOutput:
    return items.ProgramOutput(f"progo_{next(_numbers)}", call_id, text, "completed")


def made_by_program(item: Nested, call_id: str = "call_p") -> Nested:
    """The call, or the output of a call, of the program with this ``call_id``."""
    return replace(item, caller=items.caller_named(call_id))


def nested_calls(rounds: int, name: str = "get_weather") -> list[items.Item]:
    """The calls of a program, and their outputs, in rounds."""
    made: list[items.Item] = []
    for number in range(rounds):
        made += (made_by_program(call(name, "{}", f"call_{number}")), output("18", f"call_{number}"))
    return made


def function(
    name: str, parameters: Any = None, description: str | None = None, namespace: str | None = None
) -> FunctionTool:
    return FunctionTool(name, description, parameters, namespace=namespace)


# openai_harmony, the reference


@cache
def reference_encoding() -> reference.HarmonyEncoding:
    return reference.load_harmony_encoding(reference.HarmonyEncodingName.HARMONY_GPT_OSS)


def reference_system(
    effort: str = "Medium", *built_in: reference.ToolNamespaceConfig, instructions: str | None = None
) -> reference.Message:
    content = reference.SystemContent.new().with_conversation_start_date(DATE)
    if instructions is not None:  # as vLLM adds them
        content = content.with_model_identity(f"{content.model_identity}\n{instructions}")
    content = content.with_reasoning_effort(reference.ReasoningEffort(effort))
    for namespace in built_in:
        content = content.with_tools(namespace)
    return reference.Message.from_role_and_content(reference.Role.SYSTEM, content)


def reference_developer(
    instructions: str | None = None, tools: Sequence[FunctionTool] = (), descriptions: Mapping[str, str] | None = None
) -> reference.Message:
    content = reference.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    for namespace in dict.fromkeys(tool.namespace or "functions" for tool in tools):
        content = content.with_tools(
            reference.ToolNamespaceConfig(
                name=namespace,
                description=(descriptions or {}).get(namespace),
                tools=[_reference_tool(tool) for tool in tools if (tool.namespace or "functions") == namespace],
            )
        )
    return reference.Message.from_role_and_content(reference.Role.DEVELOPER, content)


def _reference_tool(tool: FunctionTool) -> reference.ToolDescription:
    return reference.ToolDescription(name=tool.name, description=tool.description or "", parameters=tool.parameters)


def reference_message(role: str, text: str, channel: str | None = None) -> reference.Message:
    message = reference.Message.from_role_and_content(reference.Role(role), text)
    return message.with_channel(channel) if channel else message


def reference_ids(messages: Sequence[reference.Message]) -> list[int]:
    return reference_encoding().render_conversation_for_completion(
        reference.Conversation.from_messages(list(messages)),
        reference.Role.ASSISTANT,
        reference.RenderConversationConfig(auto_drop_analysis=False),
    )


def our_section(*tools: NamedTool, **descriptions: str) -> str:
    return tools_section(tools, descriptions)


def reference_section(tools: Sequence[FunctionTool], **descriptions: str) -> str:
    text = reference_encoding().decode(
        reference_encoding().render(reference_developer(tools=tools, descriptions=descriptions))
    )
    return text.removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>")


def prompt_text(conversation: ResolvedRequest) -> str:
    return vocabulary.load_encoding().decode(prompt_ids(conversation)).split("<|end|>", 1)[1]


def prompt_ids(conversation: ResolvedRequest) -> list[int]:
    encode = vocabulary.load_encoding().encode
    layout = harmony_conversation(conversation)
    segments = (segment for message in (*layout.head, *layout.messages) for segment in message.segments())
    pieces = ([segment] if isinstance(segment, int) else encode(segment) for segment in segments)
    return [*chain.from_iterable(pieces), vocabulary.START, *encode("assistant")]


THOUGHT = "<|channel|>analysis<|message|>Hm. {}<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"


def final_markup(text: str, *, marked: bool = False) -> str:
    """The markup of an answer; ``marked`` adds the header that declares it as JSON."""
    return f"<|channel|>final{' <|constrain|>json' if marked else ''}<|message|>{text}<|return|>"


def call_markup(recipient: str, text: str, kind: str = "json") -> str:
    """The markup of a call without its end marker."""
    return f"<|channel|>commentary to={recipient} <|constrain|>{kind}<|message|>{text}"


def recipient_first_markup(recipient: str, text: str, kind: str = "json") -> str:
    return f" to={recipient}<|channel|>commentary {kind}<|message|>{text}"


def encode_by_letters(text: str) -> list[int]:
    """The tokens of a turn with one token per letter of content, unlike any encoder."""
    encoding = vocabulary.load_encoding()
    token_ids: list[int] = []
    in_content = False
    for token in encoding.encode_markup(text):
        if token >= vocabulary.TEXT_TOKENS:
            in_content = token == vocabulary.MESSAGE
        if in_content and token < vocabulary.TEXT_TOKENS:
            token_ids += (spelled for letter in encoding.decode((token,)) for spelled in encoding.encode(letter))
        else:
            token_ids.append(token)
    return token_ids


@cache
def grammar_tokenizer() -> LLTokenizer:
    return lltokenizer_from_encoding(
        vocabulary.load_encoding()._tiktoken, n_vocab=vocabulary.VOCABULARY_SIZE, eos_token=vocabulary.RETURN
    )


def grammar_matcher(rules: str) -> LLMatcher:
    started = LLMatcher(grammar_tokenizer(), grammar_from("grammar", rules), log_level=0)
    assert not started.is_error(), started.get_error()
    return started


def accepted_markup(rules: str, turn: str) -> str:
    """The part of ``turn`` that the grammar accepts; ``...`` follows if the turn must go on."""
    encoding, started = vocabulary.load_encoding(), grammar_matcher(rules)
    token_ids = encoding.encode_markup(turn)
    count = 0
    while count < len(token_ids) and _is_allowed(started, token_ids[count]) and started.consume_token(token_ids[count]):
        count += 1
    return encoding.decode(token_ids[:count]) + ("" if started.is_accepting() else "...")


def allowed_special_tokens(rules: str, turn: str) -> set[int]:
    """The special tokens that the grammar allows after the start of a turn."""
    started = grammar_matcher(rules)
    assert started.consume_tokens(vocabulary.load_encoding().encode_markup(turn)), started.get_error()
    mask = started.compute_bitmask()
    return {token for token in range(vocabulary.TEXT_TOKENS, vocabulary.VOCABULARY_SIZE) if _has_bit(mask, token)}


def _is_allowed(started: LLMatcher, token: int) -> bool:
    return _has_bit(started.compute_bitmask(), token)


def _has_bit(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> (token % 8) & 1)


def grammar_for(tools: Toolset | None = None, schema: Any = None, *, strict: bool | None = True) -> str:
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": strict} if schema is not None else {}
    rules = grammar(tools or Toolset(), text_format)
    assert rules is not None
    return rules

"""The outputs of vLLM's tests that penstock reads otherwise than vLLM does, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Differences: TypeAlias = Mapping[str, Mapping[tuple[str, str], int]]
"""The number of different outputs by reason, by the names of the parsers and the test."""

_REPLAY = "TestDropTokenReplay::test_drop_tokens_removed_from_output"
_GEMMA = "test_gemma4_response_template"
_MINICPMV = "TestNonThinking::test"
_FORCE = "force_nonempty_content_moves_into_content"

BY_DESIGN: Differences = {
    "the test puts marks of its own into the output, which are no marks of the model": {
        **{(f"{name}/{name}", _REPLAY): 7 for name in ("deepseek_v4", "deepseek_v41", "glm45", "kimi_k2", "mimo")},
        **{(f"{name}/{name}", _REPLAY): 7 for name in ("minimax_m2", "seed_oss", "step3p5")},
        **{(f"{name}/qwen3_coder", _REPLAY): 7 for name in ("granite_thinking_parser", "nemotron_v3", "qwen3")},
        ("-/deepseek_v32", _REPLAY): 4,
        ("gemma4/gemma4", _REPLAY): 8,
    },
    "the output is cut within a mark, which is one token of the real model": {
        ("plamo3/plamo3", "test_every_cut_point_matches_non_streaming"): 64,
        ("plamo3/plamo3", "test_partial_end_think_is_consistent_between_streaming_and_non_streaming"): 4,
        ("plamo3/plamo3", "test_tool_name_cutoffs_do_not_leak_markers"): 20,
    },
    "the test spells a mark in letters, or needs the real ids of the marks": {
        ("gemma4/-", "test_gemma4_reasoning"): 12,
        ("hunyuan_a13b/-", "test_reasoning"): 6,
        ("nemotron_v3/qwen3_coder", "TestParseDeltaTokenIdFiltering::test_text_discussion_then_real_tool_call"): 1,
        (
            "nemotron_v3/qwen3_coder",
            "TestParseDeltaTokenIdFiltering::test_tool_call_text_in_reasoning_is_not_parsed",
        ): 1,
        ("-/gigachat3", "test_streaming_tool_call_with_large_steps"): 2,
        ("-/gigachat3", "test_tool_call"): 10,
    },
    "the test hides the reasoning, as its request says or as a part of the parser does alone": {
        ("-/inkling", "TestToolParserWithoutReasoningParser::test_thinking_then_text_keeps_structure"): 1,
        ("-/inkling", "TestToolParserWithoutReasoningParser::test_thinking_then_tool_still_promotes"): 1,
        ("gemma4/gemma4", f"{_GEMMA}_reasoning_suppression_matches_registered_parser"): 1,
        ("qwen3/-", "test_engine_reasoning_no_tool_holdback_finished_and_hidden_reasoning"): 1,
    },
    "the test gives no prompt, which would end with the mark of the header": {
        ("inkling/inkling", "TestNonStreaming::test_tool_header_name_is_not_visible_content"): 1,
    },
    "the test looks at some of the pieces alone": {
        ("-/glm45", "TestGlm47Streaming::test_with_args"): 1,
        ("-/hermes", "test_parse_delta_finished_appends_remaining_args"): 1,
        ("granite/-", "test_streaming_subcases"): 6,
        ("kimi_k2/-", "test_streaming_tool_section_ends_reasoning"): 1,
        ("kimi_k3/-", "test_delegating_parser_thinking_false_streams_response_content"): 1,
        ("minicpmv/-", "TestNewlineRecovery::test_buffered_delta_is_dropped_not_sent_empty"): 1,
        ("minimax_m3/-", "test_streaming_split_end_marker_content_ids_are_stripped"): 1,
    },
    "vLLM drops text before or after a call, which is a message here": {
        ("-/deepseek_v31", "test_extract_tool_calls_with_multiple_tools"): 1,
        ("-/hunyuan_a13b", "test_hunyuan_a13b_tool_parser_extract"): 1,
        ("-/hunyuan_a13b", "test_hunyuan_a13b_tool_parser_streaming"): 1,
        ("-/lfm2", "test_echoed_tool_call_body_not_leaked_to_content"): 1,
        ("-/longcat", "TestLongCatToolParser::test_surrounding_text"): 1,
        ("-/phi4_mini_json", "TestPhi4MiniToolParser::test_surrounding_text"): 1,
        ("-/minicpm5", "test_multiple_calls_interleaved_text"): 1,
        ("-/minicpm5", "test_single_call_with_surrounding_text"): 1,
        ("gemma4/gemma4", f"{_GEMMA}_preserves_content_after_tool_call"): 1,
    },
    "vLLM shows or drops a broken call, which is an incomplete call here": {
        ("-/deepseek_v3", "TestDeepSeekV3ToolParser::test_malformed_input"): 2,
        ("-/granite", "TestGraniteToolParser::test_malformed_input"): 1,
        ("-/granite-20b-fc", "TestGranite20bFcToolParser::test_malformed_input"): 2,
        ("-/hermes", "test_hermes_parser_non_streaming_tool_call_invalid_json"): 1,
        ("-/lfm2", "test_regex_timeout_handling"): 1,
        ("-/longcat", "TestLongCatToolParser::test_malformed_input"): 1,
        ("-/phi4_mini_json", "TestPhi4MiniToolParser::test_malformed_input"): 6,
    },
    "vLLM shows a call as a message too, or loses its arguments, when it reads in pieces": {
        ("-/lfm2", "test_streaming_char_by_char_multi_dict_list"): 1,
        ("-/xlam", "test_extract_tool_calls_streaming_incremental"): 2,
        ("-/xlam", "test_streaming_with_list_structure"): 1,
    },
    "`force_nonempty_content`: the thought streams as a thought and is repeated as the answer, as in vLLM's stream": {
        ("granite_thinking_parser/-", f"test_granite_thinking_{_FORCE}"): 1,
        ("granite_thinking_parser/-", "test_granite_thinking_force_nonempty_no_swap_when_newlines_only"): 1,
        ("granite_thinking_parser/-", "test_granite_thinking_force_nonempty_swaps_when_content_absent"): 1,
        ("nemotron_v3/-", f"test_nemotron_v3_{_FORCE}"): 1,
    },
    "JSON within prose is no call: an answer may show one": {
        ("-/llama3_json", "test_extract_tool_calls_multiple_json_with_surrounding_text"): 1,
        ("-/llama3_json", "test_extract_tool_calls_simple"): 1,
    },
}
"""Differences that stay."""

DEFECTS: Differences = {
    "a call without a mark is found only at the beginning of a line, and not after thoughts in letters": {
        ("-/xlam", "test_extract_tool_calls"): 1,
    },
    "the parameter `input` around all arguments is not unwrapped": {
        ("-/deepseek_v32", "TestExtractToolCalls::test_input_wrapper_repaired"): 1,
    },
    "quotes within quotes end the argument": {("-/lfm2", "test_tool_call"): 1},
    "blanks that are spelled as in SentencePiece stay in messages": {
        ("-/minicpm5", "test_thinking_only_sentencepiece_normalized_in_content"): 1,
    },
    "a template that always thinks is not known to the parser when the variable says that it does not": {
        ("glm45/-", "test_glm53_template_forces_reasoning"): 1,
    },
    "marks of reasoning are shown when thinking is off": {
        ("minicpmv/-", f"{_MINICPMV}_dangling_standard_think_end_is_removed"): 1,
        ("minicpmv/-", f"{_MINICPMV}_reserved_markers_are_removed"): 1,
        ("minicpmv/-", f"{_MINICPMV}_streaming_split_reserved_markers"): 1,
        ("minicpmv/-", f"{_MINICPMV}_streaming_split_standard_markers"): 1,
        ("minicpmv/-", f"{_MINICPMV}_truncated_standard_reasoning_does_not_leak"): 1,
        ("minicpmv/-", "TestThinking::test_reserved_markers_are_removed"): 1,
    },
}
"""Differences to mend."""

UNREAD: Mapping[str, str] = {
    "hf/hf": "needs a template of responses in the tokenizer",
    "openai_gptoss/openai": "a gpt-oss has a parser of its own",
}
"""Parsers that do not start here."""

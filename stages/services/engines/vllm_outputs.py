"""Pass token ids from vLLM's engine core on to their readers, without the objects of vLLM's output processor.

For each output of the engine core, vLLM builds a `RequestOutput` and a `CompletionOutput`.  Without text and log
probabilities, that is most of its work, and our streams read only the token ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def pass_tokens_on(processor: Any, unread: Mapping[str, list[int]]) -> None:
    """Let vLLM's output ``processor`` append token ids to the list of their request in ``unread``, and wake its reader.

    Some outputs still go vLLM's way: those of requests that are not in ``unread``, the first of a request, which has
    facts about its prompt, the last, and any while the request's collector holds one.  So the ids in ``unread`` precede
    the output in the collector.  What vLLM keeps of a request is the same either way: its statistics, its tokens, and
    the number of tokens sent.

    None of this is a public interface of vLLM.  If it is not as expected, an error is logged, and all outputs go vLLM's
    way.
    """
    process = processor.process_outputs

    def is_passed_on(output: Any, timestamp: Any, statistics: Any) -> bool:
        tokens, state = unread.get(output.request_id), processor.request_states.get(output.request_id)
        if tokens is None or state is None or state.is_prefilling or output.finish_reason is not None:
            return False
        generated, collector = state.detokenizer.token_ids, state.queue
        interval, sent = state.stream_interval, state.sent_tokens_offset
        if collector.output is not None:
            return False
        if statistics is not None:
            processor._update_stats_from_output(state, output, timestamp, statistics)  # noqa: SLF001
        new = output.new_token_ids
        generated += new
        if interval > 1:  # the rule of vLLM's `RequestState.make_request_output`
            if sent and len(generated) - sent < interval:
                return True
            new, state.sent_tokens_offset = generated[sent:], len(generated)
        if new:
            tokens += new
            collector.ready.set()
        return True

    def processed(outputs: Sequence[Any], timestamp: Any = None, statistics: Any = None, **options: Any) -> Any:
        try:
            others = [output for output in outputs if not is_passed_on(output, timestamp, statistics)]
        except AttributeError:  # at the first output that could be passed on: none has been
            logger.exception("Tokens take longer: vLLM's output processor has changed")
            processor.process_outputs, others = process, list(outputs)
        return process(others, timestamp, statistics, **options)

    processor.process_outputs = processed

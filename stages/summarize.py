"""Summarize: turn the request of a compaction into one that asks the model for a summary of the conversation.

``converse`` marks such a request with `Purpose.summarizes`; all others pass unchanged.  The same model writes the
summary, without tools and with little effort.  A stage in place of this one may ask in another way, or set
`Purpose.summary` to a summary of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from penstock.pipeline.core import Pipeline, Stage, source_of
from penstock.pipeline.errors import ContextTooLong
from penstock.pipeline.frames import Prompt, ResolvedRequest, Sampling, replace, with_facts
from penstock.pipeline.protocol.items import CallOutput, InputText, Message, ServedCall
from penstock.pipeline.protocol.tools import Toolset
from penstock.pipeline.tasks import apart

INSTRUCTION = """\
Write a summary of the conversation so far. It will replace the conversation: besides it, you will know only the \
user's own messages. Write only the summary, as plain text. Do not answer the latest message, and call no tools.

Keep what is needed to go on without asking again:
- the user's wishes in their latest form, and the limits that the user has set;
- what was done, found out and decided, why, and what has failed;
- names, paths, commands, numbers, ids and quotations that are still needed, exactly;
- the state now: what has changed, what is in progress, and what waits for whom;
- the next steps, in order."""

MOST_SUMMARY_TOKENS = 8192
"""The most tokens of a summary, thoughts included."""

LEFT_OUT = "This output was too long to be kept."
"""The text that the model reads in place of an output that is left out."""

_CHARACTERS = 3
"""The characters of a token, if an output has few for each; one that has more frees more tokens than needed."""


@dataclass(frozen=True)
class Summarize:
    """Ask for summaries that fit into ``context_length`` with their conversations, which ``render`` measures.

    A conversation that is too long loses the outputs of its tools first, the oldest before others, and then its oldest
    items.  Without ``render`` nothing is measured.
    """

    context_length: int
    render: Stage[ResolvedRequest, Prompt] | None = None

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
        """Yield one request for each."""
        async for request in source:
            yield await self._fitted(self._asking(request)) if request.facts.purpose.summarizes else request

    @property
    def _room(self) -> int:
        return min(MOST_SUMMARY_TOKENS, self.context_length // 4)

    def _asking(self, request: ResolvedRequest) -> ResolvedRequest:
        facts = request.facts
        asked = Message(f"{Message.id_prefix}_summary", "completed", "user", (InputText(INSTRUCTION),))
        sampling = Sampling(facts.sampling.temperature, facts.sampling.top_p, self._room, seed=facts.sampling.seed)
        response = replace(
            facts.response, reasoning=replace(facts.response.reasoning, effort="low"), text={}, truncation="auto"
        )
        return with_facts(
            request,
            response=response,
            input=(*facts.input, asked),
            sampling=sampling,
            tools=Toolset(),
            structured={},
            updates={},
            include=(),
            wants_raw_messages=False,
        )

    async def _fitted(self, request: ResolvedRequest) -> ResolvedRequest:
        """Return the request without as many of its oldest outputs as it takes to fit."""
        outputs, left_out = await apart(request.is_long, _outputs, request), dict[str, str]()
        while outputs and (excess := await self._excess(request)) > 0:
            while outputs and excess > 0:
                item_id, size = outputs.popleft()
                left_out[item_id] = LEFT_OUT
                excess -= size // _CHARACTERS
            request = replace(request, results={**request.results, **left_out})
        return request

    async def _excess(self, request: ResolvedRequest) -> int:
        """Return the number of tokens that the conversation has too many."""
        if self.render is None:
            return 0
        whole = with_facts(request, response=replace(request.facts.response, truncation="disabled"))
        try:
            async with Pipeline.start("render", self.render).open(source_of([whole])) as prompts:
                length = len((await anext(prompts)).token_ids)
        except ContextTooLong as error:
            length = error.prompt_tokens
        return length - (self.context_length - self._room)


def _outputs(request: ResolvedRequest) -> deque[tuple[str, int]]:
    """Return the outputs that are longer than their replacement, oldest first: the item's id, and its characters."""
    outputs = deque[tuple[str, int]]()
    for item in request.items:
        if isinstance(item, CallOutput | ServedCall):
            shown = item.text if isinstance(item, CallOutput) else getattr(item, "output", None)
            text = request.results.get(item.id, shown)
            if text and len(text) > len(LEFT_OUT):
                outputs.append((item.id, len(text)))
    return outputs

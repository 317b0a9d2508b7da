"""Render for models with a chat template: a conversation becomes the token ids that the model continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.pipeline.frames import ChatTurn, Prompt, ResolvedRequest
from penstock.pipeline.protocol.items import images_of
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.render.chat.grammar import grammar
from penstock.stages.render.chat.messages import Layout
from penstock.stages.render.chat.rendering import Rendering
from penstock.stages.render.truncation import refuse_excess, room_for_answer, to_drop
from penstock.stages.services.web.image_cache import ImageCache


@dataclass(frozen=True)
class RenderChat:
    """Turns a conversation into the prompt of the next turn, off the event loop.

    ``context_length`` is the number of tokens that prompt and answer may have together.  A longer conversation is
    truncated if the request allows it.  ``images`` fetches images from the web.
    """

    chat: ChatModel
    context_length: int
    images: ImageCache = field(default_factory=ImageCache)

    async def __call__(self, source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[Prompt, None]:
        """Yield one prompt for each conversation.

        Raises `InvalidRequest` for what the template refuses, and `ContextTooLong` for far too many tokens.
        """
        async for request in source:
            items = request.items
            urls = [image.image_url for item in items for image in images_of(item)]
            images = dict(zip(urls, await self.images.resolve_all(urls), strict=True))
            yield await asyncio.to_thread(self._prompt, request, images)

    def _prompt(self, request: ResolvedRequest, images: Mapping[str, str]) -> Prompt:
        may_drop = request.facts.response.truncation == "auto"
        rendering = Rendering(self.chat, request, images, None if may_drop else self.context_length)
        layout, encoded = rendering.prompt(rendering.items)
        if may_drop:
            limit = self.context_length - room_for_answer(request.facts.sampling.max_tokens, self.context_length)
            layout, encoded = _truncated(rendering, layout, encoded, limit)
        refuse_excess(len(encoded), self.context_length)
        token_ids = tuple(encoded)
        rules, calls = grammar(self.chat, request, rendering.functions, token_ids, continues=layout.continues)
        return Prompt(
            facts=request.facts,
            token_ids=token_ids,
            stop_token_ids=self.chat.stop_token_ids,
            grammar=rules,
            raw_messages=(self.chat.raw_message(token_ids),) if request.facts.wants_raw_messages else None,
            images=layout.images,
            chat=ChatTurn(variables=rendering.variables, calls=calls, continues=layout.continues),
        )


def _truncated(
    rendering: Rendering, layout: Layout, token_ids: Sequence[int], limit: int
) -> tuple[Layout, Sequence[int]]:
    """Return the prompt without its oldest items, as many as it takes to fit ``limit``, or as may be dropped.

    Only the rendered template shows how many tokens an item takes, so more items may have to go after each attempt.
    """
    if len(token_ids) <= limit:
        return layout, token_ids
    sizes = list(map(rendering.size, rendering.items))
    dropped = frozenset[int]()
    while len(token_ids) > limit:
        gone = sum(sizes[at] for at in dropped)
        more = to_drop(rendering.items, sizes, gone + len(token_ids) - limit)
        if more == dropped:
            break
        dropped = more
        layout, token_ids = rendering.prompt([item for at, item in enumerate(rendering.items) if at not in dropped])
    return layout, token_ids

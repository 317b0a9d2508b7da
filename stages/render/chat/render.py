"""Render for models with a chat template: a conversation becomes the token ids that the model continues."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.pipeline import metrics
from penstock.pipeline.errors import ContextTooLong, InvalidPrompt
from penstock.pipeline.frames import ChatTurn, Prompt, ResolvedRequest
from penstock.pipeline.protocol.items import Item, images_of
from penstock.pipeline.tasks import in_thread
from penstock.services.web.image_cache import ImageCache
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.images import NoImage
from penstock.stages.render.blind import without_images
from penstock.stages.render.chat.grammar import grammar
from penstock.stages.render.chat.messages import ChatConversation
from penstock.stages.render.chat.rendering import Rendering
from penstock.stages.render.constraint import placing_tools
from penstock.stages.render.raw import raw_prompt
from penstock.stages.render.truncation import room_for_answer, to_drop


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
            seen, images = await self._seen(request)
            yield await in_thread(self._prompt, seen, images)

    async def _seen(self, request: ResolvedRequest) -> tuple[ResolvedRequest, Mapping[str, str]]:
        """Return the request with the reasons why images are not shown, and all others as data URLs, by URL.

        Raises `InvalidRequest` if the client sends such an image now.
        """
        if not self.chat.sees_images:
            return without_images(request), {}
        items, said = request.items, frozenset(request.said)
        urls = [image.url for item in items for image in images_of(item)]
        urls += [url for images in request.returned.values() for url in images]
        now = {image.url for item in items if item.id in said for image in images_of(item)}
        images, unseen = dict[str, str](), dict[str, str]()
        for url, image in zip(urls, await self.images.resolve_all(urls, frozenset(urls) - now), strict=True):
            if isinstance(image, str) and image not in request.unseen:
                images[url] = image
                continue
            unseen[url] = str(image) if isinstance(image, NoImage) else request.unseen[image]
            if url in now:
                raise InvalidPrompt(unseen[url], param="input")
        return replace(request, unseen={**request.unseen, **unseen}) if unseen else request, images

    @metrics.RENDER_SECONDS.time()
    def _prompt(self, request: ResolvedRequest, images: Mapping[str, str]) -> Prompt:
        if (raw := request.facts.raw) is not None:
            return raw_prompt(request.facts, raw, self.chat.vocabulary, self.context_length)
        rendering = Rendering(self.chat, request, images, self.context_length)
        if request.facts.response.truncation == "auto":
            limit = self.context_length - room_for_answer(request.facts.sampling.max_tokens, self.context_length)
            conversation, encoded = _truncated(rendering, limit)
        else:
            conversation, encoded = rendering.prompt(rendering.items)
        token_ids = tuple(encoded)
        with placing_tools(request.facts.response):
            rules, calls = grammar(
                self.chat,
                request,
                rendering.functions,
                token_ids,
                continues=conversation.continues,
                thinks=conversation.thinks,
            )
        return Prompt(
            facts=request.facts,
            token_ids=token_ids,
            stop_token_ids=self.chat.stop_token_ids,
            grammar=rules,
            raw_messages=(self.chat.raw_message(token_ids),) if request.facts.wants_raw_messages else None,
            images=conversation.images,
            chat=ChatTurn(rendering.variables, calls, conversation.continues, conversation.thinks),
        )


def _truncated(rendering: Rendering, limit: int) -> tuple[ChatConversation, Sequence[int]]:
    """Return the prompt without its oldest items, as many as it takes to fit ``limit``, or as may be dropped.

    Only the rendered template shows how many tokens an item takes, so more items may have to go after each attempt.
    """
    prompt = _attempt(rendering, rendering.items)
    if prompt and len(prompt[1]) <= limit:
        return prompt
    sizes = rendering.sizes()
    dropped = frozenset[int]()
    while prompt is None or len(prompt[1]) > limit:
        gone = sum(sizes[at] for at in dropped)
        length = sum(sizes) if prompt is None else gone + len(prompt[1])
        more = to_drop(rendering.items, sizes, length - limit)
        kept = [item for at, item in enumerate(rendering.items) if at not in more]
        if more == dropped:
            return prompt or rendering.prompt(kept)  # raises `ContextTooLong` again
        dropped, prompt = more, _attempt(rendering, kept)
    return prompt


def _attempt(rendering: Rendering, items: Sequence[Item]) -> tuple[ChatConversation, Sequence[int]] | None:
    """Return the prompt with these items, or None if it is far too long."""
    try:
        return rendering.prompt(items)
    except ContextTooLong:
        return None

"""What the gateway takes from the renderer of vLLM (0.29.0): its tokenizer, and where chats become ids."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any


def special_tokens(renderer: Any) -> dict[str, int] | None:
    """Return the tokens at which the renderer's tokenizer cuts every text, or None when it can't be told.

    Tokens that swallow white space around them, or match only whole words, depend on their neighbours; a
    tokenizer that marks the beginning of a text (SentencePiece) treats its first piece apart.
    """
    tokenizer = renderer.tokenizer
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return None
    added = tokenizer.added_tokens_decoder
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    return {token.content: number for number, token in added.items() if not token.normalized} or None


def plain_encoder(renderer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Return a function from texts to ids without special tokens added; blocking."""
    tokenizer = renderer.tokenizer

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    return encode


def hook_tokenizer(
    renderer: Any, render: Callable[[str, Callable[[], Awaitable[list[int]]]], Awaitable[list[int]]]
) -> None:
    """Let `render` turn chat texts into ids; it gets the text and the full tokenization to fall back on.

    Texts that need more than ids (offsets, truncation, special tokens added) go the renderer's own way.
    """
    full = renderer._tokenize_prompt_async

    async def tokenize(prompt: Any, params: Any) -> Any:
        options = params.get_encode_kwargs()
        if (
            params.add_special_tokens
            or params.truncate_prompt_tokens is not None
            or renderer._wants_offsets(prompt, params)
        ):
            return await full(prompt, params)

        async def whole() -> list[int]:
            ids: list[int] = (await full(prompt, params))["prompt_token_ids"]
            return ids

        ids = await render(prompt["prompt"], whole)
        limit = options.get("max_length")
        # Too long either way: the renderer's own path says so in its own words.
        if limit is not None and len(ids) > limit:
            return await full(prompt, params)
        built = renderer._build_tokens_prompt(ids, prompt)
        # vLLM's is a copy. The list itself tells later on that these are ids that were rendered here.
        built["prompt_token_ids"] = ids
        return built

    renderer._tokenize_prompt_async = tokenize


def executor_of(renderer: Any) -> Any:
    """Return the pool on which the renderer's blocking work runs."""
    return renderer._executor


def hidden_tokens(renderer: Any) -> frozenset[int]:
    """Return the tokens that no text shows unless a request asks for special tokens."""
    return frozenset(renderer.tokenizer.all_special_ids)


def decode(renderer: Any, ids: Sequence[int], *, hides: bool = False) -> str:
    """Return the text of generated ids; hides: without special tokens."""
    text: str = renderer.tokenizer.decode(
        list(ids), skip_special_tokens=hides, clean_up_tokenization_spaces=False
    )
    return text

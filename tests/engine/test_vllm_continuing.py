"""What makes an answer that is taken up from another engine exact, on vLLM's own code without an engine."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvloop.engine.settings import smollm2_dir
from kvloop.engine.vllm import priming
from kvloop.engine.vllm.continuing import PromptText

# torch warns of itself when it is imported.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = "The llama 🦙 says naïve things, 例えば こんにちは, and ends."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir())


def text_after(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int], *, whole: bool = False) -> str:
    """Return an answer's text as vLLM streams it and the adapter passes it on."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    stream = IncrementalDetokenizer.from_new_request(tokenizer, request)
    if not whole:
        priming.shorten(stream, prompt)
    prompt_text = PromptText(prompt, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    parts = []
    for token in answer:
        stream.update([token], False)
        parts.append(prompt_text.less(stream.get_next_output_text(finished=False, delta=True)))
    return "".join(parts)


def test_text_goes_on_wherever_the_answer_was_broken_off(tokenizer: Any) -> None:
    prompt = tokenizer.encode("<|im_start|>user\nA story, please.\n")
    answer = tokenizer.encode(TEXT)
    unfinished = 0
    for cut in range(1, len(answer)):
        before, rest = answer[:cut], answer[cut:]
        first = text_after(tokenizer, prompt, before)
        assert first + text_after(tokenizer, [*prompt, *before], rest) == TEXT, cut
        unfinished += tokenizer.decode(before).endswith("\ufffd")
    assert unfinished > 5, "some cuts are in the middle of a character"


@pytest.mark.parametrize(
    "text",
    ["", " ", "a", ".", " word", "word", "\n", "\n\n  x", "<|im_end|>", "🦙", " 🦙", "例", "<|im_end|>\n"],
)
def test_the_prompts_end_tells_the_same_text_as_all_of_it(tokenizer: Any, text: str) -> None:
    answer = tokenizer.encode(TEXT)
    for end in (
        "assistant\n",
        " and then",
        "例え",
        "<|im_end|>" * 30,
        "🦙🦙🦙🦙🦙🦙",
        " " * 40,
        "1 2 3 4 5 6",
    ):
        prompt = tokenizer.encode("<|im_start|>user\nA story, please. " * 4 + end + text)
        for cut in (0, 1, 2, 5):
            whole = text_after(tokenizer, prompt, answer[cut:], whole=True)
            assert text_after(tokenizer, prompt, answer[cut:]) == whole


def test_a_long_prompt_is_primed_by_its_end() -> None:
    decode = "".join
    prompt = [str(number % 10) for number in range(100)]
    assert priming.enough(prompt, decode) == prompt[-6:]  # type: ignore[arg-type, comparison-overlap]
    assert priming.enough(prompt[:6], decode) is None  # type: ignore[arg-type]
    assert priming.enough([*prompt, *[" "] * 9], decode) == ["9", *[" "] * 9]  # type: ignore[arg-type, comparison-overlap, list-item]
    assert priming.enough([*prompt, *[" "] * 24], decode) is None  # type: ignore[arg-type, list-item]
    assert priming.enough([*prompt, "\ufffd"], decode) is None  # type: ignore[arg-type, list-item]


def test_repetition_penalty_counts_the_prompt_like_the_answer() -> None:
    import torch
    from vllm.v1.sample.ops.penalties import apply_all_penalties

    torch.manual_seed(0)
    vocab = 64
    logits = torch.randn(1, vocab)
    prompt, answer = [3, 5, 7, 5], [9, 3, 11, 12]
    zero, penalty = torch.zeros(1), torch.tensor([1.3])

    def penalized(first: list[int], then: list[int]) -> torch.Tensor:
        return apply_all_penalties(logits.clone(), torch.tensor([first]), zero, zero, penalty, [then])

    whole = penalized(prompt, answer)
    assert not torch.equal(whole, logits)
    for cut in range(len(answer) + 1):
        assert torch.equal(whole, penalized(prompt + answer[:cut], answer[cut:]))


def test_only_a_detokenizer_that_knows_the_prompt_may_tell_half_an_answer(tokenizer: Any) -> None:
    assert priming.is_exact(tokenizer)
    assert not priming.is_exact(object())
    assert not priming.is_exact(None)

"""What makes an answer that is taken up from another engine exact, on vLLM's own code without an engine."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvloop.engine.settings import smollm2_dir
from kvloop.engine.vllm.continuing import PromptText

# torch warns of itself when it is imported.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = "The llama 🦙 says naïve things, 例えば こんにちは, and ends."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir())


def text_after(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> str:
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

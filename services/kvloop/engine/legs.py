"""Which sampling parameters reach which leg of a turn. The only place that decides it."""

from kvloop.v1alpha1 import sampling_pb2


def prefill_leg(sampling: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """Return what the prefill leg samples with: one greedy token that nobody sees.

    Every limit, stop, penalty, constraint and alternative belongs to the answer, so to the decode leg. EOS
    is ignored because vLLM hands KV over only from a request that ended by length. prompt_logprobs stay:
    only the leg that computes the prompt can give them.
    """
    leg = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    if sampling.HasField("prompt_logprobs"):
        leg.prompt_logprobs = sampling.prompt_logprobs
        leg.detokenize = not sampling.HasField("detokenize") or sampling.detokenize
    return leg


def decode_leg(sampling: sampling_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """Return what the decode leg samples with: all but prompt_logprobs, which would recompute the prompt."""
    leg = sampling_pb2.SamplingParams()
    leg.CopyFrom(sampling)
    leg.ClearField("prompt_logprobs")
    return leg

"""Which sampling parameters reach which leg of a turn. The only place that decides it."""

from kvloop.v1alpha1 import sampling_pb2


def prefill_leg(
    sampling: sampling_pb2.SamplingParams, *, first_token: bool = False
) -> sampling_pb2.SamplingParams:
    """Return what the prefill leg samples with.

    With first_token, as the decode leg, for one token. Otherwise one greedy token that nobody sees: every
    limit, stop, penalty, constraint and alternative belongs to the answer, so to the decode leg; EOS is
    ignored because vLLM hands KV over only from a request that ended by length. prompt_logprobs stay in any
    case: only the leg that computes the prompt can give them.
    """
    if first_token:
        leg = sampling_pb2.SamplingParams()
        leg.CopyFrom(sampling)
        leg.max_tokens = 1
        if leg.HasField("min_tokens"):
            leg.min_tokens = min(1, leg.min_tokens)
        # One token can't contain what is looked for in the text of several.
        leg.ClearField("stop")
        return leg
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

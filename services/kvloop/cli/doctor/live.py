"""A read from D to P as turns make it: a short one and one that goes on from it, both through the router."""

import secrets
from collections.abc import Sequence

from kvloop.cli.client import spoken
from kvloop.cli.doctor.findings import Finding, fail, ok, warn
from kvloop.cli.errors import CommandFailed
from kvloop.client import Client
from kvloop.v1alpha1 import sampling_pb2, turn_pb2, worker_pb2

NAME = "live-read"
LAYOUT = "kv-layout"

_CUT = 4

_REMEDIES = {
    "disabled": "set reuse on the router",
    "not_found": "check that the decode workers publish to the routers' store (see registry and store)",
    "expired": "raise decoder_kv_blocks_ttl",
    "epoch": "a decode worker restarted meanwhile; try again",
    "diverged": "the answer's tokens did not come back as they were; report this",
    "below_threshold": "lower kv_recompute_threshold",
    "directory_unavailable": "check the store's distance and load, or raise directory_timeout_ms",
    "decode_unavailable": "let the prefill worker reach the decode worker: set its decode_endpoints, or the "
    "store that both register in",
    "read_failed": "look at the prefill worker's log; check side-channel and transport",
    "incompatible": "see compatibility and bidirectional",
    "costlier": "nothing is wrong: by the router's measured costs, so few tokens are computed faster",
    "local": "nothing is wrong: the prefill worker had it all in its own prefix cache",
}


_LATENCY_MS = 10.0
_FLOOR_BYTES_PER_MS = 1e6
"""A read between GPUs that takes longer than its latency and this is slow: TCP, or copies through hosts."""


async def check_live_read(
    client: Client, infos: Sequence[worker_pb2.WorkerInfo], *, gpus: int
) -> list[Finding]:
    """Play two tiny turns and judge the second; what they leave is let go of. gpus: of this host."""
    threshold = max((info.kv_recompute_threshold for info in infos), default=64)
    block = max((info.block_size for info in infos), default=32)
    vocabulary = min((info.vocab_size for info in infos), default=1000)
    longest = min((info.max_model_len for info in infos), default=2048)
    # Even where P still has the prompt in its prefix cache, the answer alone is worth a read.
    answer = threshold + 2 * block + _CUT
    if answer + 4 * block >= longest:
        room = warn(
            NAME,
            f"a read takes more tokens than max_model_len ({longest}) leaves room for",
            "lower kv_recompute_threshold",
        )
        return [room]
    dice = secrets.SystemRandom()

    def some(count: int) -> list[int]:
        return [dice.randrange(3, vocabulary) for _ in range(count)]

    conversation = f"kvloop-doctor-{secrets.token_hex(8)}"
    prompt = some(2 * block)
    try:
        with spoken():
            got, _ = await _play(client, conversation, prompt, answer)
            # Not the whole of what is held: a decode worker could go on from that without any read.
            history = [*prompt, *got][:-_CUT]
            _, summary = await _play(client, conversation, [*history, *some(block)], 1)
            await client.end(conversation)
    except CommandFailed as error:
        return [fail(NAME, f"a turn failed: {error}", "see the other findings, and the router's log")]
    layout = judge_layout(summary.reuse, block, gpus)
    return [judge(summary, gpus), *([layout] if layout is not None else [])]


def judge(summary: turn_pb2.Summary, gpus: int) -> Finding:
    """Return what a turn that should have read back says. gpus: of this host; without any, TCP will do."""
    reuse = summary.reuse
    verdict = turn_pb2.Verdict.Name(reuse.verdict).removeprefix("VERDICT_").lower()
    reason = turn_pb2.ReuseReason.Name(reuse.reason).removeprefix("REUSE_REASON_").lower()
    if verdict == "readback":
        read = reuse.readback
        speed = f", {read.bytes / read.duration_ms / 1e6:.2f} GB/s" if read.duration_ms > 0 else ""
        text = (
            f"{reuse.tokens.readback} tokens, {read.bytes} bytes in {read.duration_ms:.1f} ms{speed}, "
            f"from {summary.decode_worker} to {summary.prefill_worker}"
        )
        if gpus and read.duration_ms > _LATENCY_MS + read.bytes / _FLOOR_BYTES_PER_MS:
            return warn(
                NAME,
                f"{text}: slow for GPUs, as over TCP or through the hosts' memory",
                "see transport here and on both workers' hosts (UCX_TLS, UCX_NET_DEVICES, FI_PROVIDER); try "
                "again when they are idle",
            )
        return ok(NAME, text)
    if verdict == "direct":
        return warn(
            NAME,
            "the decode worker went on from what it held, so nothing had to be read back",
            "that is the fastest way; to try a read, run again while the decode worker is busy",
        )
    make = warn if reason in {"local", "costlier"} else fail
    return make(
        NAME,
        f"the second turn was computed anew: {reason}",
        _REMEDIES.get(reason, "see the other findings"),
    )


def judge_layout(reuse: turn_pb2.Reuse, block_size: int, gpus: int) -> Finding | None:
    """Return how KV really lies in the pools, by what a read moved; None when nothing was read."""
    read, blocks = reuse.readback, round(reuse.tokens.readback / block_size)
    if not (read.bytes and read.descriptors and blocks):
        return None
    ranges = max(1, round(read.descriptors / blocks))
    size = read.bytes / read.descriptors / 1024
    block = f"{read.bytes / blocks / 1024:.0f} KiB per block of {block_size} tokens"
    if ranges == 1:
        return ok(LAYOUT, f"{block}, in one piece: all layers of a block lie together")
    text = f"{block}, in {ranges} pieces of {size:.0f} KiB: layer by layer"
    if not gpus:
        # Without GPUs the engine has no other layout.
        return ok(LAYOUT, text)
    return warn(
        LAYOUT,
        text,
        "with vLLM 0.26 leave VLLM_KV_CACHE_LAYOUT and VLLM_USE_V2_MODEL_RUNNER to kvloop, from 0.29 on try "
        "VLLM_KV_CACHE_LAYOUT=BHLNC on all workers, and use an attention backend that has the layout",
    )


async def _play(
    client: Client, conversation: str, prompt: list[int], max_tokens: int
) -> tuple[list[int], turn_pb2.Summary]:
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    ids: list[int] = []
    summary = turn_pb2.Summary()
    # Whether it would pay is not asked here.
    turn = client.turn(prompt, conversation_id=conversation, sampling=sampling, read_back=True)
    async for event in turn:
        ids += event.token_ids
        summary = event.summary or summary
    return ids, summary

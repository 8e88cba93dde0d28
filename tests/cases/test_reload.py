"""C5: other weights under the same name. What the old ones computed is found nowhere any more."""

import asyncio
from pathlib import Path

import pytest
from cases_kit import Case, Stack, failure_of

from kvloop.v1alpha1 import decode_service_pb2, prefill_service_pb2

WEIGHTS = "model.safetensors"
RELOAD_S = 60.0


def change_weights(model: Path | None) -> None:
    """Put other weights under the model's name: keys and values of the first layers come out differently."""
    if model is None:
        return
    from safetensors.torch import load_file, save_file

    weights = load_file(model / WEIGHTS)
    for name, tensor in weights.items():
        if ".layers.0." in name and ("k_proj" in name or "v_proj" in name):
            weights[name] = tensor * 1.7
    changed = model / f"changed-{WEIGHTS}"
    save_file(weights, changed, metadata={"format": "pt"})
    changed.rename(model / WEIGHTS)


def restore_weights(model: Path | None) -> None:
    if model is not None:
        (model / WEIGHTS).unlink()
        original = (model / "config.json").resolve().with_name(WEIGHTS)
        (model / WEIGHTS).symlink_to(original)


async def reload(stack: Stack, version: str) -> list[str]:
    """Have all workers load what lies under the model's name now; returns their epochs."""
    p = prefill_service_pb2.PrefillServiceReloadWeightsRequest(weights_version=version)
    d = decode_service_pb2.DecodeServiceReloadWeightsRequest(weights_version=version)
    calls = [end.prefill.ReloadWeights(p, timeout=RELOAD_S) for end in stack.prefills.values()]
    calls += [end.decode.ReloadWeights(d, timeout=RELOAD_S) for end in stack.decodes.values()]
    return [answer.epoch for answer in await asyncio.gather(*calls)]


@pytest.mark.parametrize("router", ["bare", "direct"])
@pytest.mark.case("C5", "RECOMPUTE; DIRECT not offered")
async def test_weights_reloaded(case: Case, history: list[int], suffix: list[int]) -> None:
    stack = case.stack
    one = await case.turn(history)
    assert one.summary.lease.num_tokens
    prompt = [*history, *one.ids, *suffix]
    before = await stack.cold(prompt)
    change_weights(stack.model)
    try:
        epochs = await reload(stack, "two")
        assert len(set(epochs)) == len(epochs)
        await stack.ready()
        assert not await stack.leases()
        two = await case.turn(prompt)
        case.expect(two, "RECOMPUTE", ("NOT_FOUND", "EPOCH"), 0)
        assert two.sources.computed == len(prompt)
        assert two.ids != before.ids or two.logprobs != before.logprobs, "the weights are the old ones"
        three = await case.turn([*prompt, *two.ids, *suffix])
        case.expect(three, "READBACK" if case.router == "bare" else "DIRECT", "PROVEN")
        case.tell(two)
        await case.finish()
    finally:
        restore_weights(stack.model)
        await reload(stack, "one")
        await stack.ready()


@pytest.mark.parametrize("router", ["bare"])
@pytest.mark.case("bad", "a clear status")
@pytest.mark.parametrize("version", ["", "v" * 65])
async def test_versions_that_are_none(case: Case, version: str) -> None:
    request = decode_service_pb2.DecodeServiceReloadWeightsRequest(weights_version=version)
    failure = await failure_of(case.stack.decodes["d1"].decode.ReloadWeights(request, timeout=5))
    assert (failure.reason_name, failure.field) == ("INVALID_FIELD", "weights_version")

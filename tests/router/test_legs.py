"""What the legs' requests are made of."""

import pytest

from kvloop.router.legs import DecodeRequest, PrefillRequest, whole
from kvloop.v1alpha1 import turn_pb2


@pytest.mark.parametrize("size", [0, 4, 124, 128, 16_380, 16_384, 400_000])
@pytest.mark.parametrize("kind", [PrefillRequest, DecodeRequest])
def test_a_request_gets_its_prompt_as_if_it_had_been_in_it(
    kind: type[PrefillRequest | DecodeRequest], size: int
) -> None:
    prompt = bytes(n % 251 for n in range(size))
    rest = {"request_id": "r", "scope": turn_pb2.TurnScope(scope=b"s", turn_start_us=7), "priority": -1}
    made = kind.FromString(whole(kind(**rest), prompt))
    assert made == kind(**rest, prompt_token_ids=prompt)

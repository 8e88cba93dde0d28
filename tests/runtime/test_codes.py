"""What a call's code means, whoever made it."""

import grpc
import pytest

from kvloop.runtime.errors import Reason, code_of, from_rpc_error

Code = grpc.StatusCode


def ended(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "details", "means"),
    [
        (Code.INTERNAL, "Internal error from Core", Code.UNAVAILABLE),
        (Code.INTERNAL, "of the other end's", Code.INTERNAL),
        (Code.DEADLINE_EXCEEDED, "Internal error from Core", Code.DEADLINE_EXCEEDED),
    ],
)
def test_a_write_that_failed_is_a_peer_that_is_away(
    code: grpc.StatusCode, details: str, means: grpc.StatusCode
) -> None:
    error = ended(code, details)
    assert code_of(error) is means
    failure = from_rpc_error(error, Reason.ERROR_REASON_WORKER_FAILED)
    assert failure.message == f"peer answered {means.name}"


def test_an_error_without_a_code() -> None:
    assert code_of(grpc.RpcError()) is None

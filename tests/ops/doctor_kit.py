"""Workers as the doctor sees them."""

from kvloop.cli.doctor.workers import Seen
from kvloop.v1alpha1 import worker_pb2


def vllm_worker(*backends: str, endpoint: str = "127.0.0.1:1", side_channel: str = "") -> Seen:
    info = worker_pb2.WorkerInfo(
        worker_id="d0", engine="vllm", transfer_backends=backends, side_channel=side_channel
    )
    return Seen("decode", endpoint, info)

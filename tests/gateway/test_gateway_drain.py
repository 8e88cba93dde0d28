"""A gateway that is told to stop ends what runs, and takes nothing new."""

import json
import threading
from pathlib import Path

import grpc
import httpx
import pytest
from gateway_kit import Gateway, wait_until
from gateway_router import FakeRouter

from kvloop.runtime.errors import Reason, from_rpc_error
from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import chat_service_pb2_grpc

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

HI = [{"role": "user", "content": "hi"}]
TURNS = {
    "/v1/chat/completions": {"model": "smollm2", "messages": HI},
    "/v1/completions": {"model": "smollm2", "prompt": "hi"},
    "/v1/responses": {"model": "smollm2", "input": "hi"},
    "/v1/messages": {"model": "smollm2", "messages": HI, "max_tokens": 5},
}


def test_what_runs_ends_well_and_new_turns_are_refused(
    router: FakeRouter, model_dir: Path, tmp_path: Path
) -> None:
    settings = {"listen": "127.0.0.1:0", "chat_listen": "127.0.0.1:0", "router": f"127.0.0.1:{router.port}"}
    gateway = Gateway({**settings, "model": str(model_dir), "served_model_name": "smollm2"}, tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def hold(_turn: object) -> None:
        begun.set()
        assert go_on.wait(60)

    router.scripts += [router.say("Hello there.", pause=hold)]
    body = {**TURNS["/v1/chat/completions"], "stream": True}
    try:
        with (
            httpx.Client(base_url=gateway.url, timeout=60) as http,
            grpc.insecure_channel(gateway.chat) as channel,
            http.stream("POST", "/v1/chat/completions", json=body) as running,
        ):
            assert running.status_code == 200
            assert begun.wait(30)
            gateway.process.terminate()
            wait_until(lambda: http.get("/health").status_code == 503)
            for path, asked in TURNS.items():
                refused = http.post(path, json=asked)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
                assert refused.headers["x-kvloop-reason"] == "draining"
                error = refused.json()["error"]
                assert error["message"] == "this gateway is going away"
                assert error["type"] == (
                    "overloaded_error" if path == "/v1/messages" else "Service Unavailable"
                )
            stub = chat_service_pb2_grpc.ChatServiceStub(channel)
            chat = pb.ChatRequest(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")])
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Chat(chat, timeout=30))
            failure = from_rpc_error(caught.value, Reason.ERROR_REASON_UNSPECIFIED)
            assert failure.reason == Reason.ERROR_REASON_DRAINING
            assert failure.retry_after_s == 1
            go_on.set()
            events = [line[6:] for line in running.iter_lines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        said = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        assert "".join(delta.get("content") or "" for delta in said) == "Hello there."
        assert len(router.turns) == 1
    finally:
        go_on.set()
        assert gateway.stop() == 0

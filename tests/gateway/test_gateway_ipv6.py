"""Both doors, and the way to the router, over IPv6."""

from pathlib import Path

import grpc
import httpx
import pytest
from gateway_kit import Gateway
from gateway_router import FakeRouter
from tokenizers import Tokenizer

from kvloop.v1alpha1 import chat_service_pb2 as pb
from kvloop.v1alpha1 import chat_service_pb2_grpc

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_ipv6_everywhere(tokenizer: Tokenizer, model_dir: Path, tmp_path: Path) -> None:
    router = FakeRouter(tokenizer, host="[::1]")
    settings = {"listen": "[::1]:0", "chat_listen": "[::1]:0", "router": f"[::1]:{router.port}"}
    gateway = Gateway({**settings, "model": str(model_dir), "served_model_name": "smollm2"}, tmp_path)
    try:
        assert gateway.url.startswith("http://[::1]:")
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there."
        with grpc.insecure_channel(gateway.chat) as channel:
            message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")
            stub = chat_service_pb2_grpc.ChatServiceStub(channel)
            *deltas, last = stub.Chat(pb.ChatRequest(messages=[message]), timeout=60)
        assert "".join(one.delta.content for one in deltas) == "Hello there."
        assert last.HasField("summary")
    finally:
        assert gateway.stop() == 0
        router.stop()

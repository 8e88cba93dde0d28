"""The routers, or gateways, that a client knows: one channel each, one of them in use until it fails."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from kvloop.runtime.channels import open_channel
from kvloop.v1alpha1 import chat_service_pb2_grpc, router_service_pb2_grpc

if TYPE_CHECKING:
    Stub = router_service_pb2_grpc.RouterServiceAsyncStub
    ChatStub = chat_service_pb2_grpc.ChatServiceAsyncStub


class Router:
    """One router, or gateway: the services of both."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, server_name: str) -> None:
        self.target = target
        self._channel = open_channel(target, credentials, server_name=server_name)
        self.stub: Stub = router_service_pb2_grpc.RouterServiceStub(self._channel)
        self.chats: ChatStub = chat_service_pb2_grpc.ChatServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection; what goes on over it is cancelled."""
        await self._channel.close()


class Routers:
    """Replicas of one fleet. Connects on first use, on the loop that runs then."""

    def __init__(
        self, targets: Sequence[str], credentials: grpc.ChannelCredentials | None, server_name: str
    ) -> None:
        if not targets:
            raise ValueError("a client needs a router")
        self._targets = tuple(targets)
        self._credentials, self._server_name = credentials, server_name
        self._routers: list[Router] = []
        self._closed = False
        self._used = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._targets)

    @property
    def used(self) -> Router:
        """Return the router in use. Raises RuntimeError once closed."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if not self._routers:
            self._routers = [Router(target, self._credentials, self._server_name) for target in self._targets]
        return self._routers[self._used]

    def leave(self, router: Router) -> None:
        """Use the next router, unless another call has left this one already."""
        if self._routers and router is self._routers[self._used]:
            self._used = (self._used + 1) % len(self._routers)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        routers, self._routers = self._routers, []
        for router in routers:
            await router.close()

"""Options of gRPC channels and servers, in one place, so that pings and sizes agree on both ends."""

import grpc

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long a connection may take to come about (its name notwithstanding); refused ones cost no time.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

# The server pings too, so that a stream of a host that vanished ends: a session must not stay open for good.
# It tolerates pings twice as dense as our channels send them; anything less ends in
# GOAWAY "too_many_pings", which kills every stream of the connection.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Without it a ping that is never answered counts as lost after a minute, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


def open_channel(
    endpoint: str, credentials: grpc.ChannelCredentials | None = None, *, server_name: str = ""
) -> grpc.aio.Channel:
    """Return a channel to host:port, bracketed for IPv6; over TLS with credentials. Connects on first use.

    server_name: whose certificate the server shows, if not endpoint's.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(endpoint, credentials, options=(*CHANNEL_OPTIONS, *named))

"""host:port, in and out."""

import pytest

from kvloop.runtime import endpoints


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051, True),
        ("127.9.9.9:1", "127.9.9.9", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:65535", "::1", 65535, True),
        ("[2001:db8::5]:7", "2001:db8::5", 7, False),
        ("decode-0.decode.svc:7", "decode-0.decode.svc", 7, False),
        ("localhost.example:7", "localhost.example", 7, False),
    ],
)
def test_forms(text: str, host: str, port: int, loopback: bool) -> None:
    endpoint = endpoints.parse(text)
    assert endpoint == (host, port)
    assert str(endpoint) == text
    assert endpoint.is_loopback == loopback


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":",
            ":1",
            "host",
            "host:",
            "host:x",
            "host:-1",
            "host:65536",
            "host:٣",
            "::1:5",
            "[::1]",
            "[::1]5",
        ),
        *("[host]:1", "dns:///host:1", "unix:/x:1", "ho st:1", "-host:1", "host\n:1", "user@host:1", "h/p:1"),
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|brackets"):
        endpoints.parse(text)

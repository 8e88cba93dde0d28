"""Ports that stay free until somebody listens there."""

import socket

import pytest

from kvloop.runtime import ports

HOST = "127.0.0.1"


def test_no_outgoing_connection_takes_it() -> None:
    port = ports.free_port()
    assert port in ports.QUIET
    ports.try_listening(HOST, port)


def test_several_are_different() -> None:
    assert len(set(ports.free_ports(50))) == 50


def test_what_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen(1)
        taken = listening.getsockname()[1]
        monkeypatch.setattr(ports, "_TRIES", 2)
        monkeypatch.setattr(ports, "QUIET", (taken, free := ports.free_port()))
        assert {ports.free_port() for _ in range(20)} == {free}
        monkeypatch.setattr(ports, "_TRIES", 1)
        monkeypatch.setattr(ports, "QUIET", (taken,))
        with pytest.raises(OSError, match="none of the ports tried is free"):
            ports.free_port()

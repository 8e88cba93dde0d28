"""Deadlines of a peer's blocks, on a host whose clocks are a test's."""

import pytest

from kvloop.connector.clocks import DRIFT, JUMP_S, MOST_DRIFT_S, Moment, PeerClocks, now

OFFSET = 1000.0
EXPIRY = 1100.0


class Host:
    """Time passes awake, asleep, or unseen but by the wall clock."""

    def __init__(self) -> None:
        self.counter, self.boot, self.wall = 10.0, 50.0, 1.7e9

    def __call__(self) -> Moment:
        return Moment(self.counter, self.boot, self.wall)

    def awake(self, seconds: float) -> None:
        self.counter += seconds
        self.asleep(seconds)

    def asleep(self, seconds: float) -> None:
        self.boot += seconds
        self.wall += seconds


def left(host: Host, clocks: PeerClocks) -> float:
    return clocks.deadline("e", OFFSET, EXPIRY) - host.counter


def test_right_after_the_handshake_the_offset_is_all() -> None:
    host = Host()
    assert left(host, PeerClocks(host)) == EXPIRY - OFFSET - 10.0


@pytest.mark.parametrize("seconds", [0.1, 30.0, 3600.0])
def test_a_host_that_slept_knows_that_its_peer_did_not(seconds: float) -> None:
    host = Host()
    clocks = PeerClocks(host)
    before = left(host, clocks)
    host.asleep(seconds)
    assert left(host, clocks) == pytest.approx(before - seconds)
    # Another handshake has seen it already.
    assert clocks.deadline("e", OFFSET + seconds, EXPIRY + seconds) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("age", "charged"), [(100.0, 100 * DRIFT), (MOST_DRIFT_S / DRIFT, MOST_DRIFT_S), (1e7, MOST_DRIFT_S)]
)
def test_an_old_comparison_is_charged_for(age: float, charged: float) -> None:
    host = Host()
    clocks = PeerClocks(host)
    before = left(host, clocks)
    host.awake(age)
    assert left(host, clocks) == pytest.approx(before - age - charged)


@pytest.mark.parametrize(("seconds", "jumped"), [(JUMP_S - 0.01, False), (JUMP_S + 0.01, True)])
@pytest.mark.parametrize("seen_by", ["boot", "wall"])
def test_time_that_passed_unseen_since_a_read_began(seen_by: str, seconds: float, jumped: bool) -> None:
    host = Host()
    clocks = PeerClocks(host)
    began = host()
    host.awake(100.0)
    assert not clocks.jumped(began)
    setattr(host, seen_by, getattr(host, seen_by) + seconds)
    assert clocks.jumped(began) == jumped


def test_a_clock_set_back_is_no_time_that_passed() -> None:
    host = Host()
    clocks = PeerClocks(host)
    began = host()
    host.wall -= 3600.0
    assert not clocks.jumped(began)


def test_this_host() -> None:
    first, second = now(), now()
    assert first.counter <= second.counter
    assert first.boot <= second.boot

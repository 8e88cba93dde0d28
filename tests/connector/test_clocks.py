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
        self.paused(seconds)

    def paused(self, seconds: float) -> None:
        """Stand still as a virtual machine does that is stopped from outside."""
        self.wall += seconds


def compared(host: Host) -> PeerClocks:
    clocks = PeerClocks(host)
    clocks.compare("e", OFFSET, host())
    return clocks


def left(host: Host, clocks: PeerClocks) -> float:
    return clocks.deadline("e", EXPIRY) - host.counter


def test_right_after_the_handshake_the_offset_is_all() -> None:
    host = Host()
    assert left(host, compared(host)) == EXPIRY - OFFSET - 10.0


def test_without_a_comparison_every_deadline_has_passed() -> None:
    host = Host()
    clocks = compared(host)
    assert clocks.deadline("another", EXPIRY) == float("-inf")


@pytest.mark.parametrize(
    ("how", "seconds"),
    [("asleep", 0.1), ("asleep", 30.0), ("asleep", 3600.0), ("paused", JUMP_S + 0.1), ("paused", 60.0)],
)
def test_a_host_that_stood_still_knows_that_its_peer_did_not(how: str, seconds: float) -> None:
    host = Host()
    clocks = compared(host)
    before = left(host, clocks)
    getattr(host, how)(seconds)
    assert left(host, clocks) == pytest.approx(before - seconds)
    # Another comparison has seen it already.
    clocks.compare("e", OFFSET + seconds, host())
    assert clocks.deadline("e", EXPIRY + seconds) == pytest.approx(100.0)


def test_time_that_passed_since_the_moment_of_the_comparison_is_charged_though_it_was_noted_later() -> None:
    host = Host()
    clocks, moment = PeerClocks(host), host()
    host.paused(60.0)
    clocks.compare("e", OFFSET, moment)
    assert left(host, clocks) == pytest.approx(EXPIRY - OFFSET - 10.0 - 60.0)


@pytest.mark.parametrize("seconds", [JUMP_S - 0.1, -0.1, -3600.0])
def test_a_wall_clock_that_is_set_right_costs_nothing(seconds: float) -> None:
    host = Host()
    clocks = compared(host)
    before = left(host, clocks)
    host.paused(seconds)
    assert left(host, clocks) == before


@pytest.mark.parametrize(
    ("age", "charged"), [(100.0, 100 * DRIFT), (MOST_DRIFT_S / DRIFT, MOST_DRIFT_S), (1e7, MOST_DRIFT_S)]
)
def test_an_old_comparison_is_charged_for(age: float, charged: float) -> None:
    host = Host()
    clocks = compared(host)
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

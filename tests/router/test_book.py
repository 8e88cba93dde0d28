"""What a router learns of its turns, and what replicas tell each other."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from router_fakes import make_info
from test_workers import ManualClock

from kvloop.metastore.factory import open_store
from kvloop.router import book as book_module
from kvloop.router import learning
from kvloop.router.book import SILENT_S, CostBook
from kvloop.router.costs import Rates, Terms, Work, compute_features, expected
from kvloop.router.learning import REFIT_EVERY, fit
from kvloop.router.settings import RouterSettings
from kvloop.router.workers import Pair, WorkerPool
from kvloop.runtime.clock import SystemClock
from kvloop.v1alpha1 import decode_service_pb2, prefill_service_pb2, worker_pb2

CLOCK = ManualClock()
SETTINGS = RouterSettings(prefill_endpoints=("p:1", "q:1"), decode_endpoints=("d:1", "e:1"))
MIB = 1 << 20


class Around:
    """Workers and turns for a book."""

    def __init__(self) -> None:
        self.pool = WorkerPool(SETTINGS, SystemClock())
        for worker in self.pool.prefill:
            worker.learned(make_info(worker_pb2.WORKER_ROLE_PREFILL, worker.endpoint))
        for worker in self.pool.decode:
            worker.learned(make_info(worker_pb2.WORKER_ROLE_DECODE, worker.endpoint))
        self.served = self.pool.resolve("", "")

    def book(self, clock: ManualClock = CLOCK) -> CostBook:
        return CostBook(SETTINGS, self.pool, clock)

    def rates(self, book: CostBook, prefill: int = 0, decode: int = 0) -> Rates:
        return book.rates(self.served, self.pool.prefill[prefill], self.pool.decode[decode])

    def turn(self, **changes: Any) -> Any:
        """Return a turn of 1000 tokens: 900 read in 30 ms, 100 computed in 50, 10 ms moved, 40 to start."""
        prefilled = prefill_service_pb2.PrefillResponse()
        prefilled.reuse.prefill_ms = 80.0
        prefilled.reuse.tokens.readback, prefilled.reuse.tokens.computed = 900, 100
        prefilled.reuse.readback.duration_ms, prefilled.reuse.readback.bytes = 30.0, 900 * MIB
        prefilled.reuse.readback.descriptors = 90
        decoded = decode_service_pb2.DecodeSummary()
        decoded.handoff.duration_ms, decoded.handoff.bytes, decoded.handoff.descriptors = 10.0, 300 * MIB, 30
        values: dict[str, Any] = {
            "served": self.served,
            "pair": Pair(self.pool.prefill[0], self.pool.decode[0]),
            "holder": self.pool.decode[0],
            "prompt_tokens": 1000,
            "prefilled": prefilled,
            "decoded": decoded,
            "decode_started": 5.0,
            "decode_first_at": 5.05,
            "prefill_alone": True,
            "decode_alone": True,
        }
        return SimpleNamespace(**(values | changes))


async def test_every_number_of_a_turn_is_used() -> None:
    around = Around()
    book = around.book()
    for _ in range(20):
        book.learn(around.turn())
    rates = around.rates(book)
    assert rates.prefill.ms(compute_features(900, 1000)) == pytest.approx(50, rel=0.02)
    assert rates.transfer.ms((1.0, 900.0 * MIB, 90.0)) == pytest.approx(30, rel=0.1)
    assert rates.transfer.ms((1.0, 300.0 * MIB, 30.0)) == pytest.approx(10, rel=0.1)
    assert rates.bytes_per_token == pytest.approx(MIB, rel=0.02)
    assert rates.descriptors_per_token == pytest.approx(0.1, rel=0.02)
    assert rates.first_step_ms == pytest.approx(40, rel=0.02)
    await around.pool.stop()


async def test_a_direct_turn_tells_what_computing_takes_at_d() -> None:
    around = Around()
    book = around.book()
    decoded = decode_service_pb2.DecodeSummary()
    decoded.tokens.d_local, decoded.tokens.computed = 960, 40
    before = around.rates(book)
    for _ in range(20):
        book.learn(around.turn(prefilled=None, decoded=decoded, pair=Pair(None, around.pool.decode[0])))
    after = around.rates(book)
    assert after.decode.ms(compute_features(960, 1000)) == pytest.approx(50, rel=0.02)
    assert after.prefill == before.prefill
    await around.pool.stop()


async def test_an_odd_first_direct_turn_does_not_close_the_way() -> None:
    around, store = Around(), open_store("memory://")
    book, other = around.book(), around.book()
    decoded = decode_service_pb2.DecodeSummary()
    decoded.tokens.d_local, decoded.tokens.computed = 960, 40
    slow = {"prefilled": None, "decoded": decoded, "decode_first_at": 15.0}
    for number in range(REFIT_EVERY):
        assert around.rates(book).decode == around.rates(book).prefill, number
        await book.share(store.estimates)
        await other.share(store.estimates)
        assert around.rates(other).decode == around.rates(other).prefill, number
        book.learn(around.turn(**slow))
    assert around.rates(book).decode.ms(compute_features(960, 1000)) == pytest.approx(10_000, rel=0.02)
    await store.close()
    await around.pool.stop()


class Spells:
    """A history of 24,576 tokens that comes back with 160 new ones, at a D that is now idle and now busy."""

    def __init__(self) -> None:
        self.around, self.clock = Around(), ManualClock()
        self.books = [self.around.book(self.clock)]

    def direct(self, ms: float, book: int = 0) -> None:
        decoded = decode_service_pb2.DecodeSummary()
        decoded.tokens.d_local, decoded.tokens.computed = 24_576, 160
        pair = Pair(None, self.around.pool.decode[0])
        self._learn(book, prefilled=None, decoded=decoded, pair=pair, decode_first_at=5.0 + ms / 1000)

    def read_back(self, book: int = 0) -> None:
        prefilled = prefill_service_pb2.PrefillResponse()
        prefilled.reuse.prefill_ms = 65.0
        prefilled.reuse.tokens.readback, prefilled.reuse.tokens.computed = 24_576, 160
        prefilled.reuse.readback.duration_ms = 25.0
        prefilled.reuse.readback.bytes, prefilled.reuse.readback.descriptors = 24_576 * MIB // 4, 192
        decoded = decode_service_pb2.DecodeSummary()
        decoded.handoff.duration_ms = 6.5
        decoded.handoff.bytes, decoded.handoff.descriptors = 160 * MIB // 4, 2
        self._learn(book, prefilled=prefilled, decoded=decoded, decode_first_at=5.032)

    def _learn(self, book: int, **turn: Any) -> None:
        self.books[book].learn(self.around.turn(prompt_tokens=24_736, **turn))

    def is_open(self, book: int = 0) -> bool:
        costs = expected(Work(24_736, 24_576, at_holder=True), self.around.rates(self.books[book]))
        return costs.direct < costs.readback


async def test_a_bad_spell_does_not_close_the_way_for_good() -> None:
    spells = Spells()
    for _ in range(30):
        spells.direct(56.0)
    for _ in range(30):
        spells.read_back()
    assert spells.is_open()
    for _ in range(400):
        spells.direct(180.0)
    assert not spells.is_open()
    for _ in range(50):
        spells.clock.now += SILENT_S / 50
        spells.read_back()
    assert not spells.is_open()
    spells.clock.now += 1.0
    for _ in range(4):
        spells.read_back()
    assert spells.is_open()
    # The spell goes on: one turn was lost to it.
    for _ in range(4):
        spells.direct(180.0)
    assert not spells.is_open()
    spells.clock.now += SILENT_S + 1.0
    for _ in range(4):
        spells.read_back()
    for _ in range(8):
        assert spells.is_open()
        spells.direct(56.0)
    spells.clock.now += SILENT_S - 1.0
    assert spells.is_open()
    await spells.around.pool.stop()


async def test_what_a_bad_spell_has_told_others_is_tried_too() -> None:
    spells, store = Spells(), open_store("memory://")
    for _ in range(8):
        spells.direct(180.0)
    for _ in range(20):
        spells.read_back()
    await spells.books[0].share(store.estimates)
    spells.books.append(spells.around.book(spells.clock))
    await spells.books[1].share(store.estimates)
    assert not spells.is_open(1)
    spells.clock.now += SILENT_S + 1.0
    spells.read_back(1)
    for _ in range(8):
        assert spells.is_open(1)
        spells.direct(56.0, 1)
    spells.clock.now += SILENT_S - 1.0
    assert spells.is_open(1)
    await store.close()
    await spells.around.pool.stop()


async def test_what_the_shared_table_has_forgotten_is_not_known_any_more() -> None:
    around, store = Around(), open_store("memory://")
    book = around.book()
    group = f"{around.served.name}@{around.served.revision}/{around.served.compatibility}"
    await store.estimates.merge(f"decode/{group}", [500.0, 0.0, 0.0])
    await book.share(store.estimates)
    assert around.rates(book).decode.values == (500.0, 0.0, 0.0)
    await store.close()
    empty = open_store("memory://")
    await book.share(empty.estimates)
    assert around.rates(book).decode == around.rates(book).prefill
    await empty.close()
    await around.pool.stop()


async def test_a_hand_over_tells_the_size_of_kv_until_something_was_read_back() -> None:
    around = Around()
    book = around.book()
    cold = around.turn()
    cold.prefilled.reuse.Clear()
    cold.prefilled.reuse.tokens.computed = 1000
    book.learn(cold)
    assert around.rates(book).bytes_per_token == pytest.approx(0.3 * MIB)
    assert around.rates(book).descriptors_per_token == pytest.approx(0.03)
    for _ in range(20):
        book.learn(around.turn())
        book.learn(cold)
    assert around.rates(book).bytes_per_token == pytest.approx(MIB, rel=0.02)
    await around.pool.stop()


async def test_legs_that_waited_are_no_measurements() -> None:
    around = Around()
    book = around.book()
    before = around.rates(book)
    for _ in range(20):
        book.learn(around.turn(prefill_alone=False, decode_alone=False))
    after = around.rates(book)
    assert (after.prefill, after.first_step_ms) == (before.prefill, before.first_step_ms)
    assert after.transfer != before.transfer
    await around.pool.stop()


async def test_a_pair_without_transfers_is_taken_for_an_average_one() -> None:
    around = Around()
    book = around.book()
    for _ in range(20):
        book.learn(around.turn())
    assert around.rates(book, prefill=1).transfer == around.rates(book, prefill=0).transfer
    await around.pool.stop()


async def test_a_read_tells_of_whom_it_was_read_from() -> None:
    around = Around()
    book = around.book()
    read, handed = (1.0, 900.0 * MIB, 90.0), (1.0, 300.0 * MIB, 30.0)
    for _ in range(20):
        turn = around.turn(holder=around.pool.decode[1])
        turn.prefilled.reuse.readback.duration_ms = 300.0
        book.learn(turn)
    assert around.rates(book, decode=1).transfer.ms(read) == pytest.approx(300, rel=0.02)
    assert around.rates(book, decode=0).transfer.ms(handed) == pytest.approx(10, rel=0.02)
    # A holder that failed meanwhile is none any more.
    other = around.book()
    for _ in range(20):
        other.learn(around.turn(holder=None))
    assert around.rates(other, decode=0).transfer.ms(read) == pytest.approx(30, rel=0.1)
    await around.pool.stop()


async def test_replicas_share_what_they_learn() -> None:
    around, store = Around(), open_store("memory://")
    one, other = around.book(), around.book()
    around.rates(other)
    for _ in range(20):
        one.learn(around.turn())
    await one.share(store.estimates)
    await other.share(store.estimates)
    assert around.rates(other).prefill.ms(compute_features(900, 1000)) == pytest.approx(50, rel=0.05)
    assert around.rates(other).first_step_ms == pytest.approx(40, rel=0.05)
    late = around.book()
    await late.share(store.estimates)
    assert around.rates(late) == around.rates(other)
    await store.close()
    await around.pool.stop()


async def test_pairs_are_forgotten_with_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    around, store = Around(), open_store("memory://")
    monkeypatch.setattr(book_module, "MAX_ESTIMATORS", 40)
    book, late = around.book(), around.book()
    pairs = list(itertools.product(around.pool.prefill, around.pool.decode))
    for generation in range(20):
        for worker in (*around.pool.prefill, *around.pool.decode):
            assert worker.info is not None
            info = make_info(worker.info.role, worker.endpoint)
            # A model's name has a slash, and a worker's may have one.
            info.worker_id, info.model.name = f"{worker.endpoint}/{generation}", "lab/m"
            worker.learned(info)
        around.served = around.pool.resolve("", "")
        for number, (prefill, decode) in enumerate(pairs, 1):
            # Of later turns not every one is learnt from.
            for _ in range(4 * REFIT_EVERY):
                turn = around.turn(pair=Pair(prefill, decode), holder=decode)
                turn.prefilled.reuse.readback.duration_ms *= number
                turn.decoded.handoff.duration_ms *= number
                book.learn(turn)
        await book.share(store.estimates)
        await late.share(store.estimates)
    assert len(book) == len(pairs)
    told = await store.estimates.read()
    assert sum(name.startswith("transfer/") for name in told) == 1 + 20 * len(pairs)
    for number, (prefill, decode) in enumerate(pairs, 1):
        for learnt in (book, late):
            ms = learnt.rates(around.served, prefill, decode).transfer.ms((1.0, 900.0 * MIB, 90.0))
            assert ms == pytest.approx(30 * number, rel=0.1)
    await store.close()
    await around.pool.stop()


async def test_a_full_memory_of_pairs_shuts_out_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    around, store = Around(), open_store("memory://")
    monkeypatch.setattr(book_module, "MAX_ESTIMATORS", 2)
    group = f"{around.served.name}@{around.served.revision}/{around.served.compatibility}"
    for prefill in around.pool.prefill:
        for decode in around.pool.decode:
            name = f"transfer/{group}/{prefill.name}/{decode.name}"
            await store.estimates.merge(name, [5.0, 0.0, 0.0])
    for kind in ("transfer", "prefill", "decode"):
        await store.estimates.merge(f"{kind}/{group}", [500.0, 0.0, 0.0])
    book = around.book()
    await book.share(store.estimates)
    rates = book.rates(around.served, None, None)
    assert {rates.transfer.values, rates.prefill.values, rates.decode.values} == {(500.0, 0.0, 0.0)}
    await store.close()
    await around.pool.stop()


async def test_what_others_say_is_worked_out_for_those_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around, store = Around(), open_store("memory://")
    book, fits = around.book(), list[Terms]()
    for prefill in around.pool.prefill:
        for decode in around.pool.decode:
            book.learn(around.turn(pair=Pair(prefill, decode), holder=decode))
    group = f"{around.served.name}@{around.served.revision}/{around.served.compatibility}"
    for name in ("p:1/d:1", "p:1/e:1", "q:1/d:1", "q:1/e:1"):
        await store.estimates.merge(f"transfer/{group}/{name}", [60.0, 3e-9, 0.01])
    before = around.rates(book)
    monkeypatch.setattr(learning, "fit", lambda seed, samples: (fits.append(seed), fit(seed, samples))[1])
    await book.share(store.estimates)
    assert not fits
    assert around.rates(book).transfer != before.transfer
    assert fits == [Terms((60.0, 3e-9, 0.01))]
    await store.close()
    await around.pool.stop()


async def test_nonsense_in_the_shared_table_is_left_out() -> None:
    around, store = Around(), open_store("memory://")
    book = around.book()
    before = around.rates(book)
    group = f"{around.served.name}@{around.served.revision}/{around.served.compatibility}"
    await store.estimates.merge(f"prefill/{group}", [-1.0, 1.0, 1.0])
    await store.estimates.merge(f"first_step/{group}", [1.0, 2.0])
    await book.share(store.estimates)
    assert around.rates(book) == before
    assert around.rates(around.book()) == before
    await store.close()
    await around.pool.stop()

"""ListLeases: the keeper's leases joined with the engine's table, which knows pins and blocks best."""

from kvloop.decode.keeper import Keeper
from kvloop.engine.port import Engine
from kvloop.runtime.clock import Clock
from kvloop.runtime.errors import invalid
from kvloop.v1alpha1 import decode_service_pb2, turn_pb2

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000


async def list_leases(
    request: decode_service_pb2.ListLeasesRequest, keeper: Keeper, engine: Engine, clock: Clock
) -> decode_service_pb2.ListLeasesResponse:
    """Return one page, soonest deadline first. Leases may come and go between pages."""
    if request.page_size < 0:
        raise invalid("page_size", "must not be negative")
    size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
    after = _position(request.page_token)
    holds = {hold.lease_id: hold for hold in await engine.holds()}
    now = clock.monotonic()
    keeper.table.sweep(now)
    held = sorted(
        (lease for lease in keeper.table.held() if lease.lease_id in holds),
        key=lambda lease: (_micros(lease.deadline), lease.lease_id),
    )
    rest = [lease for lease in held if (_micros(lease.deadline), lease.lease_id) > after]
    response = decode_service_pb2.ListLeasesResponse()
    for lease in rest[:size]:
        hold = holds[lease.lease_id]
        doomed = hold.doomed or not lease.is_live()
        shown = response.leases.add(
            lease_id=lease.lease_id,
            conversation_id=lease.conversation_id,
            tenant=lease.tenant,
            state=turn_pb2.LEASE_STATE_DOOMED if doomed else turn_pb2.LEASE_STATE_LIVE,
            num_tokens=lease.num_tokens,
            num_blocks=hold.num_blocks,
            pins=hold.pins,
        )
        shown.remaining_time.FromNanoseconds(int(hold.remaining_s * 1e9))
        shown.publish_time.FromNanoseconds(int(lease.publish_wall * 1e9))
    if len(rest) > size:
        last = rest[size - 1]
        response.next_page_token = f"{_micros(last.deadline)}-{last.lease_id}"
    return response


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)


def _position(token: str) -> tuple[int, str]:
    if not token:
        return -1, ""
    micros, separator, lease_id = token.partition("-")
    if not (separator and micros.isascii() and micros.isdigit() and len(micros) < 20):
        raise invalid("page_token", "is not from an earlier answer")
    return int(micros), lease_id

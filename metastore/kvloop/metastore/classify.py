"""One classifier from redis-py's errors to an Outage."""

from redis import exceptions

from kvloop.metastore.port import Outage

# The first that fits counts: subclasses come before their bases.
_TYPES: tuple[tuple[type[BaseException], Outage], ...] = (
    (TimeoutError, Outage.TIMEOUT),
    (exceptions.TimeoutError, Outage.TIMEOUT),
    (exceptions.BusyLoadingError, Outage.LOADING),
    (exceptions.MaxConnectionsError, Outage.POOL),
    (exceptions.AuthenticationError, Outage.AUTHENTICATION),
    (exceptions.AuthorizationError, Outage.AUTHENTICATION),
    (exceptions.AuthenticationWrongNumberOfArgsError, Outage.AUTHENTICATION),
    (exceptions.NoPermissionError, Outage.PERMISSION),
    (exceptions.ReadOnlyError, Outage.READONLY),
    (exceptions.OutOfMemoryError, Outage.OUT_OF_MEMORY),
    (exceptions.ClusterDownError, Outage.CLUSTER_DOWN),
    (exceptions.AskError, Outage.MOVED),
    (exceptions.TryAgainError, Outage.MOVED),
    (exceptions.ClusterError, Outage.CLUSTER_DOWN),
    (exceptions.RedisClusterException, Outage.CLUSTER_DOWN),
    (exceptions.ConnectionError, Outage.CONNECTION),
    (OSError, Outage.CONNECTION),
)

# Servers put these into the text when a script, rather than a command, ran into them.
_TEXTS = (
    ("READONLY", Outage.READONLY),
    ("OOM", Outage.OUT_OF_MEMORY),
    ("NOPERM", Outage.PERMISSION),
    ("user executing the script can't", Outage.PERMISSION),
    ("NOAUTH", Outage.AUTHENTICATION),
    ("WRONGPASS", Outage.AUTHENTICATION),
    ("LOADING", Outage.LOADING),
    ("MASTERDOWN", Outage.CLUSTER_DOWN),
    ("NOREPLICAS", Outage.READONLY),
    ("MISCONF", Outage.READONLY),
)

# Outages that every operation on the node would meet. The others are answered at once and concern some
# operations only (a full store still reads), so that failing fast would gain nothing.
OPENING = frozenset(
    {
        Outage.TIMEOUT,
        Outage.CONNECTION,
        Outage.LOADING,
        Outage.CLUSTER_DOWN,
        Outage.AUTHENTICATION,
        Outage.OTHER,
    }
)


def classify(error: BaseException) -> Outage:
    """Return the outage that an error of a link means."""
    for kind, outage in _TYPES:
        if isinstance(error, kind) and not (kind is exceptions.ConnectionError and _text(error)):
            return outage
    return _text(error) or Outage.OTHER


def _text(error: BaseException) -> Outage | None:
    text = str(error)
    return next((outage for word, outage in _TEXTS if word in text), None)

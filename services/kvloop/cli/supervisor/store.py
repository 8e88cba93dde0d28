"""The embedded store as a part: started by the supervisor with port and ready file as arguments."""

import os
import signal
import sys
import threading
from pathlib import Path

from kvloop.cli import ready
from kvloop.cli.supervisor.programs import STORE_PASSWORD
from kvloop.metastore.embedded import EmbeddedStore, EmbeddedUnavailable

_CHECK_S = 0.2


def main() -> None:
    """Run the store until SIGTERM or SIGINT, or until it ends by itself, which is a failure."""
    port, ready_file = int(sys.argv[1]), Path(sys.argv[2])
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: ended.set())
    try:
        store = EmbeddedStore(port=port or None, password=os.environ.get(STORE_PASSWORD))
        with ready.no_longer_than_served(ready_file), store:
            endpoint = f"127.0.0.1:{store.port}"
            facts = {"event": "ready", "role": "store", "endpoint": endpoint, "pid": os.getpid()}
            ready.say_line(facts)
            ready.announce(ready_file, {**facts, "url": store.url, "server_pid": store.pid})
            while not ended.wait(_CHECK_S):
                if not store.pid:
                    sys.exit("the store's server has ended")
    except EmbeddedUnavailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""A server's certificate that can be renewed while the server runs.

gRPC asks before each handshake whether there is another one. Connections that are open keep what they were
opened with.
"""

import ssl
from pathlib import Path
from typing import NamedTuple

from kvloop.runtime import logs

_log = logs.get("security")

_Stamps = tuple[tuple[int, int, int], ...]


class Identity(NamedTuple):
    """PEM of a server's certificate, its key, and the authority of callers' certificates, if there is one."""

    certificate: bytes
    key: bytes
    authority: bytes | None


class CertificateFiles:
    """The files of a server's certificate, read again when they change."""

    def __init__(self, certificate: Path, key: Path, authority: Path | None) -> None:
        """Take note of the files as they are. Raises OSError."""
        self._certificate = certificate
        self._key = key
        self._authority = authority
        self._seen = self._stamps()

    def renewed(self) -> Identity | None:
        """Return what the files hold, when they have changed and fit together; any thread.

        Files are replaced one after the other: a certificate whose key has not come yet is left for later,
        and the log tells.
        """
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return None
            self._seen = stamps
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key)
            found = Identity(
                self._certificate.read_bytes(),
                self._key.read_bytes(),
                self._authority.read_bytes() if self._authority is not None else None,
            )
            if self._stamps() != stamps:
                # Changed meanwhile: the next handshake looks again.
                self._seen = ()
                return None
        except (OSError, ValueError) as error:
            if not isinstance(error, ssl.SSLError):
                # What keeps files from being read may pass without a trace in their stamps.
                self._seen = ()
            _log.error("certificate_not_renewed", error=type(error).__name__)
            return None
        _log.info("certificate_renewed")
        return found

    def _stamps(self) -> _Stamps:
        files = (self._certificate, self._key, self._authority)
        found = (file.stat() for file in files if file is not None)
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)

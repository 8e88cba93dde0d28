"""Store URLs, also those that name several hosts.

    memory://[name]
    redis[s]://[user:password@]host[:port][/db][?options]
    redis[s]+sentinel://[user:password@]host[:port],host[:port].../service[/db][?options]
    redis[s]+cluster://[user:password@]host[:port],host[:port]...[?options]
    unix://[user:password@]/path/to/socket[?db=0]

IPv6 addresses stand in brackets. valkey:// is the same as redis://. Options: ssl_ca_certs, ssl_certfile,
ssl_keyfile, ssl_cert_reqs, ssl_check_hostname, and for Sentinel its own sentinel_username and
sentinel_password. User and password are percent-encoded.
"""

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

_KINDS = {
    "memory": ("memory", False),
    "unix": ("unix", False),
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_REQUIREMENTS = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_DEFAULT_PORTS = {"sentinel": 26379}
_REDIS_PORT = 6379


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL, taken apart."""

    kind: str
    """memory, unix, single, sentinel or cluster."""
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """Host and port; IPv6 addresses without brackets."""
    path: str = ""
    """Service of Sentinel, path of a socket, or name of a memory store."""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)


def parse(url: str) -> StoreUrl:
    """Return the parts of a store URL.

    Raises ValueError with a sentence that says what to change; it never quotes user or password.
    """
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower().replace("valkey", "redis")
    if not separator or scheme not in _KINDS:
        raise ValueError(f"a store URL begins with one of {', '.join(f'{name}://' for name in _KINDS)}")
    kind, tls = _KINDS[scheme]
    # By hand: the standard library's parser knows one host only.
    address, _, query = url.partition("://")[2].partition("?")
    netloc, slash, path_text = address.partition("/")
    userinfo, _, hostlist = netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    options = dict(parse_qsl(query, keep_blank_values=True))
    path, db = _path(kind, slash + path_text, options)
    known = {"db"} | (_TLS_OPTIONS if tls else set()) | (_SENTINEL_OPTIONS if kind == "sentinel" else set())
    if unknown := sorted(set(options) - known):
        raise ValueError(f"unknown option in the store URL: {', '.join(unknown)}")
    hosts: tuple[tuple[str, int], ...] = ()
    if kind == "memory":
        path = hostlist + path
    elif kind != "unix":
        port = _DEFAULT_PORTS.get(kind, _REDIS_PORT)
        hosts = tuple(_host(text, port) for text in hostlist.split(","))
        if kind == "single" and len(hosts) > 1:
            raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    return StoreUrl(
        kind=kind,
        tls=tls,
        hosts=hosts,
        path=path,
        db=db,
        username=unquote(username) or None,
        password=unquote(password) or None,
        options={name: value for name, value in options.items() if name != "db"},
    )


def tls_context(target: StoreUrl) -> ssl.SSLContext:
    """Return the TLS context of a rediss:// URL; a named authority is the only one trusted.

    Raises ValueError when a file can't be used, or an option makes no sense.
    """
    requirement = target.options.get("ssl_cert_reqs", "required").lower()
    if requirement not in _REQUIREMENTS:
        raise ValueError(f"ssl_cert_reqs is one of {', '.join(_REQUIREMENTS)}")
    certificate, key = target.options.get("ssl_certfile"), target.options.get("ssl_keyfile")
    try:
        context = ssl.create_default_context(cafile=target.options.get("ssl_ca_certs"))
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ValueError(f"a certificate or key named in the store URL can't be used: {error}") from None
    checked = target.options.get("ssl_check_hostname", "true").lower() not in {"0", "false", "no"}
    context.check_hostname = checked and requirement != "none"
    context.verify_mode = _REQUIREMENTS[requirement]
    return context


def _path(kind: str, path: str, options: dict[str, str]) -> tuple[str, int]:
    db_text = options.get("db", "")
    if kind == "unix":
        if len(path) < 2:
            raise ValueError("unix:// is followed by the path of a socket")
        name = unquote(path)
    else:
        pieces = [unquote(piece) for piece in path.split("/") if piece]
        name = ""
        if kind in {"sentinel", "memory"} and pieces:
            name = pieces.pop(0)
        if kind == "sentinel" and not name:
            raise ValueError("redis+sentinel:// ends in the name of the service: .../mymaster")
        if pieces:
            db_text = pieces.pop(0)
        if pieces:
            raise ValueError("the store URL has more path than a database number")
    if not db_text:
        return name, 0
    if not db_text.isdecimal():
        raise ValueError("the database of the store URL is not a number")
    if kind == "cluster" and int(db_text):
        raise ValueError("a cluster has database 0 only")
    return name, int(db_text)


def _host(text: str, default_port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise ValueError("an IPv6 address in the store URL stands in brackets: [::1]:6379")
        port_text = rest[1:]
    else:
        host, _, port_text = text.partition(":")
        if ":" in port_text:
            raise ValueError("an IPv6 address in the store URL stands in brackets: [::1]:6379")
    if not host:
        raise ValueError("the store URL names no host")
    if not port_text:
        return host, default_port
    if not port_text.isdecimal() or not 0 < int(port_text) < 65536:
        raise ValueError("a port in the store URL is not a number from 1 to 65535")
    return host, int(port_text)

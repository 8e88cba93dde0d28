"""`kvloop certs FOLDER`: a certificate authority for development, and a certificate per kind of process."""

import datetime
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvloop.cli.errors import CommandFailed, say, sentences

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

ROLES = ("router", "prefill", "decode", "gateway", "client")
HOSTS = ("localhost", "127.0.0.1", "::1")
_AUTHORITY = "ca"
_CLOCK_SKEW = datetime.timedelta(minutes=5)


@sentences
def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where ca.crt and the others go.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"Name or address that parts are dialled by; besides {', '.join(HOSTS)}."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="For how long the certificates are good.")] = 90,
) -> None:
    """Make a certificate authority for development, and certificates for every kind of process.

    An authority that is in the folder already is kept, and the certificates are made anew. Not for
    production: the authority's key lies next to what it signs.
    """
    try:
        make(folder, [*HOSTS, *(host or ())], days)
    except ImportError:
        raise CommandFailed("certificates need the package cryptography: install kvloop[certs]") from None
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{folder}: {error}") from None
    say(
        f"{folder}: ca.crt, and a .crt and .key for each of {', '.join(ROLES)}\n"
        f"Use them with --tls-ca {folder / 'ca.crt'} --tls-cert {folder / 'router.crt'}"
        f" --tls-key {folder / 'router.key'}, and so on."
    )


def make(folder: Path, hosts: list[str], days: int) -> None:
    """Write ca.crt, ca.key and a pair per role into a folder; keys are for the owner's eyes only.

    Raises ImportError without cryptography, OSError, ValueError.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    until = datetime.timedelta(days=days)
    certificate, key = folder / f"{_AUTHORITY}.crt", folder / f"{_AUTHORITY}.key"
    if certificate.exists() and key.exists():
        ca = x509.load_pem_x509_certificate(certificate.read_bytes())
        loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key.name} is not a key that kvloop certs has made; name another folder")
        ca_key = loaded
    else:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _authority(ca_key, until * 4)
        _write(certificate, ca)
        _write_key(key, ca_key)
    issuer = _Issuer(ca, ca_key)
    for role in ROLES:
        own = ec.generate_private_key(ec.SECP256R1())
        _write(folder / f"{role}.crt", _leaf(role, own, hosts, until, issuer))
        _write_key(folder / f"{role}.key", own)


class _Issuer(NamedTuple):
    certificate: "x509.Certificate"
    key: "ec.EllipticCurvePrivateKey"


def _authority(key: "ec.EllipticCurvePrivateKey", until: datetime.timedelta) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    name = _name("kvloop development authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _begun(name, name, key, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    role: str,
    key: "ec.EllipticCurvePrivateKey",
    hosts: list[str],
    until: datetime.timedelta,
    issuer: "_Issuer",
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _begun(_name(f"kvloop {role}"), issuer.certificate.subject, key, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), critical=False
        )
        .sign(issuer.key, hashes.SHA256())
    )


def _begun(
    subject: "x509.Name", issuer: "x509.Name", key: "ec.EllipticCurvePrivateKey", until: datetime.timedelta
) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(file: Path, certificate: "x509.Certificate") -> None:
    from cryptography.hazmat.primitives import serialization

    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(file: Path, key: "ec.EllipticCurvePrivateKey") -> None:
    from cryptography.hazmat.primitives import serialization

    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )

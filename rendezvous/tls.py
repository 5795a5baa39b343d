"""TLS between hosts: the server's certificate, and how its clients know it.

A certificate is made once for each run (`make_certificate`), and its clients know it by its SHA-256
fingerprint, which travels with the token. A site may have certificates of its own; clients then may
check the chain up to the site's CA, and the name. A client's knowledge of its server is one word:

    ""                    it speaks plain HTTP
    sha256:HEX            the fingerprint of its certificate
    ca:NAME:BASE64        the CA's certificates (PEM), and the name that the server's is for
    first-seen            nothing yet: the first certificate that it shows is taken, and no other

TLS 1.3 only. The server's connections are in `rendezvous.connections`.
"""

import base64
import binascii
import datetime
import errno
import functools
import hashlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from rendezvous.auth import MAX_FINGERPRINT_CHARS, write_private
from rendezvous.errors import CertificateError

FIRST_SEEN = "first-seen"
CA = "ca:"
_PIN = "sha256:"
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_NAME = "elastic-driver"  # for clients of others, which check a name
_YEARS = 20  # of a certificate that is made here; its clients compare it, and look at no date
_SKEW_DAYS = 2  # between the clocks of hosts


class WrongServerError(ConnectionError):
    """The server shows another certificate than it has to, or speaks no TLS."""


class NotTlsError(WrongServerError):
    """The server speaks no TLS."""


# ---- certificates ------------------------------------------------------------------------


class ServerCertificate(NamedTuple):
    """The files of a server's certificate, with its chain, and of its key (both PEM)."""

    cert: Path
    key: Path

    @property
    def exist(self) -> bool:
        """Return whether both files are there."""
        return self.cert.is_file() and self.key.is_file()

    def fingerprint(self) -> str:
        """Return `sha256:HEX` of the certificate; raises CertificateError if it is none."""
        text = _read(self.cert)
        first = text[text.find(_BEGIN) :].partition(_END)[0]
        try:
            return fingerprint(ssl.PEM_cert_to_DER_cert(f"{first}{_END}\n"))
        except (ValueError, binascii.Error):
            raise CertificateError(f"{self.cert} holds no certificate (PEM)") from None

    def absolute(self) -> "ServerCertificate":
        """Return the same files, wherever this process goes."""
        return ServerCertificate(self.cert.absolute(), self.key.absolute())

    def name(self) -> str:
        """Return the first name or address that the certificate is for; raises CertificateError."""
        from cryptography import x509  # noqa: PLC0415 - takes time, and only sites need it

        try:
            found = x509.load_pem_x509_certificate(_read(self.cert).encode())
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            of_hosts = names.get_values_for_type(x509.DNSName)
            addresses = names.get_values_for_type(x509.IPAddress)
            all_names = [*of_hosts, *map(str, addresses)]
        except (ValueError, x509.ExtensionNotFound):
            all_names = []
        for name in all_names:
            if not name.startswith("*"):
                return name
        raise CertificateError(
            f"{self.cert} names no host (subjectAltName); name this one with --rdzv-endpoint"
        )

    def text(self) -> str:
        """Return both files as one; raises CertificateError if they cannot be read."""
        return _read(self.key) + _read(self.cert)

    def write(self, text: str) -> None:
        """Write both files from what `text` has returned; raises TokenError."""
        key, begin, chain = text.partition(_BEGIN)
        write_private(self.key, key)
        write_private(self.cert, begin + chain)

    def context(self) -> ssl.SSLContext:
        """Return the context of a server; raises CertificateError for files that do not fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # connections are kept, so sessions are not resumed
        _read(self.cert)
        _read(self.key)
        try:
            # A key with a password is refused; nobody is there to type it.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                problem = f"the key in {self.key} is not that of the certificate in {self.cert}"
            else:
                problem = f"{self.cert} and {self.key} are no certificate and its key (PEM)"
            raise CertificateError(f"{problem} ({error.reason or 'unknown form'})") from None
        return context


def certificate_in(folder: Path) -> ServerCertificate:
    """Return the place of a run's own certificate, in its folder."""
    return ServerCertificate(folder / "tls-cert.pem", folder / "tls-key.pem")


def make_certificate(files: ServerCertificate) -> None:
    """Make a certificate (EC P-256, signed by itself) and its key; both files are 0600.

    Raises TokenError if a file cannot be written.
    """
    from cryptography import x509  # noqa: PLC0415 - takes time, and most jobs make none
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=_SKEW_DAYS))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    made = key.private_bytes(pem, form, no_password) + certificate.public_bytes(pem)
    files.write(made.decode())


def fingerprint(certificate: bytes) -> str:
    """Return the fingerprint of a certificate (DER)."""
    return _PIN + hashlib.sha256(certificate).hexdigest()


def known_by_ca(ca: Path, name: str) -> str:
    """Return the knowledge of clients that check the chain up to a CA, and the name.

    Raises CertificateError for a file that holds no certificates, or is too large to travel.
    """
    text = _read(ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise CertificateError(f"{ca} holds no certificates (PEM)") from None
    known = f"{CA}{name}:{base64.b64encode(text.encode()).decode()}"
    if len(known) > MAX_FINGERPRINT_CHARS:
        raise CertificateError(
            f"{ca} is larger than {MAX_FINGERPRINT_CHARS * 3 // 4} bytes; name a file with the "
            "certificate of your CA alone"
        )
    return known


def check(certificate: ServerCertificate, known: str) -> None:
    """Have a client that knows this much talk to this server, in memory.

    Raises CertificateError with the reason if the client would refuse the certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    identity = ServerIdentity(known)
    server = certificate.context().wrap_bio(to_server, to_client, server_side=True)
    client = identity.context.wrap_bio(to_client, to_server, server_hostname=identity.name)
    try:
        for side in (client, server, client):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLError as error:
        problem = f"clients would refuse the certificate in {certificate.cert}: {_reason(error)}"
        raise CertificateError(problem) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from None


# ---- clients -----------------------------------------------------------------------------


class ServerIdentity:
    """A client's knowledge of its server's certificate, and the context that fits.

    Threads may use it at once. Raises ValueError for a word that is none of those above.
    """

    def __init__(self, known: str) -> None:
        self.seen = ""  # the fingerprint of the last server
        self._known = known
        # At most one, the only one that is taken. No lock: it might be held at a fork.
        self._pins: dict[str, str] = {"pin": known} if known.startswith(_PIN) else {}
        self.name: str | None = None  # that the certificate has to be for
        if known.startswith(CA):
            _, self.name, text = known.split(":", 2)
            self.context = _context()
            self.context.load_verify_locations(cadata=base64.b64decode(text).decode("ascii"))
        elif known == FIRST_SEEN or known.startswith(_PIN):
            self.context = context_without_chain()
        else:
            raise ValueError(f"{known[:80]!r} tells nothing about a server's certificate")

    @property
    def known(self) -> str:
        """The present knowledge of the server, as one word."""
        return self._pins.get("pin", self._known)

    def wrap(self, connected: socket.socket) -> ssl.SSLSocket:
        """Return the TLS connection over a connected socket, whose descriptor it takes."""
        return self.context.wrap_socket(
            connected, server_hostname=self.name, do_handshake_on_connect=False
        )

    def shake_hands(self, connection: ssl.SSLSocket) -> None:
        """Make sure that this is the right server; raises WrongServerError or OSError."""
        try:
            connection.do_handshake()
        except ssl.SSLError as error:
            if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
                raise NotTlsError("it speaks no TLS") from error
            if isinstance(error, ssl.SSLCertVerificationError):
                problem = f"its certificate is refused: {_reason(error)}"
                raise WrongServerError(problem) from error
            if isinstance(error, ssl.SSLEOFError):
                ended = "it ended the handshake; another program may listen there"
                raise ConnectionResetError(ended) from error
            raise
        shown = fingerprint(connection.getpeercert(binary_form=True) or b"")
        self.seen = shown
        if self.name is None and self._pins.setdefault("pin", shown) != shown:
            raise WrongServerError(
                "it shows the certificate of another server; another program may listen there"
            )


class TlsConnection(ssl.SSLSocket):
    """A connection that is closed if the server resets it before the handshake.

    `ssl` asks it for its peer then, and until Python 3.13 leaves it open without an owner.
    """

    def getpeername(self) -> Any:
        """Return the address of the server; raises ConnectionResetError if it has gone."""
        try:
            return super().getpeername()
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsConnection
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@functools.cache
def context_without_chain() -> ssl.SSLContext:
    """Return the context of clients that compare the fingerprint after the handshake.

    One for the process. The first one takes 3 ms, so warm parents make it before they fork.
    """
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return str(error.reason or error)

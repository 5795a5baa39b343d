"""TLS between hosts: the server's certificate, and how its clients know it.

A certificate is made once for each run (`make_certificate`), and its clients know it by its SHA-256
fingerprint, which travels with the token. A site may have certificates of its own; clients then may
check the chain up to the site's CA, and the name. A client's knowledge of its server is one word:

    ""                    it speaks plain HTTP
    sha256:HEX            the fingerprint of its certificate
    ca:NAME:BASE64        the CA's certificates (PEM), and the name that the server's is for
    first-seen            nothing yet: the first certificate that it shows is taken, and no other

TLS 1.3 only. The server's connections are in `rendezvous.tls_connections`.
"""

import base64
import binascii
import datetime
import functools
import hashlib
import socket
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

from rendezvous.auth import MAX_FINGERPRINT_CHARS, write_private
from rendezvous.errors import CertificateError

FIRST_SEEN = "first-seen"
_PIN, _CA = "sha256:", "ca:"
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
    def exists(self) -> bool:
        """Return whether both files are there."""
        return self.cert.is_file() and self.key.is_file()

    def fingerprint(self) -> str:
        """Return `sha256:HEX` of the certificate; raises CertificateError if it is none."""
        text = _read(self.cert)
        begin, end = text.find("-----BEGIN CERT"), text.find("-----END CERTIFICATE-----")
        try:
            first = text[begin:end] + "-----END CERTIFICATE-----\n"
            return fingerprint(ssl.PEM_cert_to_DER_cert(first))
        except (ValueError, binascii.Error):
            raise CertificateError(f"{self.cert} holds no certificate (PEM)") from None

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


def make_certificate(files: ServerCertificate) -> None:
    """Make a certificate (EC P-256, signed by itself) and its key; both files are 0600.

    Raises TokenError if a file cannot be written.
    """
    from cryptography import x509  # noqa: PLC0415 - takes time, and most jobs make none
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "elastic-driver")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=_SKEW_DAYS))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_private(files.key, key.private_bytes(pem, form, no_password).decode())
    write_private(files.cert, certificate.public_bytes(pem).decode())


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
    known = f"{_CA}{name}:{base64.b64encode(text.encode()).decode()}"
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
    """What a client knows of its server's certificate, and the context that fits.

    Threads may use it at once. Raises ValueError for a word that is none of those above.
    """

    def __init__(self, known: str) -> None:
        self.known, self.seen = known, ""  # `seen`: the fingerprint of the last server
        self.name: str | None = None  # that the certificate has to be for
        self._lock = threading.Lock()
        if known.startswith(_CA):
            _, self.name, text = known.split(":", 2)
            self.context = _context()
            self.context.load_verify_locations(cadata=base64.b64decode(text).decode("ascii"))
        elif known == FIRST_SEEN or known.startswith(_PIN):
            self.context = _context_without_chain()
        else:
            raise ValueError(f"{known[:80]!r} tells nothing about a server's certificate")

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
            raise
        shown = fingerprint(connection.getpeercert(binary_form=True) or b"")
        with self._lock:
            if self.known == FIRST_SEEN:
                self.known = shown
            self.seen = shown
            right = self.name is not None or shown == self.known
        if not right:
            raise WrongServerError(
                "it shows the certificate of another server; another program may listen there"
            )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


@functools.cache
def _context_without_chain() -> ssl.SSLContext:
    """Return the context of clients that compare the fingerprint after the handshake."""
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return str(error.reason or error)

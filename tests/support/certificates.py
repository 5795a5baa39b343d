"""Certificates of a site: a CA, and certificates that it has signed."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rendezvous.tls import ServerCertificate

_DAY = datetime.timedelta(days=1)


class CertificateAuthority:
    """A CA whose certificate is in the file `ca`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self.ca = folder, folder / "ca.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a site's CA")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key.public_key(), days=10)
        builder = builder.add_extension(constraints, critical=True)
        own = builder.sign(self._key, hashes.SHA256())
        self.ca.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def certificate(self, *names: str, days: int = 10) -> ServerCertificate:
        """Return a certificate for these names and addresses; it ends in so many days."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server")])
        builder = self._builder(subject, key.public_key(), days)
        if names:
            alternatives = x509.SubjectAlternativeName(list(map(_general_name, names)))
            builder = builder.add_extension(alternatives, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        number = len(list(self._folder.iterdir()))
        files = ServerCertificate(self._folder / f"{number}.pem", self._folder / f"{number}.key")
        pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
        pkcs8 = serialization.PrivateFormat.PKCS8
        files.cert.write_bytes(signed.public_bytes(pem))
        files.key.write_bytes(key.private_bytes(pem, pkcs8, no_password))
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(issuer, critical=False)
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)

"""The certificate with which a driver's server speaks TLS, and how its clients know it.

The server of a job speaks TLS, unless the user says --insecure: other users of this machine may
take its port when it has died. A certificate is made once for each run and kept in its folder; the
drivers that go on with the run use it again, because agents and workers know no other. With it, a
server on loopback answers plain requests, too (docs/security.md).
"""

from pathlib import Path
from typing import NamedTuple

from elastic_driver.errors import UsageError
from elastic_driver.settings import DriverOptions
from rendezvous import tls
from rendezvous.auth import Credentials
from rendezvous.tls import ServerCertificate


class Identity(NamedTuple):
    """The server's certificate, None for plain HTTP, and the second line of token files."""

    certificate: ServerCertificate | None = None
    known_by: str = ""
    also_plain: bool = False  # on loopback, plain requests are answered, too


def choose_identity(
    options: DriverOptions, made: ServerCertificate, former: Credentials | None
) -> Identity:
    """Return the identity of a driver's server; make a certificate if there has to be one.

    `made`: the place of the run's own certificate. `former`: what the agents of an earlier driver
    of the run know; the server stays as they know it. Raises UsageError, CertificateError or
    TokenError.
    """
    if former is not None and not former.fingerprint:
        return Identity()  # they speak plain HTTP
    identity = of_site(options)
    if former is None and options.insecure:
        return Identity()
    if identity is None:
        if former is None:
            tls.make_certificate(made)
        identity = Identity(made, made.fingerprint(), also_plain=True)
    known = [identity.known_by] if former is None else [identity.known_by, former.fingerprint]
    if len(set(known)) > 1 and not all(word.startswith(tls.CA) for word in known):
        raise UsageError(
            "cannot resume: the agents of this run know its driver by another certificate; "
            "give the --tls-cert, --tls-key and --tls-ca with which the run began"
        )
    return identity


def of_site(options: DriverOptions) -> Identity | None:
    """Return the identity with the user's own certificate; None: there is none.

    Raises UsageError for options that contradict each other, and CertificateError for a certificate
    that clients would refuse.
    """
    if options.insecure and (options.tls_cert or options.tls_ca):
        raise UsageError("--insecure and --tls-cert contradict each other; keep one of them")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together; give both")
    if options.tls_cert is None or options.tls_key is None:
        return None
    certificate = ServerCertificate(Path(options.tls_cert), Path(options.tls_key)).absolute()
    if options.tls_ca is None:
        known = certificate.fingerprint()
    else:
        name = options.given_host or certificate.name()
        known = tls.known_by_ca(Path(options.tls_ca), name)
    tls.check(certificate, known)
    return Identity(certificate, known)

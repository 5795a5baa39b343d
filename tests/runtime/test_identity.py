"""Which certificate a driver's server has, and how its clients know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.runtime.endpoint import Identity, choose_identity
from elastic_driver.settings import DriverOptions
from rendezvous.auth import Credentials
from rendezvous.client import RendezvousClient
from rendezvous.errors import CertificateError
from rendezvous.server import RendezvousServer, ServerTls
from rendezvous.tls import ServerCertificate, certificate_in
from tests.support.certificates import CertificateAuthority

BEYOND = DriverOptions(bind_host="10.0.0.1")


@pytest.fixture
def made(tmp_path: Path) -> ServerCertificate:
    return certificate_in(tmp_path)


@pytest.fixture
def site(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "site")


def of(files: ServerCertificate, ca: Path | None = None, host: str = "") -> DriverOptions:
    """The options of a driver with a site's certificate."""
    return DriverOptions(
        tls_cert=str(files.cert),
        tls_key=str(files.key),
        tls_ca=None if ca is None else str(ca),
        given_host=host,
    )


def test_insecure_is_plain_and_makes_no_certificate(made: ServerCertificate) -> None:
    for host in ("127.0.0.1", "10.0.0.1"):
        options = DriverOptions(bind_host=host, insecure=True)
        assert choose_identity(options, made, None) == Identity()
    assert not made.exist


@pytest.mark.parametrize(
    "options", [DriverOptions(), DriverOptions(bind_host="::1"), BEYOND], ids=str
)
def test_a_certificate_is_made_and_used_again(
    options: DriverOptions, made: ServerCertificate
) -> None:
    first = choose_identity(options, made, None)
    assert first == Identity(made, made.fingerprint(), also_plain=True)
    former = Credentials("token", first.known_by)
    # The next driver is where it may be; the agents know what they know.
    for now in (options, BEYOND, DriverOptions(), DriverOptions(insecure=True)):
        assert choose_identity(now, made, former) == first


def test_a_run_that_began_in_plain_goes_on_so(made: ServerCertificate) -> None:
    for options in (DriverOptions(), BEYOND):
        assert choose_identity(options, made, Credentials("token")) == Identity()
    assert not made.exist


def test_a_run_that_its_agents_know_by_another_certificate_is_not_resumed(
    made: ServerCertificate, site: CertificateAuthority
) -> None:
    former = Credentials("token", choose_identity(BEYOND, made, None).known_by)
    with pytest.raises(UsageError, match=r"cannot resume: .* by another certificate"):
        choose_identity(of(site.certificate("a")), made, former)
    made.cert.unlink()
    with pytest.raises(CertificateError, match=r"cannot read .*tls-cert\.pem"):
        choose_identity(BEYOND, made, former)


def test_a_certificate_of_the_site_is_pinned_or_checked_up_to_its_ca(
    made: ServerCertificate, site: CertificateAuthority
) -> None:
    files = site.certificate("driver.example", "10.0.0.1")
    pinned = choose_identity(of(files), made, None)
    assert pinned == Identity(files, files.fingerprint())
    for host in ("", "driver.example", "10.0.0.1"):
        options = of(files, site.ca, host)
        checked = choose_identity(options, made, None)
        assert checked.known_by.startswith(f"ca:{host or 'driver.example'}:")
        # A certificate may be renewed while the run has no driver.
        renewed = of(site.certificate("driver.example", "10.0.0.1"), site.ca, host)
        former = Credentials("token", checked.known_by)
        assert choose_identity(renewed, made, former).known_by == checked.known_by
    assert not made.exist


def test_clients_check_the_chain_and_the_name(
    made: ServerCertificate, site: CertificateAuthority
) -> None:
    own = choose_identity(of(site.certificate("driver.example"), site.ca), made, None)
    with (
        RendezvousServer(
            token="t", tls=ServerTls(certificate=own.certificate, known_by=own.known_by)
        ) as server,
        RendezvousClient(server.url, "t", fingerprint=server.known_by) as client,
    ):
        client.set("a/b", b"x")
        assert client.peer_fingerprint == server.fingerprint


def test_certificates_that_clients_would_refuse_are_told_in_one_line(
    tmp_path: Path, made: ServerCertificate, site: CertificateAuthority
) -> None:
    files, other = site.certificate("driver.example"), CertificateAuthority(tmp_path / "other")
    for options, problem in (
        (of(site.certificate("a", days=-1), site.ca), "certificate has expired"),
        (of(files, site.ca, "other.example"), "Hostname mismatch.*'other.example'"),
        (of(files, site.ca, "10.0.0.9"), "IP address mismatch.*'10.0.0.9'"),
        (of(files, other.ca), "unable to get (local )?issuer certificate|signature failure"),
        (of(site.certificate(), site.ca), "names no host .*; name this one with --rdzv-endpoint"),
        (of(files._replace(key=site.certificate("b").key)), "the key in .* is not that of"),
        (of(files, files.key), "holds no certificates"),
        (of(files._replace(cert=tmp_path / "none")), "cannot read .*none: No such file"),
    ):
        with pytest.raises(CertificateError, match=problem) as refused:
            choose_identity(options, made, None)
        assert "\n" not in str(refused.value)
        assert refused.value.exit_code == 64


def test_options_that_contradict_each_other_are_refused(made: ServerCertificate) -> None:
    with pytest.raises(UsageError, match="--insecure and --tls-cert contradict"):
        choose_identity(DriverOptions(insecure=True, tls_cert="a", tls_key="b"), made, None)
    with pytest.raises(UsageError, match="--tls-cert and --tls-key belong together"):
        choose_identity(DriverOptions(tls_cert="a"), made, None)

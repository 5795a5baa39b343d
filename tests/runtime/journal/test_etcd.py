"""The client of etcd: endpoints that die, TLS and a password, and errors that say what to try."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.runtime.journal import etcd
from elastic_driver.runtime.journal.etcd import (
    EtcdAccess,
    EtcdClient,
    EtcdError,
    EtcdUnreachableError,
    read_access,
)
from tests.support.etcd import EtcdCluster, why_not
from tests.support.ports import free_ports

# ---- an address --------------------------------------------------------------------------


def test_endpoints_are_read_with_their_ports() -> None:
    access = read_access("etcd://a,b:1234,[::1]:99", {}, insecure=True)
    assert access.endpoints == (("a", 2379), ("b", 1234), ("::1", 99))
    assert str(access) == "etcd://a:2379,b:1234,[::1]:99"


@pytest.mark.parametrize(
    "url", ["etcd://", "etcd://a:0", "etcd://a,,b", "etcd://u:p@a", "etcd://a/x"]
)
def test_an_address_without_usable_endpoints_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="etcd://HOST:PORT"):
        read_access(url, {})


@pytest.mark.parametrize(
    ("environ", "needs"),
    [
        ({"ELASTIC_ETCD_USER": "u"}, "belong together"),
        ({"ELASTIC_ETCD_CERT": "/c"}, "belong together"),
        ({"ELASTIC_ETCD_CERT": "/c", "ELASTIC_ETCD_KEY": "/k"}, "needs ELASTIC_ETCD_CA"),
        ({"ELASTIC_ETCD_CA": "/nowhere/ca"}, "cannot read /nowhere/ca: No such file"),
    ],
)
def test_access_that_cannot_work_is_refused_before_anything_starts(
    environ: dict[str, str], needs: str
) -> None:
    with pytest.raises(UsageError, match=needs):
        read_access("etcd://a", environ)


@pytest.mark.parametrize("place", ["e1", "10.0.0.1", "127.0.0.1,e1", "[fd00::1]"])
def test_etcd_beyond_this_machine_is_asked_over_tls_only(place: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="would learn the job's token without TLS") as refused:
        read_access(f"etcd://{place}", {})
    assert len(str(refused.value).splitlines()) == 1
    (tmp_path / "ca").write_text("a certificate")
    for environ in ({"ELASTIC_ETCD_CA": str(tmp_path / "ca")}, {"ELASTIC_ETCD_INSECURE": "1"}):
        assert read_access(f"etcd://{place}", environ).endpoints
    assert read_access(f"etcd://{place}", {}, insecure=True).endpoints


def test_plain_etcd_on_this_machine_comes_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("a certificate")
    assert read_access("etcd://127.0.0.1,localhost:4", {}).is_plain_here
    for environ in ({"ELASTIC_ETCD_CA": str(tmp_path / "ca")}, {"ELASTIC_ETCD_INSECURE": "1"}):
        assert not read_access("etcd://127.0.0.1", environ).is_plain_here
    assert not read_access("etcd://127.0.0.1", {}, insecure=True).is_plain_here


def test_a_password_of_etcd_goes_over_tls_only_on_this_machine_too(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret")
    named = {"ELASTIC_ETCD_USER": "root", "ELASTIC_ETCD_PASSWORD_FILE": str(password)}
    assert read_access("etcd://127.0.0.1,[::1],localhost", {}).endpoints
    with pytest.raises(UsageError, match="the password of etcd's user root needs TLS"):
        read_access("etcd://127.0.0.1", named)
    assert read_access("etcd://127.0.0.1", named, insecure=True).user == "root"


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("nonsense")
    with pytest.raises(UsageError, match="certificates for etcd cannot be used"):
        EtcdClient(read_access("etcd://a", {"ELASTIC_ETCD_CA": str(tmp_path / "ca")}))


# ---- a real etcd -------------------------------------------------------------------------

needs_etcd = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@needs_etcd
def test_the_client_finds_a_member_that_answers_and_says_when_there_is_none(
    tmp_path: Path,
) -> None:
    with EtcdCluster(tmp_path, free_ports(6)) as cluster, EtcdClient(cluster.access, 8.0) as client:
        put = etcd.put("/a", b"\0\xff")
        assert client.transact([etcd.is_missing("/a")], [put]).succeeded
        assert not client.transact([etcd.is_missing("/a")], [put]).succeeded
        lease = client.grant(30)
        client.transact([], [etcd.put("/b", b"", lease)])
        assert client.keep_alive(lease)
        cluster.kill(0)
        assert [found.value for found in client.range("/a")] == [b"\0\xff"]
        client.revoke(lease)
        client.revoke(lease)
        assert client.range("/b") == ()
        assert not client.keep_alive(lease)
        cluster.kill(1)
        client.timeout, began = 1.0, time.monotonic()
        with pytest.raises(EtcdUnreachableError, match=r"is a majority of its members running"):
            client.range("/a")
        assert 1.0 <= time.monotonic() - began < 3.0


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """An authority, and a certificate of it for 127.0.0.1 that servers and clients use.

    It has no common name: with passwords etcd's gateway refuses clients that have one.
    """
    folder = tmp_path / "tls"
    folder.mkdir()
    new = ("req", "-newkey", "rsa:2048", "-nodes", "-subj")
    _openssl(folder, *new, "/CN=ca", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    _openssl(folder, *new, "/O=elastic", "-keyout", "key.pem", "-out", "csr.pem")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    sign = ("x509", "-req", "-in", "csr.pem", "-CA", "ca.pem", "-CAkey", "ca.key")
    _openssl(folder, *sign, "-CAcreateserial", "-days", "2", "-extfile", "san", "-out", "cert.pem")
    return folder


@pytest.fixture
def guarded(tmp_path: Path, certificates: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """An etcd with TLS, certificates of clients and a password; its URL and the environment."""
    environ = {
        "ELASTIC_ETCD_CA": str(certificates / "ca.pem"),
        "ELASTIC_ETCD_CERT": str(certificates / "cert.pem"),
        "ELASTIC_ETCD_KEY": str(certificates / "key.pem"),
    }
    options = (
        *("--cert-file", environ["ELASTIC_ETCD_CERT"], "--key-file", environ["ELASTIC_ETCD_KEY"]),
        *("--trusted-ca-file", environ["ELASTIC_ETCD_CA"], "--client-cert-auth"),
    )
    one = (("127.0.0.1", ()),)
    cluster = EtcdCluster(tmp_path, free_ports(2), one, *options, scheme="https")
    with cluster:
        cluster.wait(read_access(cluster.url, environ))
        ctl = ["etcdctl", "--endpoints", cluster.url.replace("etcd", "https", 1)]
        ctl += ["--cacert", environ["ELASTIC_ETCD_CA"], "--cert", environ["ELASTIC_ETCD_CERT"]]
        ctl += ["--key", environ["ELASTIC_ETCD_KEY"]]
        for words in ("user add root:pass", "user grant-role root root", "auth enable"):
            subprocess.run(
                [*ctl, *words.split()],
                check=True,
                capture_output=True,
                env={"PATH": "/usr/bin:/bin", "ETCDCTL_API": "3"},
            )
        yield cluster.url, environ


@needs_etcd
def test_tls_and_a_password_are_used_and_what_is_wrong_is_named(
    guarded: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    url, environ = guarded
    with EtcdClient(read_access(url, environ)) as client, pytest.raises(EtcdError, match="refuses"):
        client.range("/a")
    password = tmp_path / "password"
    password.write_text("wrong\n")
    named = {"ELASTIC_ETCD_USER": "root", "ELASTIC_ETCD_PASSWORD_FILE": str(password)}
    access = read_access(url, {**environ, **named})
    with (
        EtcdClient(access) as client,
        pytest.raises(EtcdError, match="refuses the password of root"),
    ):
        client.range("/a")
    password.write_text("pass\n")
    with EtcdClient(access) as client:
        client.transact([], [etcd.put("/a", b"1")])
        assert client.range("/a")[0].value == b"1"
        client._token = "of.an-earlier-time"  # tokens end; another one is asked for
        assert client.range("/a")[0].value == b"1"
    plain = EtcdAccess(access.endpoints)
    with EtcdClient(plain, 0.5) as client, pytest.raises(EtcdUnreachableError):
        client.range("/a")

"""The mutual proof: right with one secret, one exchange, one role and one certificate only."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous.auth import Handshake, OpenHellos, Speaker, make_nonce
from rendezvous.limits import Limits

SECRET, OTHER = "the secret of this job", "the secret of another job"
HELLO_S = Limits().hello_s
SERVER, NODE = Speaker.SERVER, Speaker.NODE


def exchange(fingerprint: str = "sha256:aa") -> Handshake:
    return Handshake(make_nonce(), make_nonce(), fingerprint)


def test_who_knows_the_secret_can_prove_it_and_nobody_else() -> None:
    now = exchange()
    proof = now.prove(SECRET, SERVER)
    assert now.proved([SECRET], SERVER, [proof]) == SECRET
    assert now.proved([OTHER], SERVER, [proof]) is None
    assert now.proved([], SERVER, [proof]) is None
    assert now.proved([SECRET], SERVER, []) is None
    assert SECRET not in proof


def test_each_side_finds_the_secret_that_both_know() -> None:
    now = exchange()
    proofs = [now.prove(OTHER, SERVER), now.prove(SECRET, SERVER)]
    assert now.proved(["a third one", SECRET], SERVER, proofs) == SECRET
    assert now.proved([SECRET, OTHER], SERVER, proofs) == SECRET, (
        "the best of the node's comes first"
    )


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    now = exchange()
    assert now.proved([SECRET], NODE, [now.prove(SECRET, SERVER)]) is None
    assert now.proved([SECRET], SERVER, [now.prove(SECRET, NODE)]) is None


@pytest.mark.parametrize("changed", ["node_nonce", "server_nonce", "fingerprint"])
def test_a_recorded_proof_is_wrong_in_every_other_exchange(changed: str) -> None:
    now = exchange()
    proof = now.prove(SECRET, NODE)
    then = now._replace(**{changed: make_nonce()})
    assert then.proved([SECRET], NODE, [proof]) is None
    assert now._replace(fingerprint="").proved([SECRET], NODE, [proof]) is None


@given(st.lists(st.text(max_size=70), max_size=5))
def test_any_text_may_come_as_a_proof(proofs: list[str]) -> None:
    assert exchange().proved([SECRET], NODE, proofs) is None


# ---- hellos that wait ----------------------------------------------------------------------


def test_a_hello_is_good_for_one_proof_and_a_few_seconds() -> None:
    hellos, first, second = OpenHellos(Limits()), exchange(), exchange()
    assert hellos.add(first, "10.0.0.1", 0.0) == []
    assert hellos.add(second, "10.0.0.1", 1.0) == []
    found = hellos.take(first.server_nonce, HELLO_S - 0.1)
    assert found is not None
    assert (found.handshake, found.peer) == (first, "10.0.0.1")
    assert hellos.take(first.server_nonce, HELLO_S - 0.1) is None, "only once"
    assert hellos.take(second.server_nonce, 1.0 + HELLO_S) is None, "too late"
    assert hellos.take(make_nonce(), 0.0) is None
    assert len(hellos) == 0


def test_hellos_without_a_proof_are_told_of_once_they_are_too_old() -> None:
    hellos = OpenHellos(Limits())
    hellos.add(exchange(), "10.0.0.1", 0.0)
    hellos.add(exchange(), "10.0.0.2", 1.0)
    assert hellos.expire(HELLO_S - 0.1) == []
    assert [hello.peer for hello in hellos.expire(HELLO_S)] == ["10.0.0.1"]
    assert [hello.peer for hello in hellos.add(exchange(), "10.0.0.3", 60.0)] == ["10.0.0.2"]
    assert len(hellos) == 1


def test_many_hellos_of_one_peer_take_no_place_from_another() -> None:
    hellos, honest = OpenHellos(Limits(hellos=8, hellos_of_peer=4)), exchange()
    hellos.add(honest, "10.0.0.1", 0.0)
    for _ in range(100):
        hellos.add(exchange(), "10.0.0.9", 0.0)
    assert len(hellos) == 5
    assert hellos.take(honest.server_nonce, 0.1) is not None


def test_the_number_of_hellos_is_bounded() -> None:
    hellos = OpenHellos(Limits(hellos=8, hellos_of_peer=4))
    for number, _ in product(range(100), range(3)):
        hellos.add(exchange(), f"10.0.0.{number}", 0.0)
    assert len(hellos) == 8
    hellos.expire(HELLO_S)
    assert len(hellos) == 0
    assert not hellos._of_peer, "and nothing is left of them"

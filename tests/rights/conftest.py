"""A server with the rights of a job, and the members of its rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_driver.runtime.api import job_access
from elastic_driver.token_roles import RoundMembers
from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer
from tests.rendezvous.common import TOKEN


@pytest.fixture
def rounds() -> RoundMembers:
    return RoundMembers()


@pytest.fixture
def server(rounds: RoundMembers) -> Iterator[RendezvousServer]:
    with RendezvousServer(token=TOKEN, access=job_access(rounds)) as server:
        yield server


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.url, TOKEN) as client:
        yield client

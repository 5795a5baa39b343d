from __future__ import annotations

from collections.abc import Iterator

import pytest

from rendezvous.client import RendezvousClient
from rendezvous.server import RendezvousServer
from tests.rendezvous.common import ACCESS, TOKEN


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(token=TOKEN, access=ACCESS) as server:
        yield server


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.url, TOKEN) as client:
        yield client

"""One rank of a gloo group over `HTTPStore`: forms it, sums, and reports to the rendezvous.

Arguments: url, prefix, rank, size, token file.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.torch_store import HTTPStore


def main() -> None:
    url, prefix, rank, size, token_file = sys.argv[1:]
    torch.set_num_threads(1)
    client = RendezvousClient(url, read_token_file(token_file))
    store = HTTPStore(client, prefix, timedelta(seconds=30))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("world", store),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=30),
    )
    tensor = torch.full((4,), float(rank) + 1)
    dist.all_reduce(tensor)
    report = {"sum": tensor.tolist(), "requests": store._client.requests}
    dist.destroy_process_group()
    store.close()
    client.set(f"report/{rank}", json.dumps(report).encode())
    client.close()


if __name__ == "__main__":
    main()

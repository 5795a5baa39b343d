"""Which exceptions mean a broken world; the texts are those torch 2.13 really raises."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from elastic_driver.errors import HostsUpdatedInterrupt, WorldBrokenError
from elastic_driver.worker.run import broke_the_world, clear_frames, describe
from rendezvous.errors import SealedError

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(PAIR + "Connection closed by peer [127.0.0.1]:10113. This is typically ..."),
        RuntimeError(PAIR + "Read error [127.0.0.1]:2: Connection reset by peer"),
        RuntimeError("[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms"),
        dist.DistBackendError("NCCL error: remote process exited"),
        dist.DistStoreError("wait timeout after 3000ms, keys: /0//1"),
        SealedError("sealed", "round 3 is over"),
        WorldBrokenError("said by the script itself"),
    ],
)
def test_a_lost_peer_is_recognised(error: Exception) -> None:
    assert broke_the_world(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError(PAIR + "op.preamble.length <= op.nbytes. 8 vs 4"),
        RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed."),
        ConnectionResetError("Connection reset by peer"),
        OSError("Broken pipe"),
        ValueError("boom"),
    ],
)
def test_the_scripts_own_mistakes_are_not(error: Exception) -> None:
    assert not broke_the_world(error)


def test_a_broken_collective_behind_the_scripts_own_exception_counts() -> None:
    error = ValueError("no loss")
    error.__cause__ = RuntimeError(PAIR + "Connection closed by peer")
    assert broke_the_world(error)
    error.__cause__ = error
    assert not broke_the_world(error)


def test_a_description_is_one_line() -> None:
    assert describe(RuntimeError("one\ntwo")) == "RuntimeError: one"
    lost = "Read error [127.0.0.1]:2: Connection reset by peer"
    advice = ". This is typically caused by a remote worker hanging. Check the logs. GLHF! 🏖️"
    assert describe(RuntimeError(PAIR + lost + advice)) == f"a collective broke: {lost}"
    assert describe(HostsUpdatedInterrupt("b is ready to join")) == "b is ready to join"
    assert describe(KeyError()) == "KeyError"


def test_what_the_failed_frames_held_is_freed_at_once() -> None:
    class Wrapper:
        pass

    alive: list[weakref.ref[Wrapper]] = []

    def train() -> None:
        wrapper = Wrapper()
        alive.append(weakref.ref(wrapper))
        try:
            raise KeyError("first")
        except KeyError as first:
            raise RuntimeError("second") from first

    gc.disable()
    try:
        train()
    except RuntimeError as error:
        assert alive[0]() is not None
        clear_frames(error)
        assert alive[0]() is None
    finally:
        gc.enable()

"""State moved from one rank to others: every kind of tensor, in place, in bounded chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync import sharing
from elastic_driver.worker.state_sync.contents import RandomStates
from elastic_driver.worker.state_sync.sharing import (
    LiveState,
    Route,
    make_envelope,
    receive,
    send,
    split,
    stand_by,
    take_over,
)
from elastic_driver.worker.state_sync.steps import Steps
from elastic_driver.worker.state_sync.tree import Tree
from tests.support.gloo import run_ranks
from tests.worker.training import digest, random_digest


def live_state(**values: Any) -> LiveState:
    """A state that holds these, right after a commit."""
    state = LiveState(Tree(values, Steps()), RandomStates())
    state.tree.keep()
    return state


def carry(sender: LiveState, receiver: LiveState) -> None:
    """What a transfer does, within this process."""
    contents = split(sender)
    envelope = make_envelope(contents, sender.parts, sender.random.portable())
    sent = [tensor for _, own in contents.values() for _, tensor in own]

    def fill(places: list[Tensor]) -> None:
        with torch.no_grad():
            for place, content in zip(places, sent, strict=True):
                place.copy_(content)

    take_over(receiver, envelope, fill, with_random=True)
    receiver.tree.keep(from_others=True)


def share(
    rank: int, size: int, seed: int, chunk: int, receivers: frozenset[int]
) -> tuple[str, str]:
    """Rank 1 sends; others stand by or have no part. (digest before, digest after)"""
    sharing.CHUNK_BYTES = chunk
    sharing.ALONE_BYTES = 64
    route = Route(1, receivers)
    torch.manual_seed(seed + rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1).double())
    model.register_parameter("strided", nn.Parameter(torch.rand(3, 4).t()))
    model.register_buffer("flags", torch.rand(9) > 0.5)
    model.register_parameter("small", nn.Parameter(torch.rand(3).to(torch.bfloat16)))
    model.register_buffer("none", torch.empty(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank not in receivers:  # a receiver's optimizer has made no state of its own yet
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    shared = live_state(
        model=model, optimizer=optimizer, note=[rank, {"r": rank}], plain=torch.rand(40)
    )
    pointers = [t.data_ptr() for t in (*model.parameters(), shared.values["plain"])]

    def all_of_it() -> str:
        note, plain = shared.values["note"], shared.values["plain"]
        return digest(model.state_dict(), optimizer.state_dict(), note, plain, random_digest())

    before = all_of_it()
    if rank == 1:
        assert send(shared, route) == ""
    elif rank in receivers:
        assert receive(shared, route, with_random=True) is None
    elif route.takes_all:
        stand_by(route)
    now = [t.data_ptr() for t in (*model.parameters(), shared.values["plain"])]
    assert now == pointers, "written in place"
    return before, all_of_it()


@pytest.mark.parametrize("chunk", [32, 1 << 20])
def test_one_receiver_has_the_senders_state_and_nobody_else_takes_part(
    tmp_path: Path, chunk: int
) -> None:
    only = frozenset({0})
    (_, received), (sent, after), (before, kept) = run_ranks(3, share, tmp_path, 5, chunk, only)
    assert sent == after == received
    assert before == kept
    assert before != sent


@pytest.mark.parametrize("chunk", [32, 1 << 20])
def test_several_receivers_have_the_senders_state_and_a_bystander_its_own(
    tmp_path: Path, chunk: int
) -> None:
    both = frozenset({0, 3})
    (_, one), (sent, after), (before, kept), (_, other) = run_ranks(
        4, share, tmp_path, 5, chunk, both
    )
    assert sent == after == one == other
    assert before == kept
    assert before != sent


def fail_to_pack(rank: int, size: int, receivers: frozenset[int]) -> str:
    """Rank 1 has a value that cannot be sent; what each rank says about it."""
    state = live_state(weight=torch.ones(3), note=[rank])
    route = Route(1, receivers)
    if rank == 1:
        state.values["note"].append(each for each in ())
        return send(state, route)
    if rank not in receivers:
        if route.takes_all:
            stand_by(route)
        return ""
    with pytest.raises(UsageError) as caught:
        receive(state, route, with_random=True)
    assert state.values["note"] == [rank], "the receiver's own state is as it was"
    return str(caught.value)


@pytest.mark.parametrize("receivers", [frozenset({0}), frozenset({0, 2})])
def test_receivers_learn_why_a_sender_cannot_pack_its_state_and_it_goes_on(
    tmp_path: Path, receivers: frozenset[int]
) -> None:
    found = run_ranks(4, fail_to_pack, tmp_path, receivers)
    assert "'note.1' cannot be sent" in found[1]
    for rank in receivers:
        assert found[rank] == f"rank 1 cannot send its state: {found[1]}"
    assert found[3] == ""


def test_a_model_that_is_built_differently_is_named() -> None:
    mine = live_state(net=nn.Linear(2, 2))
    before = digest(mine.values["net"].state_dict())
    with pytest.raises(UsageError, match=r"net is built differently .*'weight' is float32\[2, 2\]"):
        carry(live_state(net=nn.Linear(2, 3)), mine)
    with pytest.raises(UsageError, match=r"net is built differently .*only this one has 'bias'"):
        carry(live_state(net=nn.Linear(2, 2, bias=False)), mine)
    with pytest.raises(UsageError, match=r"net is of the class Linear, .* it is Sequential"):
        carry(live_state(net=nn.Sequential(nn.Linear(2, 2))), mine)
    assert digest(mine.values["net"].state_dict()) == before, "nothing was loaded"


def test_an_optimizer_of_another_class_is_named() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    adam, sgd = torch.optim.Adam(one.parameters()), torch.optim.SGD(other.parameters())
    with pytest.raises(UsageError, match="opt is of the class SGD, in the trained state it is Ada"):
        carry(live_state(net=one, opt=adam), live_state(net=other, opt=sgd))


def test_a_state_with_other_parts_is_named() -> None:
    with pytest.raises(UsageError, match=r"has the parts net, the trained one net, ema; run"):
        carry(live_state(net=nn.Linear(1, 1), ema=nn.Linear(1, 1)), live_state(net=nn.Linear(1, 1)))


def test_buffers_that_the_sender_made_late_are_made_on_the_receiver() -> None:
    ours, theirs = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    theirs[0].register_buffer("seen", torch.tensor([3, 4]))
    theirs[0].register_buffer("cache", torch.ones(2), persistent=False)
    carry(live_state(net=theirs), live_state(net=ours))
    assert torch.equal(ours[0].seen, torch.tensor([3, 4]))
    assert torch.equal(ours[0].cache, torch.ones(2))
    assert digest(ours.state_dict()) == digest(theirs.state_dict())
    assert list(ours.state_dict()) == ["0.weight", "0.bias", "0.seen"]


def test_a_parameter_group_that_the_sender_has_added_arrives() -> None:
    def make() -> LiveState:
        net = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
        return live_state(net=net, opt=torch.optim.SGD(net["body"].parameters(), lr=0.1))

    sender, receiver = make(), make()
    theirs, ours = sender.values["opt"], receiver.values["opt"]
    theirs.add_param_group({"params": sender.values["net"]["head"].parameters(), "lr": 0.01})
    theirs.param_groups[0]["lr"] = 0.5
    sender.tree.keep()
    carry(sender, receiver)
    assert [group["lr"] for group in ours.param_groups] == [0.5, 0.01]
    head = receiver.values["net"]["head"]
    assert all(
        a is b for a, b in zip(ours.param_groups[1]["params"], head.parameters(), strict=True)
    )
    receiver.tree.roll_back()
    assert len(ours.param_groups) == 2


def test_plain_values_arrive_in_the_objects_that_the_script_holds() -> None:
    tensor, log, table = torch.zeros(2), [0], {"best": [0.0]}
    inner = table["best"]
    receiver = live_state(tensor=tensor, log=log, table=table, count=0)
    carry(
        live_state(tensor=torch.ones(2), log=[1, 2], table={"best": [0.5], "k": 1}, count=3),
        receiver,
    )
    assert receiver.values["tensor"] is tensor
    assert receiver.values["log"] is log
    assert receiver.values["table"] is table
    assert table["best"] is inner
    assert (tensor.tolist(), log, table) == ([1.0, 1.0], [1, 2], {"best": [0.5], "k": 1})
    assert receiver.values["count"] == 3


def test_what_two_attributes_of_the_sender_share_is_shared_on_the_receiver() -> None:
    net = nn.Linear(1, 1)
    mine = live_state(net=net, first=[0], second=[[0], {"net": net}])
    shared = [1]
    theirs = nn.Linear(1, 1)
    carry(live_state(net=theirs, first=shared, second=[shared, {"net": theirs}]), mine)
    assert mine.values["second"][0] is mine.values["first"]
    assert mine.values["second"][1]["net"] is net


def test_optimizer_state_of_another_dtype_than_its_parameter_stays_exact() -> None:
    exact = torch.tensor([1.0000001, 2.0, 3.0])

    def make() -> LiveState:
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return live_state(weight=weight, opt=torch.optim.SGD([weight], lr=0.1, momentum=0.9))

    sender, receiver = make(), make()
    sender.values["opt"].state[sender.values["weight"]] = {"momentum_buffer": exact}
    sender.tree.keep()
    carry(sender, receiver)
    found = receiver.values["opt"].state[receiver.values["weight"]]["momentum_buffer"]
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)


def test_gradients_that_belong_to_the_commit_arrive() -> None:
    def make() -> LiveState:
        net = nn.Linear(2, 1)
        return live_state(net=net, opt=torch.optim.SGD(net.parameters(), lr=0.1))

    sender, receiver = make(), make()
    sender.values["net"](torch.ones(3, 2)).sum().backward()
    sender.tree.keep()
    carry(sender, receiver)
    assert torch.equal(receiver.values["net"].weight.grad, torch.full((1, 2), 3.0))
    mine, theirs = receiver.tree.kept_gradients(), sender.tree.kept_gradients()
    assert [name for name, _ in mine] == [name for name, _ in theirs] == ["net.weight", "net.bias"]
    assert digest([each for _, each in mine]) == digest([each for _, each in theirs])

"""Ranks, coordinator and the channels between them, without processes: what gets agreed."""

import random
from collections import deque

import pytest

from elastic_driver.horovod.engine.negotiation import Coordinator, NegotiationLimits, Ordered
from elastic_driver.horovod.engine.requests import (
    Agreement,
    Ready,
    Received,
    Request,
    Sent,
    decode_to_coordinator,
    encode,
    is_repeated,
)

SUM = 1


def allreduce(name: str, *shape: int, **more: object) -> Request:
    return Request(
        "allreduce", name, dtypes=("float32",), shapes=(shape,), op=SUM, nbytes=4 * 8, **more
    )  # type: ignore[arg-type]


def texts(ordered: list[Ordered]) -> list[str]:
    return [a.error for o in ordered for a in o.batch]


def test_an_operation_is_agreed_on_when_the_last_rank_has_requested_it() -> None:
    coordinator = Coordinator(3)
    assert coordinator.ready(2, [allreduce("a", 3), allreduce("b", 3)], 0.0) == []
    assert coordinator.ready(0, [allreduce("b", 3), allreduce("a", 3)], 0.0) == []
    (ordered,) = coordinator.ready(1, [allreduce("a", 3)], 0.0)
    assert ordered == Ordered([Agreement("allreduce", "a")], (0, 1, 2))


def test_small_tensors_of_one_kind_become_one_transfer() -> None:
    coordinator = Coordinator(2, NegotiationLimits(fusion_bytes=64))
    halves = [allreduce(name, 3) for name in "abc"]
    other = allreduce("other", 3, postscale=0.5)
    requests = [halves[0], other, halves[1], halves[2]]
    coordinator.ready(0, requests, 0.0)
    batches = [[a.name for a in o.batch] for o in coordinator.ready(1, requests, 0.0)]
    assert batches == [["a", "b"], ["other"], ["c"]]


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        (
            allreduce("x", 17, 3),
            allreduce("x", 18, 3),
            "allreduce 'x': ranks disagree about the shape: [17, 3] on ranks 0, 2; "
            "[18, 3] on rank 1",
        ),
        (
            allreduce("x", 3),
            Request("allreduce", "x", dtypes=("int32",), shapes=((3,),), op=SUM),
            "the dtype: float32 on ranks 0, 2; int32 on rank 1",
        ),
        (
            Request("broadcast", "x", dtypes=("int32",), shapes=((3,),), root=0),
            Request("broadcast", "x", dtypes=("int32",), shapes=((3,),), root=1),
            "the root rank: 0 on ranks 0, 2; 1 on rank 1",
        ),
        (
            Request("allgather", "x", dtypes=("int32",), shapes=((3, 4),)),
            Request("allgather", "x", dtypes=("int32",), shapes=((7, 5),)),
            "the shape beyond the first dimension: [*, 4] on ranks 0, 2; [*, 5] on rank 1",
        ),
        (
            allreduce("x", 3),
            Request("allreduce", "x", dtypes=("float32",), shapes=((3,),), op=3),
            "the operation: Sum on ranks 0, 2; Min on rank 1",
        ),
        (
            allreduce("x", 3),
            Request("allreduce", "x", dtypes=("float32",) * 2, shapes=((3,), (4,)), op=SUM),
            "the number of tensors: 1 on ranks 0, 2; 2 on rank 1",
        ),
    ],
)
def test_a_disagreement_names_tensor_ranks_and_both_values(
    one: Request, other: Request, error: str
) -> None:
    coordinator = Coordinator(3)
    for rank in (0, 2):
        assert coordinator.ready(rank, [one], 0.0) == []
    (ordered,) = coordinator.ready(1, [other], 0.0)
    assert ordered.ranks == (0, 1, 2)
    assert error in ordered.batch[0].error
    assert coordinator.deadline() is None


def test_first_dimensions_of_an_allgather_may_differ() -> None:
    coordinator = Coordinator(2)
    gather = [Request("allgather", "x", dtypes=("int8",), shapes=((n, 4),)) for n in (3, 0)]
    coordinator.ready(1, [gather[1]], 0.0)
    (ordered,) = coordinator.ready(0, [gather[0]], 0.0)
    assert ordered.batch[0].sizes == ((3,), (0,))


def test_a_rank_that_has_joined_is_absent_until_all_have_joined() -> None:
    coordinator = Coordinator(2)
    join, x = Request("join", "join"), allreduce("x", 3)
    coordinator.ready(0, [x], 0.0)
    (ordered,) = coordinator.ready(1, [join], 0.0)
    assert ordered.batch == [Agreement("allreduce", "x", absent=(1,), pattern=x)]
    gather = Request("allgather", "g", dtypes=("int8",), shapes=((3,),))
    assert texts(coordinator.ready(0, [gather], 0.0)) == [
        "allgather 'g': rank 1 has joined, and allgather needs all ranks"
    ]
    (ordered,) = coordinator.ready(0, [join], 0.0)
    assert ordered.batch == [Agreement("join", "join", value=0)]
    assert coordinator.ready(0, [x], 0.0) == []  # nobody is absent any more


def test_a_process_set_has_operations_of_its_own() -> None:
    coordinator = Coordinator(3)
    add = Request("add_process_set", "p", splits=(0, 2))
    for rank in (0, 1):
        coordinator.ready(rank, [add], 0.0)
    (ordered,) = coordinator.ready(2, [add], 0.0)
    assert ordered.batch[0].value == 1
    mine = allreduce("x", 3, process_set=1)
    coordinator.ready(2, [mine], 0.0)
    assert texts(coordinator.ready(1, [mine], 0.0)) == [
        "allreduce 'x' of process set 1: there is no such process set with rank 1"
    ]
    (ordered,) = coordinator.ready(0, [mine], 0.0)
    assert ordered.ranks == (0, 2)


def test_a_tensor_that_a_rank_forgot_is_named_and_then_fails() -> None:
    coordinator = Coordinator(3, NegotiationLimits(stall_warning=60.0, stall_failure=90.0))
    coordinator.ready(0, [allreduce("x", 3)], 10.0)
    coordinator.ready(1, [Request("allgather", "x", dtypes=("int8",), shapes=((3,),))], 12.0)
    assert coordinator.deadline() == 70.0
    warnings, failed = coordinator.stalled(71.0)
    assert warnings == [
        "allreduce 'x': rank 0 called it, and ranks 1, 2 did not, "
        "but allgather with this name in 61 s"
    ]
    assert failed == []
    assert coordinator.deadline() == 72.0
    coordinator.stalled(72.0)
    warnings, failed = coordinator.stalled(100.0)
    assert [(o.ranks, o.batch[0].kind) for o in failed] == [((0,), "allreduce")]
    # The others fail as well, when they call it; then it is forgotten.
    for rank in (1, 2):
        (ordered,) = coordinator.ready(rank, [allreduce("x", 3)], 101.0)
        assert ordered.ranks == (rank,)
        assert "ranks 1, 2 did not" in ordered.batch[0].error
    assert coordinator.ready(0, [allreduce("x", 3)], 102.0) == []


def test_a_rank_that_leaves_fails_what_the_others_wait_for() -> None:
    coordinator = Coordinator(3)
    coordinator.ready(0, [allreduce("x", 3)], 0.0)
    coordinator.ready(1, [allreduce("mine", 3)], 0.0)
    (ordered,) = coordinator.leave(1)
    assert ordered.ranks == (0,)
    assert ordered.batch[0].error == "allreduce 'x': rank 1 called hvd.shutdown()"
    assert texts(coordinator.ready(2, [allreduce("x", 3)], 0.0)) == [ordered.batch[0].error]
    assert texts(coordinator.ready(2, [Request("join", "join")], 0.0)) == [
        "join 'join': rank 1 called hvd.shutdown()"
    ]
    coordinator.leave(0)
    assert not coordinator.all_left
    coordinator.leave(2)
    assert coordinator.all_left


def test_lists_that_come_again_are_ordered_as_before() -> None:
    coordinator = Coordinator(2)
    first, second = [allreduce("a", 3), allreduce("b", 3)], [allreduce("b", 3), allreduce("a", 3)]
    orders = []
    for _ in range(3):
        assert coordinator.ready(0, first, 0.0) == []
        orders.append(coordinator.ready(1, second, 0.0))
    assert [one.batch for one in orders[0]] == [[Agreement("allreduce", n) for n in ("b", "a")]]
    assert orders[0] == orders[1] == orders[2]
    coordinator.ready(0, first[:1], 0.0)
    assert texts(coordinator.ready(1, [allreduce("a", 4)], 0.0))[0].startswith("allreduce 'a'")


def test_a_list_that_one_rank_lacks_stalls_and_fails() -> None:
    coordinator = Coordinator(2, NegotiationLimits(stall_warning=60.0))
    coordinator.ready(0, [allreduce("a", 3), allreduce("b", 3)], 10.0)
    assert coordinator.deadline() == 70.0
    warnings, _ = coordinator.stalled(70.0)
    assert [warning.partition(":")[0] for warning in warnings] == ["allreduce 'a'", "allreduce 'b'"]
    coordinator = Coordinator(2)
    coordinator.ready(0, [allreduce("a", 3), allreduce("b", 3)], 10.0)
    assert len(coordinator.leave(1)) == 2


@pytest.mark.parametrize("seed", range(200))
def test_whole_lists_lead_to_the_same_operations_as_single_requests(seed: int) -> None:
    random_ = random.Random(seed)
    size = random_.randint(1, 3)
    whole, single = Coordinator(size), Coordinator(size)
    names = [f"t{number}" for number in range(random_.randint(1, 6))]
    for _ in range(4):
        of_whole, of_single = [], []
        lists = [[(rank, name) for name in names] for rank in range(size)]
        if random_.random() < 0.5:
            for each in lists:
                random_.shuffle(each)
        while any(lists):
            mine = random_.choice([each for each in lists if each])
            count = random_.choice([1, len(mine), len(mine)])
            rank, requests = mine[0][0], [allreduce(name, 3) for _, name in mine[:count]]
            del mine[:count]
            of_whole += whole.ready(rank, requests, 0.0)
            for request in requests:
                of_single += single.ready(rank, [request], 0.0)
        done = [sorted(a.name for one in o for a in one.batch) for o in (of_whole, of_single)]
        assert done == [sorted(names), sorted(names)]


def test_what_was_sent_before_is_sent_as_a_number() -> None:
    sent: Sent[Request] = Sent(capacity=2)
    received: Received[Request] = Received()
    sizes = []
    for name in ("a", "b", "a", "b", "c", "a", "x.noname.1", "a"):
        request = allreduce(name, 3)
        data = encode(Ready(sent.shorten([request], repeated=is_repeated)))
        sizes.append(len(data) < 20)
        message = decode_to_coordinator(data)
        assert isinstance(message, Ready)
        assert received.expand(message.requests[0]) == request
    assert sizes == [False, False, True, True, False, False, False, True]


class SimulatedRank:
    """Calls operations in an order of its own, with some left out; waits for all at the end."""

    def __init__(self, calls: list[Request]) -> None:
        self.calls = deque(calls)
        self.pending: dict[tuple[str, str, int], Request] = {}
        self.log: list[Agreement] = []
        self.sent: Sent[Request] = Sent(capacity=8)
        self.received: Received[Request] = Received()

    def send(self, count: int) -> bytes:
        """Return a message with up to `count` calls."""
        requests = []
        while self.calls and count and self.calls[0].key not in self.pending:
            request = self.calls.popleft()
            self.pending[request.key] = request
            requests.append(request)
            count -= 1
        return encode(Ready(self.sent.shorten(requests, repeated=is_repeated)))

    def get(self, agreement: Agreement) -> None:
        assert agreement.key in self.pending or agreement.absent
        self.log.append(agreement)
        self.pending.pop(agreement.key, None)


def random_calls(random_: random.Random, size: int) -> list[list[Request]]:
    """Return the calls of each rank: other orders, sometimes another shape, sometimes none."""
    calls: list[list[Request]] = [[] for _ in range(size)]
    for number in range(random_.randint(1, 12)):
        request = allreduce(f"t{number % 7}", random_.randint(1, 3))
        odd = random_.choice(["", "", "", "disagree", "forget"])
        guilty = random_.randrange(size)
        for rank in range(size):
            if odd == "forget" and rank == guilty:
                continue
            other = odd == "disagree" and rank == guilty
            calls[rank].append(allreduce(request.name, 9) if other else request)
    for mine in calls:
        random_.shuffle(mine)
    return calls


@pytest.mark.parametrize("block", range(4))
def test_1000_seeds_end_in_equal_orders_or_named_errors(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        random_ = random.Random(seed)
        size = random_.randint(2, 4)
        limits = NegotiationLimits(random_.choice([0, 64, 1000]), None, 30.0)
        coordinator = Coordinator(size, limits)
        world = [SimulatedRank(calls) for calls in random_calls(random_, size)]
        now = 0.0
        while any(rank.calls or rank.pending for rank in world):
            able = [r for r in range(size) if world[r].calls]
            if able and any(world[r].calls[0].key not in world[r].pending for r in able):
                number = random_.choice(able)
                message = decode_to_coordinator(world[number].send(random_.randint(1, 4)))
                assert isinstance(message, Ready)
                expand = coordinator_side(world[number])
                ordered = coordinator.ready(number, map(expand, message.requests), now)
            else:  # all wait for ranks that have forgotten something
                deadline = coordinator.deadline()
                assert deadline is not None, seed
                now = deadline
                _, ordered = coordinator.stalled(now)
            for one in ordered:
                for rank in one.ranks:
                    for agreement in one.batch:
                        world[rank].get(agreement)
        check_logs(world, seed)


def coordinator_side(rank: SimulatedRank):  # type: ignore[no-untyped-def]
    return rank.received.expand


def check_logs(world: list[SimulatedRank], seed: int) -> None:
    """The transfers are the same on all ranks, in the same order; errors name ranks."""
    transfers = [[a for a in rank.log if not a.error] for rank in world]
    assert all(transfer == transfers[0] for transfer in transfers), seed
    for rank in world:
        for agreement in rank.log:
            if agreement.error:
                assert agreement.name in agreement.error, seed
                assert "rank" in agreement.error, seed

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rendezvous.waiting import Deadlines


def test_items_come_out_in_the_order_of_their_times() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for item, at in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        deadlines.set(item, at)
    assert deadlines.next() == 1.0
    assert deadlines.due(2.0) == ["early", "middle"]
    assert deadlines.due(2.9) == []
    assert deadlines.due(3.0) == ["late"]
    assert deadlines.next() is None


def test_a_new_time_replaces_the_old_one_in_both_directions() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 5.0)
    deadlines.set("a", 9.0)
    assert deadlines.due(8.0) == []
    deadlines.set("a", 1.0)
    assert deadlines.due(1.0) == ["a"]
    assert deadlines.due(100.0) == []


def test_postponing_moves_every_time() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("b", 2.0)
    deadlines.postpone(10.0)
    assert deadlines.due(10.9) == []
    assert deadlines.due(12.0) == ["a", "b"]


def test_renewing_a_lease_for_ever_does_not_grow_the_heap() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for n in range(10_000):
        deadlines.set("lease", float(n))
    assert len(deadlines._heap) < 200


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "discard", "due"]), st.integers(0, 5), st.integers(0, 20)
        ),
        max_size=200,
    )
)
def test_it_agrees_with_a_plain_dictionary(steps: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for what, item, at in steps:
        if what == "set":
            deadlines.set(item, at)
            model[item] = at
        elif what == "discard":
            deadlines.discard(item)
            model.pop(item, None)
        else:
            ready = [key for key, time in model.items() if time <= at]
            assert sorted(deadlines.due(at)) == sorted(ready)
            for key in ready:
                del model[key]
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)

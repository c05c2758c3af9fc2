"""Which member takes the next piece of work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock_driver.placement.choice import SLACK, SPILL, choose, ranking

NAMES = st.sets(st.text("abcdef0123456789", min_size=1, max_size=4), min_size=1, max_size=8)


@given(NAMES, st.text(max_size=8))
def test_a_member_that_leaves_moves_only_what_it_had(names: set[str], key: str) -> None:
    order = ranking(names, key)
    for gone in names:
        assert ranking(names - {gone}, key) == [name for name in order if name != gone]


@given(NAMES, st.lists(st.sampled_from("xyz"), max_size=60))
def test_no_member_has_much_more_than_the_mean(names: set[str], keys: list[str]) -> None:
    loads: dict[str, float] = dict.fromkeys(names, 0)
    for key in keys:
        chosen = choose(loads, key)
        assert chosen is not None
        assert loads[chosen] <= SPILL * sum(loads.values()) / len(loads) + SLACK
        loads[chosen] += 1


@given(NAMES, st.text(max_size=8))
def test_equal_work_stays_together_while_there_is_room(names: set[str], key: str) -> None:
    loads: dict[str, float] = dict.fromkeys(names, 0)
    for _ in range(SLACK):
        loads[str(choose(loads, key))] += 1
    assert sorted(loads.values())[-1] == SLACK


@given(NAMES, st.text(max_size=8), st.data())
def test_a_member_to_avoid_is_taken_only_if_there_is_no_other(names: set[str], key: str, data: st.DataObject) -> None:
    avoid = data.draw(st.sets(st.sampled_from(sorted(names))))
    chosen = choose(dict.fromkeys(names, 0), key, avoid)
    assert chosen in (names - avoid or names)


@given(NAMES, st.text(max_size=8), st.integers(0, SLACK))
def test_a_holder_is_taken_while_it_has_little_more_to_do(names: set[str], key: str, more: int) -> None:
    for holder in names:
        loads = dict.fromkeys(names, 0.0) | {holder: float(more)}
        assert choose(loads, key, holding={holder}) == holder


@given(st.sets(st.text("abcdef0123456789", min_size=2, max_size=4), min_size=2, max_size=20), st.text(max_size=8))
def test_a_newcomer_gets_what_ranks_it_first_though_others_hold_it(names: set[str], key: str) -> None:
    """Also where all of the others are near the mean: else an eleventh machine would never get known work."""
    newcomer, *others = ranking(names, key)
    loads = dict.fromkeys(others, SLACK + 1.0) | {newcomer: 0.0}
    assert choose(loads, key, holding=others) == newcomer


def test_without_members_nothing_is_chosen() -> None:
    assert choose({}, "key") is None

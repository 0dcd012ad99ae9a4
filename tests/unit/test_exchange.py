"""Exchanges: what is taken at hand, what moves, and which moves are one collective."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soapstone.machine import preset, resolve
from soapstone.ops.box import Box, Interval, intersection
from soapstone.tasks.exchange import Exchange, Pattern, Sink, Source, exchange, recognised

MACHINE = preset("p100:1x8")
K80 = preset("k80:1x4")


def row(lo: int, hi: int, width: int = 4) -> Box:
    """Rows `lo` to `hi` of a matrix."""
    return (Interval(lo, hi), Interval(0, width))


def exchanged(sources: list[Source], sinks: list[Sink]) -> Exchange:
    return exchange(sources, sinks, MACHINE)


def patterns(found: Exchange) -> list[tuple[str, tuple[int, ...], int]]:
    return [(move.pattern.value, move.devices, move.elements) for move in found.moves]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_parts_wanted_whole_by_all_are_gathered(n: int) -> None:
    sources = [Source(0, row(d, d + 1), (d,)) for d in range(n)]
    found = exchanged(sources, [Sink(row(0, n), d) for d in range(n)])
    assert patterns(found) == [("all_gather", tuple(range(n)), 4)]
    assert found.local == tuple((d, d) for d in range(n))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_summands_wanted_in_parts_are_reduced_and_scattered(n: int) -> None:
    sources = [Source(d, row(0, n), (d,)) for d in range(n)]
    found = exchanged(sources, [Sink(row(d, d + 1), d) for d in range(n)])
    assert patterns(found) == [("reduce_scatter", tuple(range(n)), 4)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_summands_wanted_whole_by_all_are_all_reduced(n: int) -> None:
    sources = [Source(d, row(0, 3), (d,)) for d in range(n)]
    found = exchanged(sources, [Sink(row(0, 3), d) for d in range(n)])
    assert patterns(found) == [("all_reduce", tuple(range(n)), 12)]


@pytest.mark.parametrize("n", [3, 4])
def test_rows_that_become_columns_go_from_all_to_all(n: int) -> None:
    sources = [Source(0, (Interval(d, d + 1), Interval(0, n)), (d,)) for d in range(n)]
    found = exchanged(sources, [Sink((Interval(0, n), Interval(d, d + 1)), d) for d in range(n)])
    assert patterns(found) == [("all_to_all", tuple(range(n)), 1)]


def test_two_devices_that_swap_pieces_gather_them() -> None:
    """With two devices an all-to-all is an all-gather of what is swapped."""
    sources = [Source(0, (Interval(d, d + 1), Interval(0, 2)), (d,)) for d in range(2)]
    found = exchanged(sources, [Sink((Interval(0, 2), Interval(d, d + 1)), d) for d in range(2)])
    assert patterns(found) == [("all_gather", (0, 1), 1)]


def test_one_reader_is_no_collective() -> None:
    sources = [Source(d, row(0, 3), (d,)) for d in range(3)]
    found = exchanged(sources, [Sink(row(0, 3), 0)])
    assert patterns(found) == [("transfer", (1, 0), 12), ("transfer", (2, 0), 12)]
    assert found.local == ((0, 0),)


def test_neighbours_are_no_collective() -> None:
    """A halo of one row between four devices: six transfers."""
    sources = [Source(0, row(2 * d, 2 * d + 2), (d,)) for d in range(4)]
    sinks = [Sink(row(max(0, 2 * d - 1), min(8, 2 * d + 3)), d) for d in range(4)]
    pairs = [(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1]
    assert patterns(exchanged(sources, sinks)) == [("transfer", pair, 4) for pair in pairs]


def test_uneven_pieces_are_no_collective() -> None:
    sources = [Source(0, row(0, 1), (0,)), Source(0, row(1, 3), (1,))]
    found = exchanged(sources, [Sink(row(0, 3), d) for d in range(2)])
    assert patterns(found) == [("transfer", (0, 1), 4), ("transfer", (1, 0), 8)]


def test_sets_of_devices_that_do_not_meet_have_collectives_of_their_own() -> None:
    sources = [Source(0, row(d, d + 1), (d,)) for d in range(4)]
    sinks = [Sink(row(d // 2 * 2, d // 2 * 2 + 2), d) for d in range(4)]
    assert patterns(exchanged(sources, sinks)) == [("all_gather", (0, 1), 4), ("all_gather", (2, 3), 4)]


def test_all_at_hand_moves_nothing() -> None:
    sources = [Source(0, row(d, d + 1), (d,)) for d in range(2)]
    found = exchanged(sources, [Sink(row(d, d + 1), d) for d in range(2)])
    assert found.moves == ()
    assert found.local == ((0, 0), (1, 1))


def test_equal_boxes_for_one_device_move_once() -> None:
    sources = [Source(0, row(0, 4), (0,))]
    found = exchanged(sources, [Sink(row(0, 2), 1), Sink(row(1, 4), 1), Sink(row(0, 2), 2)])
    assert [(m.devices, m.elements, m.sinks) for m in found.moves] == [
        ((0, 1), 8, (0,)),
        ((0, 1), 12, (1,)),
        ((0, 2), 8, (2,)),
    ]
    twice = exchanged([Source(0, row(0, 2), (0,))], [Sink(row(0, 2), 1), Sink(row(0, 4), 1)])
    assert [(m.devices, m.elements, m.sinks) for m in twice.moves] == [((0, 1), 8, (0, 1))]


def test_summands_of_one_device_are_added_before_they_are_sent() -> None:
    sources = [Source(0, row(0, 2), (0,)), Source(1, row(0, 2), (0,))]
    found = exchanged(sources, [Sink(row(0, 2), 1)])
    assert [(m.devices, m.elements, m.sources) for m in found.moves] == [((0, 1), 8, ((0, 0), (1, 0)))]


def test_summands_are_added_only_for_those_that_want_both() -> None:
    """Sources [0, 4) and [2, 6) of two summands on device 0; sinks [2, 8) and [0, 4) on device 1. Both
    overlap in [2, 4) with one of the sinks, but each sink has the other summand brought with more."""
    held = [Source(0, row(0, 4), (0,)), Source(1, row(2, 6), (0,))]
    found = exchanged(held, [Sink(row(2, 8), 1), Sink(row(0, 4), 1)])
    assert sorted((m.elements, m.sources, m.sinks) for m in found.moves) == [
        (8, ((0, 0),), (0,)),
        (8, ((1, 0),), (1,)),
        (16, ((0, 0),), (1,)),
        (16, ((1, 0),), (0,)),
    ]


def test_the_copy_with_the_widest_route_is_taken() -> None:
    """On a K80 node, 2 and 3 share a private switch; 0 and 1 are behind the slower, shared one."""
    found = exchange([Source(0, row(0, 2), (0, 2))], [Sink(row(0, 2), 3)], K80)
    assert [m.devices for m in found.moves] == [(2, 3)]


def test_equally_wide_copies_take_turns() -> None:
    found = exchange([Source(0, row(0, 2), (0, 1))], [Sink(row(0, 2), 2), Sink(row(0, 2), 3)], K80)
    assert [m.devices for m in found.moves] == [(0, 2), (1, 3)]


def test_a_copy_at_hand_is_taken_and_counts_once() -> None:
    sources = [Source(0, row(0, 2), (0, 1)), Source(1, row(0, 2), (2, 3))]
    found = exchanged(sources, [Sink(row(0, 2), d) for d in range(4)])
    assert patterns(found) == [("all_reduce", (0, 2), 8), ("all_reduce", (1, 3), 8)]
    assert found.local == ((0, 0), (0, 1), (1, 2), (1, 3))


def test_a_number_can_be_exchanged() -> None:
    """The box of a rank-0 value holds one element."""
    found = exchanged([Source(d, (), (d,)) for d in range(3)], [Sink((), d) for d in range(3)])
    assert patterns(found) == [("all_reduce", (0, 1, 2), 1)]


def test_nothing_is_recognised_in_nothing() -> None:
    assert recognised([], [], adds=False) is Pattern.TRANSFER


def boxes() -> st.SearchStrategy[Box]:
    interval = st.tuples(st.integers(0, 3), st.integers(1, 4)).map(lambda p: Interval(p[0], p[0] + p[1]))
    return st.tuples(interval, interval)


@st.composite
def sources(draw: st.DrawFn) -> list[Source]:
    """Sources of several summands; those of one summand do not overlap, as copies would."""
    found: list[Source] = []
    for box in draw(st.lists(boxes(), min_size=1, max_size=5)):
        summand = draw(st.integers(0, 2))
        devices = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)))
        if not any(s.summand == summand and intersection(s.box, box) is not None for s in found):
            found.append(Source(summand, box, devices))
    return found


@given(
    sources(),
    st.lists(st.tuples(boxes(), st.integers(0, 3)), min_size=1, max_size=5),
    st.permutations(range(5)),
)
@settings(max_examples=200, deadline=None)
def test_every_sink_gets_every_summand_of_every_element_once(
    held: list[Source], wanted: list[tuple[Box, int]], order: list[int]
) -> None:
    """Over all moves and what is at hand; and no matter in which order sinks are listed."""
    sinks = [Sink(box, device) for box, device in wanted]
    for machine in (MACHINE, K80):
        found = exchange(held, sinks, machine)
        got: Counter[object] = Counter()
        for source, sink in found.local:
            assert sinks[sink].device in held[source].devices
            got.update(delivered(held, sinks, source, sink))
        for move in found.moves:
            for source, giver in move.sources:
                assert giver in held[source].devices
            for source, sink in product({source for source, _ in move.sources}, move.sinks):
                assert sinks[sink].device in move.devices
                if move.pattern is Pattern.TRANSFER:
                    assert len(delivered(held, sinks, source, sink)) == move.elements
                if sinks[sink].device not in held[source].devices:
                    got.update(delivered(held, sinks, source, sink))
        want: Counter[object] = Counter()
        for source, sink in product(range(len(held)), range(len(sinks))):
            want.update(delivered(held, sinks, source, sink))
        assert got == want
        shuffled = [sinks[i] for i in order if i < len(sinks)]
        assert patterns(exchange(held, shuffled, machine)) == patterns(found)


def delivered(held: list[Source], sinks: list[Sink], source: int, sink: int) -> list[object]:
    """The elements of a source that a sink wants."""
    overlap = intersection(held[source].box, sinks[sink].box)
    if overlap is None:
        return []
    return [(sink, held[source].summand, e) for e in product(*(range(lo, hi) for lo, hi in overlap))]


def test_an_all_reduce_lists_the_transfers_it_consists_of() -> None:
    """From every device to every other, by sender and receiver; what a device has twice is added up."""
    box = (Interval(0, 4),)
    machine = resolve("p100:1x4")
    sinks = [Sink(box, device) for device in (3, 0, 2)]
    found = exchange([Source(i, box, (device,)) for i, device in enumerate((0, 2, 3, 2))], sinks, machine)
    (move,) = found.moves
    assert move.pattern is Pattern.ALL_REDUCE
    assert len(move.transfers) == 6
    assert [(t.sender, t.receiver, t.sources, t.sinks) for t in move.transfers] == [
        (0, 2, (0,), (2,)),
        (0, 3, (0,), (0,)),
        (2, 0, (1, 3), (1,)),
        (2, 3, (1, 3), (0,)),
        (3, 0, (2,), (1,)),
        (3, 2, (2,), (2,)),
    ]
    assert move.transfers[-1] == move.transfers[5:][0]
    assert set(found.local) == {(0, 1), (1, 2), (2, 0), (3, 2)}

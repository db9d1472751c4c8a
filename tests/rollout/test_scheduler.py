"""Admission on paper: no engine, no device."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_jax.rollout.scheduler import Dispatcher, Place, Pool, Request, Scheduler


def test_safe_admission_reserves_for_the_longest():
    scheduler = Scheduler([Pool(2, 100), Pool(1, 400)])
    short, long, third = Request(10, 90), Request(10, 300), Request(10, 90)
    for request in (long, short, third):
        scheduler.submit(request)
    assert scheduler.admit() == [(long, Place(1, 0)), (short, Place(0, 0)), (third, Place(0, 1))]


def test_a_request_that_fits_nowhere_does_not_hold_up_those_that_do():
    scheduler = Scheduler([Pool(1, 100), Pool(1, 400)])
    first, blocked, other = Request(10, 300), Request(10, 300), Request(10, 90)
    for request in (first, blocked, other):
        scheduler.submit(request)
    assert [request for request, _ in scheduler.admit()] == [first, other]
    scheduler.release(Place(1, 0))
    assert scheduler.admit() == [(blocked, Place(1, 0))]


def test_what_has_begun_goes_first():
    scheduler = Scheduler([Pool(1, 100)])
    fresh, begun = Request(10, 90), Request(50, 90, begun=True)
    scheduler.submit(fresh)
    scheduler.submit(begun)
    assert [request for request, _ in scheduler.admit()] == [begun]


def test_the_estimate_is_the_mean_of_what_has_ended_and_never_above_the_longest():
    scheduler = Scheduler([Pool(1, 100), Pool(1, 400)], "estimate", quantum=8)
    request = Request(10, 300)
    assert scheduler.need(request) == 18
    for length in (150, 250):
        scheduler.ended(length)
    assert scheduler.need(request) == 200
    assert scheduler.need(Request(10, 120)) == 120
    assert scheduler.need(Request(250, 300)) == 258


@settings(max_examples=60, deadline=None)
@given(
    pools=st.lists(st.tuples(st.integers(1, 4), st.integers(8, 64)), min_size=1, max_size=3),
    jobs=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 64), st.booleans()), max_size=30),
    admission=st.sampled_from(["safe", "estimate"]),
)
def test_no_slot_is_given_twice_and_everything_that_can_be_served_is(pools, jobs, admission):
    longest = max(length for _, length in pools)
    scheduler = Scheduler([Pool(*pool) for pool in pools], admission, quantum=2)
    total, served, held = scheduler.free_slots, [], {}
    requests = [Request(min(length, bound, longest), min(bound, longest), begun=begun) for length, bound, begun in jobs]
    for request in requests:
        scheduler.submit(request)
    while scheduler.waiting:
        placed = scheduler.admit()
        assert placed, "a request waits although every slot is free"
        for request, place in placed:
            assert place not in held
            assert scheduler.length(place) >= scheduler.need(request) >= min(request.length, request.longest)
            held[place] = request
        assert scheduler.free_slots == total - len(held)
        if scheduler.waiting:
            assert not any(scheduler.fits(request) for request in scheduler.requests())
        served += [request for request, _ in placed]
        for place in held:
            scheduler.release(place)
            scheduler.ended(held[place].longest)
        held.clear()
    assert sorted(map(id, served)) == sorted(map(id, requests))


def test_withdrawn_requests_are_never_placed():
    scheduler = Scheduler([Pool(2, 100)])
    gone, there = Request(1, 10), Request(1, 10)
    scheduler.submit(gone)
    scheduler.submit(there)
    scheduler.withdraw(gone)
    scheduler.withdraw(gone)
    assert [request for request, _ in scheduler.admit()] == [there]


def test_trajectories_go_to_the_engine_with_the_most_free_tokens_and_wait_where_none_has_room():
    engines = [Scheduler([Pool(2, 100)]), Scheduler([Pool(3, 100)])]
    dispatcher = Dispatcher(engines)
    given = []

    def give(request, engine):
        given.append(engine)
        engines[engine].claim(engines[engine].need(request))

    dispatcher.submit(Request(1, 50) for _ in range(7))
    dispatcher.assign(give)
    assert given == [1, 0, 1, 0, 1] and dispatcher.waiting == 2
    engines[0].release(Place(0, 0))
    dispatcher.assign(give)
    assert given[5:] == [0] and dispatcher.waiting == 1


@pytest.mark.parametrize("need", [64, 65])
def test_claiming_takes_the_shortest_slot_that_is_long_enough(need):
    scheduler = Scheduler([Pool(1, 128), Pool(1, 64)])
    assert scheduler.claim(need) == Place(0 if need == 64 else 1, 0)

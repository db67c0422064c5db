"""Which address ranks meet at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.store import LOOPBACK, Seat, candidates

addresses = st.lists(st.sampled_from([f"10.0.0.{i}" for i in range(6)]), unique=True).map(tuple)
clusters = st.lists(st.builds(Seat, st.sampled_from(["a", "b", "c"]), addresses), min_size=1)


def test_ranks_of_one_host_meet_on_loopback_first() -> None:
    assert candidates([Seat("a", ("10.0.0.1",)), Seat("a", ("10.0.0.1",))]) == (LOOPBACK, "10.0.0.1")


def test_an_address_that_other_hosts_have_too_is_tried_last() -> None:
    seats = [Seat("a", ("172.17.0.1", "10.0.0.1", "10.0.0.2")), Seat("b", ("172.17.0.1", "10.0.0.3"))]
    assert candidates(seats) == ("10.0.0.1", "10.0.0.2", "172.17.0.1")


@given(clusters)
def test_loopback_is_never_tried_between_hosts(seats: list[Seat]) -> None:
    hosts = {seat.host for seat in seats}
    assert (LOOPBACK in candidates(seats)) == (len(hosts) == 1)
    assert {*candidates(seats)} - {LOOPBACK} == {*seats[0].addresses}


def test_this_host_names_no_address_that_stays_inside_it() -> None:
    assert not [address for address in Seat.here().addresses if address.startswith(("127.", "::1", "fe80:"))]

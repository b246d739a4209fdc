"""The host tier on its own: places for copies, by key."""

from octavo_core.host_tier import HostTier


def test_the_least_recently_stored_goes_first() -> None:
    host = HostTier(2)
    places = [host.store(key) for key in (b"a", b"b")]
    assert sorted(places) == [(0, None), (1, None)]
    assert host.store(b"a") == (None, None)  # there already, and wanted again
    assert host.store(b"c") == (places[1][0], b"b")
    assert host.lookup(b"b") is None
    assert host.num_used == 2


def test_what_a_step_copies_in_stays_until_the_step_is_made() -> None:
    host = HostTier(1)
    host.store(b"a")
    host.pin([b"a"])
    assert host.store(b"b") == (None, None)
    host.unpin_all()
    assert host.store(b"b") == (0, b"a")


def test_the_place_of_a_copy_that_was_never_made_is_used_again() -> None:
    host = HostTier(1)
    host.store(b"a")
    assert host.forget([b"a", b"unknown"]) == [b"a"]
    assert host.lookup(b"a") is None
    assert host.store(b"b") == (0, None)


def test_after_it_was_cleared_all_places_are_free() -> None:
    host = HostTier(3)
    for key in (b"a", b"b"):
        host.store(key)
    host.pin([b"a"])
    host.clear()
    assert host.num_used == 0
    assert {host.store(bytes([number]))[0] for number in range(3)} == {0, 1, 2}


def test_without_blocks_nothing_is_stored() -> None:
    assert HostTier(0).store(b"a") == (None, None)

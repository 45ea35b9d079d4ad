from __future__ import annotations

import socket

from sandbox.gate.names import UNUSED_NAME_SECONDS, NameTable, is_synthetic


def _ipv4(table: NameTable, name: str, now: float = 0.0) -> str:
    given = table.assign(name, now)
    assert given is not None
    return socket.inet_ntop(socket.AF_INET, given.ipv4)


def test_a_name_keeps_its_addresses() -> None:
    table = NameTable(10)
    given = table.assign("a.example", 0.0)
    assert given is not None and given == table.assign("a.example", 5.0)
    assert given != table.assign("b.example", 5.0)
    assert table.find(socket.inet_ntop(socket.AF_INET, given.ipv4), 6.0) == "a.example"
    assert table.find(socket.inet_ntop(socket.AF_INET6, given.ipv6), 6.0) == "a.example"


def test_an_address_that_was_given_to_nobody_has_no_name() -> None:
    table = NameTable(10)
    _ipv4(table, "a.example")
    for address in ("198.18.128.0", "198.18.128.2", "198.18.255.255", "fd6e:a9c1:52e7:b04d::2", "10.0.0.1"):
        assert table.find(address, 0.0) is None
    assert table.find("198.18.128.1", 0.0) == "a.example"


def test_synthetic_addresses_are_those_of_the_two_ranges() -> None:
    inside = ("198.18.128.0", "198.18.255.255", "fd6e:a9c1:52e7:b04d::", "fd6e:a9c1:52e7:b04d:ffff::1")
    outside = ("198.18.127.255", "198.19.0.0", "fd6e:a9c1:52e7:b04e::", "::1", "127.0.0.1")
    assert all(map(is_synthetic, inside))
    assert not any(map(is_synthetic, outside))


def test_the_table_is_bounded_and_names_in_use_stay() -> None:
    table = NameTable(2)
    first, second = _ipv4(table, "a.example"), _ipv4(table, "b.example")
    assert table.assign("c.example", UNUSED_NAME_SECONDS - 1) is None
    table.find(first, UNUSED_NAME_SECONDS - 1)  # dialled: now b is the oldest
    assert _ipv4(table, "c.example", UNUSED_NAME_SECONDS) == second
    assert table.find(first, UNUSED_NAME_SECONDS) == "a.example"
    assert table.find(second, UNUSED_NAME_SECONDS) == "c.example"
    assert table.assign("b.example", UNUSED_NAME_SECONDS) is None


def test_no_limit_goes_beyond_the_range() -> None:
    table = NameTable(10**9)
    addresses = {_ipv4(table, f"n{number}.example") for number in range(32766)}
    assert len(addresses) == 32766 and all(map(is_synthetic, addresses))
    assert table.assign("more.example", 0.0) is None

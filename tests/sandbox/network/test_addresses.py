"""Which addresses a name may lead to."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.network.addresses import PRIVATE, is_own, refusal, vet
from tests.tables import one_case

METADATA_SERVERS = (
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd00:ec2::253",
    "fd00:c1::a9fe:a9fe",
    "fd20:ce::254",
    "fd00:42::42",
)


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "1.0.0.1", "126.255.255.255", "128.0.0.0", "100.63.255.255", "100.128.0.0"),
        *("169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0"),
        *("198.17.255.255", "198.20.0.0", "223.255.255.255", "11.0.0.0", "9.255.255.255", "168.63.129.15"),
        *("192.0.1.0", "2600::1", "2a00:1450:4001::200e", "2001:200::1", "2001:db7::1", "2001:db9::1"),
        # An IPv4 address inside, which is fine itself.
        *("::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1", "2600::5efe:808:808"),
    ],
)
def test_addresses_of_the_internet(address: str) -> None:
    assert refusal(address) == ""


@one_case(
    ("address", "reason"),
    [
        ("0.0.0.0", "is unspecified"),
        ("0.1.2.3", "is unspecified"),
        ("::", "is unspecified"),
        ("127.0.0.1", "is this machine (loopback)"),
        ("127.255.255.255", "is this machine (loopback)"),
        ("::1", "is this machine (loopback)"),
        ("169.254.0.1", "is link-local"),
        ("fe80::1", "is link-local"),
        ("febf::1", "is link-local"),
        ("fec0::1", "is reserved (once site-local)"),
        ("10.0.0.0", "is private"),
        ("10.255.255.255", "is private"),
        ("172.16.0.0", "is private"),
        ("172.31.255.255", "is private"),
        ("192.168.0.0", "is private"),
        ("192.168.255.255", "is private"),
        ("100.64.0.0", "is private"),
        ("100.127.255.255", "is private"),
        ("fc00::", "is private"),
        ("fdff:ffff::1", "is private"),
        ("224.0.0.1", "is multicast"),
        ("239.255.255.255", "is multicast"),
        ("ff02::1", "is multicast"),
        ("255.255.255.255", "is broadcast"),
        ("240.0.0.1", "is reserved"),
        ("192.0.0.1", "is reserved for protocols"),
        ("192.88.99.1", "is reserved (a relay of 6to4)"),
        ("192.0.2.1", "is for documentation only"),
        ("198.51.100.1", "is for documentation only"),
        ("203.0.113.1", "is for documentation only"),
        ("2001:db8::1", "is for documentation only"),
        ("3fff::1", "is for documentation only"),
        ("198.18.0.1", "is for benchmarks only"),
        ("198.19.255.255", "is for benchmarks only"),
        ("2001:2::1", "is for benchmarks only"),
        ("100::1", "is reserved"),
        ("5f00::1", "is reserved"),
        ("4000::1", "is reserved"),
        ("1fff::1", "is reserved"),
        ("2001:10::1", "is reserved for protocols"),
        ("2001:20::1", "is reserved for protocols"),
        ("2001:1::1", "is reserved for protocols"),
        *((address, "serves the keys of cloud machines (metadata)") for address in METADATA_SERVERS),
        # Judged by the IPv4 address inside.
        ("::ffff:127.0.0.1", "is this machine (loopback)"),
        ("::ffff:a9fe:a9fe", "serves the keys of cloud machines (metadata)"),
        ("::ffff:10.0.0.1", "is private"),
        ("::127.0.0.1", "carries an IPv4 address (IPv4-compatible) that is this machine (loopback)"),
        ("::10.0.0.1", "carries an IPv4 address (IPv4-compatible) that is private"),
        ("::8.8.8.8", "is reserved"),
        ("::ffff:0:8.8.8.8", "is reserved"),
        ("64:ff9b::127.0.0.1", "carries an IPv4 address (NAT64) that is this machine (loopback)"),
        (
            "64:ff9b::169.254.169.254",
            "carries an IPv4 address (NAT64) that serves the keys of cloud machines (metadata)",
        ),
        ("64:ff9b::10.0.0.1", "carries an IPv4 address (NAT64) that is private"),
        ("2002:7f00:1::1", "carries an IPv4 address (6to4) that is this machine (loopback)"),
        ("2002:c0a8:101::1", "carries an IPv4 address (6to4) that is private"),
        ("2001:0:a00:1::f7f7:f7f7", "carries an IPv4 address (Teredo) that is private"),
        ("2001:0:808:808::f5ff:fffe", "carries an IPv4 address (Teredo) that is private"),
        ("2600::5efe:10.0.0.1", "carries an IPv4 address (ISATAP) that is private"),
        ("2600::200:5efe:127.0.0.1", "carries an IPv4 address (ISATAP) that is this machine (loopback)"),
        (
            "64:ff9b:1::8.8.8.8",
            "is translated to an IPv4 address that cannot be known (local NAT64)",
        ),
        # Not addresses at all.
        ("", "is not an address"),
        ("example.com", "is not an address"),
        ("127.1", "is not an address"),
        ("2130706433", "is not an address"),
        ("fe80::1%eth0", "is not an address"),
        ("[::1]", "is not an address"),
    ],
)
def test_addresses_that_are_not_dialled(address: str, reason: str) -> None:
    assert refusal(address) == reason


def test_teredo_with_two_public_addresses_passes() -> None:
    assert refusal("2001:0:808:808::f7f7:f7f7") == ""


@pytest.mark.parametrize("network", PRIVATE)
def test_private_ranges_can_be_allowed(network: str) -> None:
    for address in (ipaddress.ip_network(network)[1], ipaddress.ip_network(network)[-2]):
        assert refusal(str(address)) == "is private"
        assert refusal(str(address), allow_private=True) == ""
    assert refusal("::ffff:10.0.0.1", allow_private=True) == ""
    assert refusal("64:ff9b::10.0.0.1", allow_private=True) == ""


@pytest.mark.parametrize(
    "address",
    [
        *METADATA_SERVERS,
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "169.254.1.1",
        "fe80::1",
        "224.0.0.1",
        "64:ff9b::127.0.0.1",
    ],
)
def test_allowing_private_ranges_allows_nothing_else(address: str) -> None:
    assert refusal(address, allow_private=True)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1", "10.0.0.9", "2600:0::1"],
)
def test_addresses_of_this_machine_are_not_dialled(address: str) -> None:
    assert refusal(address, allow_private=True) == ""
    own = ("8.8.8.8", "2600::1", "::ffff:10.0.0.9")
    assert refusal(address, allow_private=True, own_addresses=own).endswith("is an address of this machine")


def test_the_kernel_knows_this_machines_addresses() -> None:
    assert is_own("127.0.0.1") and is_own("127.1.2.3") and is_own("::ffff:127.0.0.1")
    assert not is_own("198.51.100.77")
    assert not is_own("example.com") and not is_own("")


def test_an_address_of_an_interface_is_this_machines() -> None:
    """Whatever address this machine would send from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.77", 9))
        except OSError:
            pytest.skip("this machine has no route, and so no address but loopback")
        address = probe.getsockname()[0]
    assert is_own(address)
    assert vet(address, allow_private=True)
    assert vet(f"64:ff9b::{address}", allow_private=True)


def test_vetting_asks_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ipaddress.ip_address("8.8.8.8")
    monkeypatch.setattr("sandbox.network.addresses._is_own", lambda address: address == own)
    assert vet("8.8.8.8") == "is an address of this machine"
    assert vet("64:ff9b::8.8.8.8").endswith("that is an address of this machine")
    assert vet("8.8.4.4") == vet("64:ff9b::8.8.4.4") == ""


def test_without_the_kernels_answer_nothing_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr("sandbox.network.addresses.socket.socket", refuse)
    assert vet("8.8.8.8").startswith("cannot be told from an address of this machine (Address family")


def test_vetting_without_addresses_of_this_machine() -> None:
    assert vet("8.8.8.8") == ""
    assert vet("10.255.255.253") == "is private"
    assert vet("nonsense") == "is not an address"


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_that_python_calls_special_is_refused(address: ipaddress.IPv4Address) -> None:
    """Python's own tables, as a second opinion. Only ours has the metadata of one cloud."""
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert refusal(str(address))


@given(st.ip_addresses(v=6))
def test_an_ipv6_address_that_python_calls_special_is_refused(address: ipaddress.IPv6Address) -> None:
    embedded = address.ipv4_mapped or address.sixtofour or address.teredo
    special = not address.is_global or address.is_multicast or address.is_link_local or address.is_site_local
    if special and embedded is None and not str(address).startswith("64:ff9b::"):
        assert refusal(str(address))


@given(st.ip_addresses(v=4))
def test_every_form_with_a_refused_address_inside_is_refused(address: ipaddress.IPv4Address) -> None:
    bits = int(address)
    forms = {
        "mapped": (0xFFFF << 32) | bits,
        "NAT64": (0x0064FF9B << 96) | bits,
        "6to4": (0x2002 << 112) | (bits << 80) | 1,
        "Teredo server": (0x20010000 << 96) | (bits << 64) | 0xF7F7F7F7,
        "Teredo client": (0x20010000 << 96) | (0x08080808 << 64) | (bits ^ 0xFFFFFFFF),
        "ISATAP": (0x2600 << 112) | (0x00005EFE << 32) | bits,
    }
    for form, number in forms.items():
        assert bool(refusal(str(ipaddress.IPv6Address(number)))) is bool(refusal(str(address))), form

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sandbox.gate.upstream import NameServer, parse_hosts, parse_resolv_conf, read_upstream


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("nameserver 10.0.0.1\n", ["10.0.0.1"]),
        ("# x\n; y\nnameserver\t10.0.0.1 # z\nsearch a.example\n", ["10.0.0.1"]),
        ("nameserver 10.0.0.1\nnameserver fd00::1\n", ["10.0.0.1", "fd00::1"]),
        ("".join(f"nameserver 10.0.0.{n}\n" for n in range(9)), ["10.0.0.0", "10.0.0.1", "10.0.0.2"]),
        ("nameserver one.example\nnameserver 10.0.0.300\nnameserver\n", ["127.0.0.1"]),
        ("nameserver fe80::1%nosuchlink\nnameserver 10.0.0.1\n", ["10.0.0.1"]),
        ("", ["127.0.0.1"]),
    ],
)
def test_name_servers(text: str, servers: list[str]) -> None:
    assert [server.address[0] for server in parse_resolv_conf(text).servers] == servers


def test_a_link_local_server_has_its_link() -> None:
    (server,) = parse_resolv_conf("nameserver fe80::1%1\n").servers
    assert server == NameServer(socket.AF_INET6, ("fe80::1", 53, 0, 1))
    assert parse_resolv_conf("nameserver fe80::1%lo\n").servers == (server,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("timeout:1 attempts:3", (1.0, 3)),
        ("timeout:0 attempts:0", (1.0, 1)),
        ("timeout:99999999999 attempts:99999999999", (5.0, 5)),
        ("timeout:x attempts: rotate", (2.0, 2)),
    ],
)
def test_options_are_bounded(options: str, expected: tuple[float, int]) -> None:
    upstream = parse_resolv_conf(f"options {options}\n")
    assert (upstream.seconds, upstream.attempts) == expected
    # As libc without an option: an answer may come 5 seconds after the last question.
    assert upstream.last_seconds == (upstream.seconds if "timeout:x" not in options else 5.0)


def test_hosts_of_names_that_may_be_asked_for() -> None:
    text = (
        "127.0.0.1 localhost # x\n93.184.216.34 API.example.com www.example.com\n"
        "::1 api.example.com\nfe80::1%lo api.example.com\nnonsense\n1.2.3 api.example.com\n"
        "1.2.3.4 bad_name other.example ä.example\n0.0.0.0\n"
    )
    wanted = ("api.example.com", "localhost")
    assert parse_hosts(text, lambda name: name in wanted) == (
        ("localhost", ("127.0.0.1",)),
        ("api.example.com", ("93.184.216.34", "::1")),
    )


def test_files_are_read_to_a_limit_and_may_be_missing(tmp_path: Path) -> None:
    upstream = read_upstream(lambda _: True, str(tmp_path / "none"), str(tmp_path / "none"))
    assert [server.address[0] for server in upstream.servers] == ["127.0.0.1"]
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"10.0.0.1 n{number}.example\n" for number in range(50000)))
    found = read_upstream(lambda _: True, str(tmp_path / "none"), str(hosts)).hosts
    assert len(found) == 1024

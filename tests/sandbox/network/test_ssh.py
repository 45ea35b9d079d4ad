from __future__ import annotations

import pytest

from sandbox.network.ssh import SshHost, hosts_of, keys_of, parse_access, split_host
from tests.tables import one_case

KEY = f"SHA256:{'a' * 43}"


@one_case(
    ("text", "normal", "name", "port"),
    [
        ("git.example.com", "git.example.com:22", "git.example.com", 22),
        ("GIT.example.com.", "git.example.com:22", "git.example.com", 22),
        ("git.example.com:2222", "git.example.com:2222", "git.example.com", 2222),
        ("192.0.2.1", "192.0.2.1:22", "192.0.2.1", 22),
        ("[2001:db8::1]:2222", "[2001:db8::1]:2222", "2001:db8::1", 2222),
        ("localhost:2222", "localhost:2222", "localhost", 2222),
    ],
)
def test_a_host(text: str, normal: str, name: str, port: int) -> None:
    assert parse_access(text) == normal == parse_access(normal)
    assert split_host(normal) == SshHost(name, port)


def test_keys_and_hosts_are_one_list() -> None:
    access = (KEY, "git.example.com:22")
    assert parse_access(KEY) == KEY
    assert (keys_of(access), hosts_of(access)) == (access[:1], access[1:])


@one_case(
    "text",
    [
        "",
        "*",
        "*.example.com",
        "10.0.0.0/8",
        "git.example.com:22,23",
        "git.example.com:1-9",
        "git.example.com:*",
        "git@git.example.com",
        "ssh://git.example.com",
        "GET git.example.com",
        "SHA256:",
        KEY[:-1],
        KEY + "a",
        KEY[:-1] + "=",
        KEY[:-1] + "\u00e9",
        KEY[:-1] + "\n",
        "MD5:00",
    ],
)
def test_what_is_neither(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_access(text)

"""What --hide asks for: variables, and the hosts that their values are for."""

from __future__ import annotations

import pytest

from runner.cli.shared.hiding import hide_of, with_hidden_hosts
from sandbox.spec import Network
from tests.tables import one_case


def test_entries_are_written_in_one_way() -> None:
    assert hide_of([]) == ()
    assert hide_of(["T@A.b", "T@a.b:443", "U"]) == ("T@a.b:443", "U")
    with pytest.raises(ValueError, match=r"^--hide T@\*: it stands for every name"):
        hide_of(["T@*"])


@one_case(
    ("known", "hide", "hosts"),
    [
        (None, ("T@a.b:443",), ("a.b:443",)),
        (("c.d:1",), ("T@a.b:443", "U@a.b:443"), ("c.d:1", "a.b:443")),
        (("GET a.b:443/x",), ("T@a.b:443",), ("GET a.b:443/x",)),
        (("*.b:443",), ("T@a.b:443",), ("*.b:443",)),
        (("GET a.b:443",), ("T@a.b:444",), ("GET a.b:443", "a.b:444")),
        (("a.b:443",), ("T",), ("a.b:443",)),
    ],
)
def test_to_hide_for_a_host_is_to_reach_it(
    known: tuple[str, ...] | None, hide: tuple[str, ...], hosts: tuple[str, ...]
) -> None:
    asked = None if known is None else Network("allowlist", known)
    assert with_hidden_hosts(asked, hide) == Network("allowlist", hosts)


@pytest.mark.parametrize("host", ["*.b:443", "a.b:80,443", "a.b:440-450"])
def test_no_rule_about_requests_is_widened(host: str) -> None:
    with pytest.raises(ValueError, match=r"other requests than GET a\.b:443/x; name the host"):
        with_hidden_hosts(Network("allowlist", ("GET a.b:443/x",)), (f"T@{host}",))


def test_the_whole_network_stays_what_it_is() -> None:
    assert with_hidden_hosts(Network("host"), ("T@a.b:443",)) == Network("host")
    assert with_hidden_hosts(None, ()) is None

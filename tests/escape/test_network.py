"""The plugin's own network. The attacks on the host's are in the list (sandbox/attacks/attacks.py)."""

from __future__ import annotations

from tests.escape.cage import ProbeCage


def test_a_plugin_can_connect_to_itself(cage: ProbeCage) -> None:
    assert cage.attack("own_loopback").done == "me"


def test_the_strict_profile_has_no_sockets_at_all(cage: ProbeCage) -> None:
    words = [("family", "1", "1", "0"), ("family", "2", "1", "0"), ("family", "10", "1", "0")]
    strict = cage.attacks(*words, tables='[plugin.sandbox]\nenabled = true\nseccomp = "strict"\n')
    assert {answer.refused for answer in strict} == {"EAFNOSUPPORT"}
    assert [answer.done for answer in cage.attacks(*words)] == [True] * 3

"""What a session saw of a plugin, in words."""

from __future__ import annotations

import pytest

from runner.launch.verdict import judge
from runner.outcome import Phase
from runner.session import verdict
from runner.session.verdict import ended_early, ended_unasked, stream_closed
from sandbox.spec import Limits
from tests.runner.launch.test_verdict import by_deadline, ended


@pytest.mark.parametrize(
    ("phase", "limit"),
    [("handshake", "handshake"), ("call", "call"), ("idle", "idle"), ("invocation", "call")],
)
def test_the_remedy_names_the_limit_that_ran_out(phase: Phase, limit: str) -> None:
    """One clock counts for all of a one-shot plugin's invocation. It is the `call` limit."""
    hint = verdict.expired(phase, 1.0, limited=True).hint
    assert f"the {limit} limit" in hint and f"--limit {limit}=" in hint
    # The contract's own clock: only that of a one-shot plugin is the operator's to raise.
    raised = phase == "invocation"
    assert (f"--limit {limit}=" in verdict.expired(phase, 1.0, limited=False).hint) == raised
    # The lowest decides: no option raises what the manifest says.
    set_there = verdict.expired(phase, 1.0, limited=True, decided_by=((limit, "manifest"),)).hint
    assert "in its manifest" in set_there and "--limit" not in set_there


def test_each_caller_is_told_how_a_call_gets_more_time() -> None:
    assert verdict.expired("call", 1.0).hint == "pass more seconds to the call"
    assert verdict.expired("call", 1.0, remedy="raise it with --timeout").hint == "raise it with --timeout"


def test_who_is_gone_is_gone_in_the_same_words_for_everybody() -> None:
    first = ended_early(judge(ended(3), Limits())[0], "call", "")
    assert (first.code, first.phase, first.cause) == ("crashed", "call", "exit:3")
    assert first.message == "the plugin ended with status 3, before it answered"
    assert ended_early(first, "call", "") == first


def test_an_end_that_nobody_asked_for_is_no_good_end() -> None:
    for code, words in ((0, "with status 0"), (3, "with status 3"), (139, "by signal 11")):
        outcome = ended_unasked(judge(ended(code), Limits())[0], "")
        assert (outcome.code, outcome.phase) == ("crashed", "idle")
        assert words in outcome.message and "was not asked to end" in outcome.message
    assert ended_unasked(judge(by_deadline(137), Limits())[0], "").code == "timeout"


def test_stderr_is_pointed_to_only_if_there_is_something() -> None:
    ok = judge(ended(0), Limits())[0]
    for stderr, hint in (
        ("Traceback …\n", "the plugin's stderr may say why"),
        (" \n", "the plugin wrote nothing to its stderr"),
    ):
        assert ended_early(ok, "call", stderr).hint == ended_unasked(ok, stderr).hint == hint
    assert stream_closed("call", "stdin", "").hint == "the plugin wrote nothing to its stderr"

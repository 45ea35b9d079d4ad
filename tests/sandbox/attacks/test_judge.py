"""What counts as held: only what the layer answered, and only if its control shows that."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sandbox.attacks.attacks import ATTACKS
from sandbox.attacks.judge import Row, all_held, describe, judge, judge_foreign, program, read_answers

CALL = next(each for each in ATTACKS if each.id == "call-chroot")  # held: EPERM
NONCE = "0123"


@pytest.mark.parametrize(
    ("observed", "control", "verdict"),
    [
        ("EPERM", "EFAULT", "held"),
        ("EPERM", "done", "held"),
        ("EPERM", "EPERM", "not_counted"),  # something else refuses it
        ("EPERM", "ENOSYS", "not_counted"),  # the kernel does not have it
        ("EPERM", "failed: x", "not_counted"),
        ("EPERM", None, "not_counted"),
        ("ENOSYS", "ENOSYS", "not_counted"),
        ("EFAULT", "EFAULT", "not_held"),  # the kernel looked at it
        ("EINVAL", "EFAULT", "not_held"),  # a refusal that this layer does not make
        ("done", "done", "not_held"),
        ("done: root", "EPERM", "not_held"),
        ("failed: TypeError", "done", "not_held"),
        (None, "done", "not_held"),
    ],
)
def test_our_own_cage(observed: str | None, control: str | None, verdict: str) -> None:
    assert judge(CALL, observed, control).verdict == verdict
    assert judge(CALL, observed, control, "no such thing").verdict == "not_counted"


@pytest.mark.parametrize(
    ("observed", "control", "verdict"),
    [
        ("EPERM", "EFAULT", "held"),
        ("SIGSYS", "EFAULT", "held"),
        ("EFAULT", "EFAULT", "not_held"),  # the kernel looked at it
        ("done", "EPERM", "not_held"),
        ("done", None, "not_held"),
        ("EPERM", "EPERM", "not_counted"),
        ("EPERM", None, "not_counted"),
        ("failed: ImportError", "done", "not_counted"),
        (None, "done", "not_counted"),
    ],
)
def test_another_sandbox(observed: str | None, control: str | None, verdict: str) -> None:
    assert judge_foreign(CALL, observed, control).verdict == verdict


def test_nothing_is_held_if_nothing_counts() -> None:
    rows = {verdict: Row(CALL, verdict, "", "") for verdict in ("held", "not_held", "not_counted")}
    assert not all_held([])
    assert not all_held([rows["not_counted"]])
    assert all_held([rows["held"], rows["not_counted"]])
    assert not all_held([rows["held"], rows["not_held"]])


def line(nonce: str = NONCE, attempt: object = 0, **answer: object) -> bytes:
    return json.dumps({"nonce": nonce, "attempt": attempt, **answer}).encode() + b"\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (line(refused="EPERM"), {0: "EPERM"}),
        (b"noise without an end" + b"\n" + line(refused="EPERM"), {0: "EPERM"}),
        (line("other", refused="EPERM"), {}),  # forged: it does not know the nonce
        (line(refused="EPERM") + line(done=True), {}),  # answered twice
        (line(attempt=True, refused="EPERM"), {}),
        (line(attempt=2, refused="EPERM") + line(attempt=-1, refused="EPERM"), {}),
        (b"[" * 100_000 + b"\n" + b"9" * 100_000 + b"\n\xff\xfe\n", {}),
        (line(refused=["EPERM"]), {0: "failed: "}),
    ],
)
def test_only_answers_with_the_nonce_count(output: bytes, found: dict[int, str]) -> None:
    assert read_answers(output, NONCE, 2) == found


def test_what_comes_out_of_a_sandbox_is_short_and_printable() -> None:
    assert describe({"done": True}) == "done"
    said = describe({"done": "\x1b[2J" + "x" * 10_000})
    assert len(said) < 80 and said.isprintable()


def test_the_probe_answers_each_attempt_and_survives_those_that_are_killed() -> None:
    attempts = [["signal_process", "1"], ["no_such_act"], ["read", "/nothing"], ["find", "/"]]
    attempts += [["leave_a_process"], ["raise_limit", "CORE", "x"]]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=program(NONCE, attempts), capture_output=True, timeout=60
    )
    found = read_answers(done.stdout, NONCE, len(attempts))
    assert found.keys() == set(range(len(attempts)))
    assert (found[2], found[3]) == ("ENOENT", "done")
    assert found[1] == "failed: KeyError: 'no_such_act'"

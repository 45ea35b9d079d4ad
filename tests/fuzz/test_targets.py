"""Every target with the inputs that were faults once, and with a few new ones: `scripts/fuzz` makes more."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import fuzz
from tests.fuzz.mutate import MOST_BYTES, mutate
from tests.fuzz.targets import INPUTS, TARGETS, Target, examples, inputs, meaning


@pytest.mark.parametrize("name", TARGETS)
def test_only_refusals_are_raised(name: str) -> None:
    target, pool = TARGETS[name], examples(name)
    meant = {meaning(target, data) for data in (*pool, *inputs(name).values())}
    assert len(meant) > 1, "no example is understood, or none is refused"
    short = [data for data in pool if len(data) < 3000]

    @settings(max_examples=60, database=None)
    @given(st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        meaning(target, mutate(random, short))

    check()


def test_every_input_belongs_to_a_target() -> None:
    assert {folder.name for folder in INPUTS.iterdir()} <= set(TARGETS)
    assert all(file.stat().st_size <= MOST_BYTES for file in INPUTS.glob("*/*"))


def _raise(data: bytes) -> None:
    assert b"ab" not in data


def _hang(data: bytes) -> None:
    while b"ab" in data:
        pass


def _die(data: bytes) -> None:
    if b"ab" in data:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("act", "words"), [(_raise, "AssertionError"), (_hang, "s:"), (_die, "SIGKILL")])
def test_a_fault_is_found_made_smaller_and_stored(
    act: object,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    monkeypatch.setattr(fuzz, "MOST_SECONDS", 0.1)
    monkeypatch.setitem(TARGETS, "planted", Target(act, (KeyError,), lambda: [b"xxxxabxxxx"]))  # type: ignore[arg-type]
    assert fuzz._forked("planted", 0.3, 1)
    (stored,) = (tmp_path / "tests/fuzz/inputs/planted").iterdir()
    assert stored.read_bytes() == (b"ab" if act is not _die else b"xxxxabxxxx")
    said = capfd.readouterr().out
    assert words in said
    again = re.search(r"again: scripts/fuzz (\S+) (\S+)\n", said)
    assert again is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fuzz", *again.groups()])
    if act is _raise:
        with pytest.raises(AssertionError):
            fuzz.main()


@pytest.mark.parametrize(
    "words", [("nothing",), ("nothing", __file__), ("json", "/nowhere"), ("--seconds", "0")]
)
def test_wrong_usage(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", *words])
    with pytest.raises(SystemExit, match="2"):
        fuzz.main()
    assert "scripts/fuzz: error: " in capsys.readouterr().err

"""Every target with the inputs that were faults once, and with a few new ones. `scripts/fuzz` runs them for longer."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import MOST_BYTES, mutate
from tests.fuzz.targets import INPUTS, TARGETS, examples, inputs, meaning


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

"""A plan is stored without the name of the systemd unit. Real units: tests/limits/test_systemd.py."""

from __future__ import annotations

import os
from typing import Any

import pytest

from runner.launch.stored.entry import FORMAT, TEXT, LaunchRequest, PlanEntry, fillings
from runner.launch.stored.unit import BLANKS, facts_without_unit, in_unit, unit_of
from sandbox.facts import Facts, digest

SLICE = "/user.slice/user-1000.slice/user@1000.service/app.slice"
FIRST = f"0::{SLICE}/run-r1.scope\n".encode()
PLACE = f"/sys/fs/cgroup{SLICE}"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"0::/\n",
        b"0::" + SLICE.encode() + b"\n",
        FIRST.rstrip(b"\n"),
        FIRST.rstrip(b"\n") + b"/runner-17-4711-self\n",
        FIRST.rstrip(b"\n") + b"/below\n",
        FIRST.rstrip(b"\n") + b" (deleted)\n",
        b"1:memory:/\n" + FIRST,
        FIRST + b"1:memory:/\n",
        b"0::" + SLICE.encode() + b"/\xc3\xa4.scope\n",
    ],
)
def test_in_no_unit(text: bytes) -> None:
    assert unit_of(text) is None


def test_in_a_unit() -> None:
    unit = unit_of(FIRST)
    assert unit is not None
    assert (unit.directory, f"{unit.line}\n".encode()) == (f"{PLACE}/run-r1.scope", FIRST)


def facts(unit: str) -> Facts:
    """As the survey notes them."""
    directory = f"{PLACE}/{unit}"
    beside = f"{directory}s"  # no part of it, though its name begins like it
    return Facts(
        places={
            PLACE: (1, 0, 2, 3, 4),
            directory: (1, 0, 2, 3, 4),
            f"{directory}/cgroup.type": (5,),
            beside: (2,),
        },
        listed={},
        contents={
            "/proc/self/cgroup": digest(f"0::{SLICE}/{unit}\n".encode()),
            f"{directory}/cgroup.controllers": b"c",
        },
        access={(directory, os.W_OK, False): True, (PLACE, os.W_OK, False): True},
        attributes={(directory, "user.delegate"): b"1"},
        alone={directory: True, PLACE: True},
        variables={directory: b"no path"},
        accounts={},
        identities={},
    )


def stored() -> PlanEntry:
    unit = unit_of(FIRST)
    assert unit is not None
    hidden: Any = tuple(facts_without_unit(facts("run-r1.scope"), unit))
    return PlanEntry(FORMAT, hidden, (("word", "0"), *BLANKS), False, None, b"")


def test_what_is_stored_does_not_name_the_unit() -> None:
    facts = Facts(*stored().facts)
    named = {
        str(key) for field in facts._replace(variables={}) for key in field if "run-r1.scope" in str(key)
    }
    assert named == {f"{PLACE}/run-r1.scopes"}  # what only begins like the name is something else


def test_every_question_is_asked_about_the_unit_of_the_launch() -> None:
    second = in_unit(stored(), FIRST.replace(b"r1", b"r22"))
    assert second is not None
    before, now = facts("run-r1.scope"), facts("run-r22.scope")
    now.places[f"{PLACE}/run-r1.scopes"] = now.places.pop(f"{PLACE}/run-r22.scopes")
    assert Facts(*second.facts) == now._replace(variables=before.variables)


def test_the_gaps_are_filled_with_its_names() -> None:
    second = in_unit(stored(), FIRST.replace(b"r1", b"r22"))
    assert second is not None
    request = LaunchRequest((), ["argument"], {}, None)
    assert fillings(second.blanks, request) == (
        "argument",
        f"{PLACE}/run-r22.scope",
        f"0::{SLICE}/run-r22.scope",
    )
    assert second.blanks[1][0] == TEXT


@pytest.mark.parametrize(
    "text",
    [
        FIRST.replace(b".scope", b".service"),
        FIRST.replace(b"app.slice", b"background.slice"),
        FIRST.replace(b"app.slice", b"app.slice/app-other.slice"),
        FIRST.rstrip(b"\n") + b"/below\n",
        b"0::/\n",
        b"",
    ],
)
def test_a_launch_in_another_kind_of_place_takes_no_such_plan(text: bytes) -> None:
    assert in_unit(stored(), text) is None

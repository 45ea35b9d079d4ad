"""What the process that carries out another's plan looks at again."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.launch.rehearse import rehearse
from runner.launch.remote import shared_plan
from runner.launch.remote.shared_plan import GivenSources, surroundings, take
from runner.launch.stages import Invocation
from sandbox.limits.cgroup_survey import survey
from sandbox.paths.mounts import read_mounts
from tests.conftest import ROOT


@pytest.fixture
def folder(plugin_dir: Path, write_file: Callable[..., Path]) -> Path:
    example = ROOT / "runner/contracts/nexo/example"
    for file in example.iterdir():
        if file.is_file():
            write_file(plugin_dir / file.name, file.read_text(), 0o755)
    return plugin_dir


def test_the_cgroups_are_looked_at_again_only_from_elsewhere(folder: Path) -> None:
    planned = rehearse(Invocation(str(folder)), os.environ)
    held = GivenSources({}, surroundings()).held_for(planned, os.environ)
    assert held.sites is planned.provision.sites and held.limits is planned.limits
    for where in ((), (b"", surroundings()[1]), (surroundings()[0], b"")):
        held = GivenSources({}, where).held_for(planned, os.environ)
        assert held.limits is not planned.limits
        assert held.sites == survey(read_mounts()).sites


def test_a_plan_that_relies_on_who_is_in_a_cgroup_is_looked_at_again(folder: Path) -> None:
    planned = rehearse(Invocation(str(folder)), os.environ)
    site = survey(read_mounts()).sites[0]._replace(enable=("memory",))
    planned = planned._replace(provision=planned.provision._replace(sites=(site,)))
    held = GivenSources({}, surroundings()).held_for(planned, os.environ)
    assert site not in held.sites


def test_what_the_other_process_opens_itself_is_judged(folder: Path) -> None:
    """Its state directory: by a denylist that is made then."""
    planned = rehearse(Invocation(str(folder)), os.environ)
    held = GivenSources({}, surroundings()).held_for(planned, os.environ)
    assert held.denylist is not None
    assert held.denylist() is not held.denylist()


class LateSocket(socket.socket):
    """The byte comes just after the wait for it has ended."""

    is_late = True

    def recv(self, *given: int) -> bytes:
        if self.is_late:
            self.is_late = False
            raise TimeoutError
        return super().recv(*given)


@pytest.mark.parametrize("taken", [True, False])
def test_a_launch_is_taken_or_withdrawn_and_never_both(taken: bool) -> None:
    ours, theirs = socket.socketpair()
    with LateSocket(fileno=ours.detach()) as receipt, theirs:
        assert not taken or take(theirs.fileno())
        assert shared_plan._was_taken(receipt) is taken
        assert taken or not take(theirs.fileno())

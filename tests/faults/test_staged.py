"""Every system call fails in turn, and the process is killed at each, while a changeset is applied.

Whatever happened, each file is the old one or the new one, and the next application does the rest.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandbox.staged.apply import apply, recover
from sandbox.staged.layer import changes_of
from tests.conftest import SPARE_UID, Caller
from tests.faults.inject import Fault
from tests.faults.scenes import Ran, Scene, by_turns, each_of, select
from tests.layers_by_hand import JUDGE, Staged, file, folder, link, removed, stage

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.needs("root")]

_APPLY = """\
import os, sys
from sandbox.staged.apply import apply
from sandbox.staged.layer import Judge, changes_of
from sandbox.staged.store import StagingRefused, list_changesets
try:
    [changeset] = list_changesets(sys.argv[1])
    for each in apply(changeset, list(changes_of(changeset, Judge({}, lambda path: "")))):
        os.write(2 if each.fault else 1, f"{each}\\n".encode())
except (OSError, StagingRefused) as error:
    os.write(2, str(error).encode())
"""
_KINDS = "openat read write pwrite64 ftruncate fchmod mkdirat renameat2 unlinkat symlinkat"
_NEW = {"a": "new\n", "new/c": "new\n", "sub/y": "new\n", "to_a": "b"}
_OLD = {"a": "old a\n", "b": "old b\n", "sub/y": "old sub/y\n", "sub/deep/x": "old sub/deep/x\n", "to_a": "a"}


@pytest.fixture
def places(plugin_dir: Path) -> Iterator[Iterator[Staged]]:
    """One staged folder after the other, in the same place."""
    with ExitStack() as stack:

        def fresh() -> Iterator[Staged]:
            while True:
                stack.close()
                shutil.rmtree(plugin_dir / "place", ignore_errors=True)
                found = stack.enter_context(stage(plugin_dir / "place"))
                acts = (file("a"), removed("b"), file("new/c"), file("sub/y"), removed("sub/deep"))
                for act in (*acts, link("to_a", "b"), folder("empty")):
                    act(found)
                yield found

        yield fresh()


def _files(top: Path) -> dict[str, str]:
    return {
        str(path.relative_to(top)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(top.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize(
    "each", [False, pytest.param(True, marks=[pytest.mark.broad, pytest.mark.bound(3600)])]
)
def test_an_application(
    each: bool, runner_as_root: Caller, places: Iterator[Staged], plugin_dir: Path
) -> None:
    held: list[Staged] = []

    def is_whole(ran: Ran, fault: Fault | None) -> Iterable[str]:
        [staged] = held
        recover(staged.changeset)
        half = {
            path: text
            for path, text in _files(staged.folder).items()
            if not path.rpartition("/")[2].startswith(".runner")
        }
        for path, text in half.items():
            if text not in (_OLD.get(path), _NEW.get(path)):
                yield f"{path} is neither the old file nor the new one: {text!r}"
        for path in _OLD.keys() & _NEW.keys() - half.keys():
            yield f"{path} is gone"
        left = [
            one for one in apply(staged.changeset, list(changes_of(staged.changeset, JUDGE))) if one.fault
        ]
        if [name for name in os.listdir(staged.folder) if name.startswith(".runner")]:
            yield "a folder of drafts is left"
        if left or _files(staged.folder) != _NEW or not (staged.folder / "empty").is_dir():
            yield f"the next application did not do the rest: {left}, {_files(staged.folder)}"

    def again() -> None:
        held[:] = [next(places)]

    words = [str(plugin_dir / "place/store")]
    scene = Scene(runner_as_root, words, is_whole, program=_APPLY, before=again)
    found = scene.places()
    kinds = [place for place in found if place.call in _KINDS.split()]
    faults = (
        [*each_of(found)] if each else [*select(scene, " ".join(f"runner/{kind}" for kind in _KINDS.split()))]
    )
    killed = kinds if each else by_turns(scene, kinds, 4)
    scene.sweep([*faults, *(Fault(place, signal=signal.SIGKILL) for place in killed)], at_once=1)


@pytest.mark.launches
@pytest.mark.both_callers
def test_a_mount_that_is_refused(runner_as: Caller, plugin_dir: Path) -> None:
    """The overlay or any other: it writes to its layer or it does not run, and never to the folder itself."""
    folder = plugin_dir / "folder"
    folder.mkdir()
    owner = runner_as.uid or SPARE_UID
    os.chown(folder, owner, owner)
    words = ["run", "--write", str(folder), "--staged", "--", "/bin/sh", "-c", f"echo x > {folder}/new"]

    def is_untouched(ran: Ran, fault: Fault | None) -> Iterable[str]:
        found = json.loads(runner_as("changes", "--json").stdout)["changesets"]
        own = {str(each["id"]) for each in found if str(folder) in each["folders"]}
        told.append(ran.err)
        if os.listdir(folder):
            yield "it has written to the folder"
            (folder / "new").unlink()
        if (ran.status == 0) != bool(own):
            yield f"it ended with {ran.status}, and there waits {own}"
        for each in own:
            assert runner_as("discard", each).returncode == 0

    told: list[str] = []
    scene = Scene(runner_as, words, is_untouched)
    ran, wrong = scene.run(None)
    assert ran.status == 0 and not wrong and list(is_untouched(ran, None)) == []
    calls = ("mount", "move_mount", "mount_setattr", "open_tree")
    places = [place for place in ran.places if place.call in calls and not place.role.startswith("bwrap")]
    scene.sweep([Fault(place, errno.EPERM) for place in places], at_once=1)
    assert any("cannot be staged: this machine mounts no overlay there" in each for each in told), places

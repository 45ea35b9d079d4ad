"""The plugin's folder under another name in the cage."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.paths.executable import ProgramFault
from sandbox.plan.bare import bare_command, command_line
from sandbox.plan.plan import Bind, LaunchPlan, PlanRefused, ShownPath
from tests.conftest import Caller
from tests.sandbox import cages

Write = Callable[..., Path]
INSIDE = "/box/package"


@pytest.fixture
def package(plugin_dir: Path, write_file: Write) -> Path:
    write_file(plugin_dir / "bin" / "run", '#!/bin/sh\npwd\necho "$0"\ncat data/word\nls -A .\n', 0o755)
    write_file(plugin_dir / "data" / "word", "hello\n")
    write_file(plugin_dir / "private" / "word", "not shown\n")
    return plugin_dir


def moved(package: Path, *args: str, command: str = "bin/run", **changes: Any) -> Any:
    changes = {"root_inside": INSIDE, "root_parts": ("bin", "data"), **changes}
    return cages.request(command, *args, directory=str(package), **changes)


def binds(plan: LaunchPlan) -> dict[str, Bind]:
    return {op.dest: op for op in plan.operations if isinstance(op, Bind)}


def test_the_parts_are_bound_below_the_new_name(package: Path) -> None:
    plan = cages.compiled(moved(package))
    found = binds(plan)
    assert found[f"{INSIDE}/bin"].real == str(package / "bin") and not found[f"{INSIDE}/bin"].writable
    assert found[f"{INSIDE}/data"].path == str(package / "data")
    assert not any(str(package) in dest or "private" in dest for dest in found)
    assert (plan.argv, plan.directory) == ((f"{INSIDE}/bin/run",), INSIDE)
    shown = ShownPath(str(package / "bin"), "read", "the plugin's folder", "bound", f"{INSIDE}/bin")
    assert shown in plan.shown and plan.notes == ()
    line = command_line(bare_command(plan, "bwrap", "/filter"))
    assert f"--ro-bind {package}/bin {INSIDE}/bin" in line and f"-- {INSIDE}/bin/run" in line


def test_the_whole_folder(package: Path) -> None:
    plan = cages.compiled(moved(package, root_parts=()))
    assert binds(plan)[INSIDE].path == str(package)
    assert (plan.argv, plan.directory) == ((f"{INSIDE}/bin/run",), INSIDE)


def test_parts_under_their_own_name(package: Path) -> None:
    plan = cages.compiled(moved(package, root_inside=""))
    assert set(binds(plan)) >= {f"{package}/bin", f"{package}/data"} and str(package) not in binds(plan)
    assert (plan.argv, plan.directory) == ((f"{package}/bin/run",), str(package))


def test_the_script_of_an_interpreter(package: Path, write_file: Write) -> None:
    write_file(package / "bin" / "run.py", "print()\n")
    for name, inside in (("bin/run.py",) * 2, (f"{package}/bin/run.py", f"{INSIDE}/bin/run.py")):
        plan = cages.compiled(moved(package, "-I", name, command="/usr/bin/python3"))
        assert plan.argv == ("/usr/bin/python3", "-I", inside) and plan.notes == ()


def test_words_that_name_files(package: Path) -> None:
    """A relative word is seen from where the program starts. A name of the host leads nowhere."""
    assert cages.compiled(moved(package, "data/word", f"{INSIDE}/data/word")).notes == ()
    for word in ("private/word", f"{package}/data/word"):
        [note] = cages.compiled(moved(package, word)).notes
        assert note.rule == "outside" and word in note.message


def test_a_program_on_the_path_of_the_folder(package: Path, write_file: Write) -> None:
    write_file(package / "bin" / "tool", "#!/usr/bin/env special\n", 0o755)
    write_file(package / "bin" / "special", "#!/bin/sh\n", 0o755)
    environ = {"PATH": f"{package}/bin:/usr/bin:/bin"}
    plan = cages.compiled(moved(package, command="bin/tool"), environ=environ)
    assert dict(plan.env)["PATH"].startswith(f"{INSIDE}/bin:")


@pytest.mark.parametrize("kind", ["interpreter", "link"])
def test_what_needs_its_name_on_the_host(package: Path, write_file: Write, kind: str) -> None:
    write_file(package / "bin" / "special", "#!/bin/sh\n", 0o755)
    if kind == "link":
        (package / "bin" / "tool").symlink_to(package / "bin" / "special")
    else:
        write_file(package / "bin" / "tool", f"#!{package}/bin/special\n", 0o755)
    with pytest.raises(ProgramFault, match=r"another name in the cage|in the cage it is"):
        cages.compiled(moved(package, command="bin/tool"))
    cages.compiled(moved(package, command="bin/tool", root_inside="", root_parts=()))  # the control


@pytest.fixture
def rooted(write_file: Write) -> Iterator[Path]:
    """A package below a folder that only root can write: links in it are followed."""
    with tempfile.TemporaryDirectory(dir="/opt") as folder:
        Path(folder).chmod(0o755)
        write_file(Path(folder) / "package" / "build" / "run", "#!/bin/sh\n", 0o755)
        write_file(Path(folder) / "beside" / "word", "not shown\n")
        yield Path(folder) / "package"


@pytest.mark.needs("root")
def test_a_part_that_is_a_link_within_the_folder(rooted: Path) -> None:
    (rooted / "bin").symlink_to("build")
    plan = cages.compiled(moved(rooted, root_parts=("bin",)))
    assert binds(plan)[f"{INSIDE}/bin"].real == str(rooted / "build")
    assert plan.argv == (f"{INSIDE}/bin/run",)


@pytest.mark.needs("root")
@pytest.mark.parametrize("target", ["{}/beside", "../beside", "../"])
def test_a_part_that_leads_out_of_the_folder(rooted: Path, target: str) -> None:
    """Else a package could show itself every folder that is on no list."""
    (rooted / "data").symlink_to(target.format(rooted.parent))
    with pytest.raises(PlanRefused) as refused:
        cages.compiled(moved(rooted, command="build/run", root_parts=("build", "data")))
    assert [denial.rule for denial in refused.value.denials] == ["root_part"]


def test_a_link_that_others_can_change(package: Path) -> None:
    (package / "link").symlink_to("/opt")
    with pytest.raises(PlanRefused, match="symbolic link"):
        cages.compiled(moved(package, root_parts=("bin", "link")))


@pytest.mark.parametrize("part", ["../other", "/etc", "", ".", "bin/", "bin//x", "bin/../../x"])
def test_a_part_is_a_plain_name(package: Path, part: str) -> None:
    with pytest.raises(PlanRefused, match="relative"):
        cages.compiled(moved(package, root_parts=("bin", part)))


def test_a_part_that_does_not_exist(package: Path) -> None:
    plan = cages.compiled(moved(package, root_parts=("bin", "assets")))
    assert f"{INSIDE}/assets" not in binds(plan) and plan.notes == ()
    with pytest.raises(ProgramFault, match="does not exist"):
        cages.compiled(moved(package, command="gone/run", root_parts=("gone",)))
    with pytest.raises(PlanRefused, match="does not exist"):  # the folder itself is needed
        cages.compiled(moved(package / "gone", command="/bin/true", root_parts=()))


def test_a_denied_part(package: Path) -> None:
    with pytest.raises(PlanRefused):
        cages.compiled(moved(package), deny=[f"{package}/data"])


@pytest.mark.usefixtures("nothing_left")
def test_it_runs_there(runner_as: Caller, package: Path) -> None:
    runner_as.give(package)
    end = cages.run(runner_as, moved(package))
    assert end["output"] == f"{INSIDE}\n{INSIDE}/bin/run\nhello\nbin\ndata\n"
    script = f"ls {package}; echo x > {INSIDE}/new || echo x > {INSIDE}/data/new; echo done"
    tried = cages.run(runner_as, moved(package, "-c", script, command="/bin/sh"))["output"]
    assert tried.endswith("done\n") and tried.count("Read-only file system") == 2
    assert "No such file" in tried and sorted(os.listdir(package)) == ["bin", "data", "private"]

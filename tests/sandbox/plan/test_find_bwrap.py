"""Which bwrap is trusted: made of real files, because the rules are about real owners and modes."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.plan import find_bwrap as host
from sandbox.plan.find_bwrap import BwrapUnusable, find_bwrap, trusted_program
from tests.conftest import ROOT, SYSTEM_PATH
from tests.tables import one_case

REAL = shutil.which("bwrap", path=SYSTEM_PATH) or "/usr/bin/bwrap"


@pytest.fixture
def trusted_dir() -> Iterator[Path]:
    """A directory whose parents all belong only to root: not below /tmp."""
    path = Path(f"/var/lib/rt-host-{os.getpid()}")
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def copy(trusted_dir: Path) -> Path:
    path = trusted_dir / "bwrap"
    shutil.copyfile(REAL, path)
    path.chmod(0o755)
    return path


def refused(path: Path | str) -> BwrapUnusable:
    with pytest.raises(BwrapUnusable) as caught:
        find_bwrap({"RUNNER_BWRAP": str(path)})
    assert caught.value.reason
    assert caught.value.hint
    return caught.value


def test_the_systems_own_is_found_without_any_help() -> None:
    found = find_bwrap({})
    assert found.path == os.path.realpath(REAL)
    assert found.faults == ()


def test_a_bwrap_on_path_or_in_the_working_directory_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert shutil.which("bwrap") == str(fake)  # others would take it
    assert find_bwrap(os.environ).path == os.path.realpath(REAL)
    assert refused("bwrap").rule == "path"


@pytest.mark.needs("root")
def test_a_good_copy_is_accepted(copy: Path) -> None:
    """The control of every refusal below."""
    assert find_bwrap({"RUNNER_BWRAP": str(copy)}).path == str(copy)


@pytest.mark.needs("root")
@one_case("mode", [0o4755, 0o2755, 0o6755])
def test_setuid_and_setgid_are_refused(copy: Path, mode: int) -> None:
    copy.chmod(mode)
    assert refused(copy).rule == "setuid"


@pytest.mark.needs("root")
@one_case("mode", [0o775, 0o757, 0o777])
def test_a_program_others_can_write_is_refused(copy: Path, mode: int) -> None:
    copy.chmod(mode)
    assert refused(copy).rule == "writable"


@pytest.mark.needs("root")
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_parent_others_can_write_is_refused(trusted_dir: Path, copy: Path, mode: int) -> None:
    trusted_dir.chmod(mode)
    unusable = refused(copy)
    assert (unusable.rule, str(trusted_dir) in unusable.reason) == ("writable", True)


@pytest.mark.needs("root")
def test_another_owner_of_program_or_parent_is_refused(trusted_dir: Path, copy: Path) -> None:
    os.chown(copy, 54321, 0)
    assert refused(copy).rule == "owner"
    os.chown(copy, 0, 0)
    os.chown(trusted_dir, 54321, 0)
    assert refused(copy).rule == "owner"


@pytest.mark.needs("root")
def test_file_capabilities_are_refused(copy: Path) -> None:
    # VFS_CAP_REVISION_2, effective, cap_sys_admin permitted
    os.setxattr(copy, "security.capability", struct.pack("<5I", 0x02000001, 1 << 21, 0, 0, 0))
    assert refused(copy).rule == "capabilities"


@pytest.mark.needs("root")
def test_a_link_is_followed_and_every_directory_on_the_way_is_checked(
    trusted_dir: Path, copy: Path, plugin_dir: Path
) -> None:
    link = trusted_dir / "link"
    link.symlink_to("./../" + trusted_dir.name + "/bwrap")
    assert trusted_program(str(link)) == str(copy)
    shutil.copyfile(REAL, plugin_dir / "bwrap")
    (plugin_dir / "bwrap").chmod(0o755)
    out = trusted_dir / "out"
    out.symlink_to(plugin_dir / "bwrap")
    assert refused(out).rule == "writable"  # /tmp, on the way to where it points
    os.lchown(link, 54321, 0)
    assert refused(link).rule == "owner"


@pytest.mark.needs("root")
def test_circular_links_are_refused(trusted_dir: Path) -> None:
    (trusted_dir / "a").symlink_to("b")
    (trusted_dir / "b").symlink_to("a")
    assert refused(trusted_dir / "a").rule == "path"


@pytest.mark.needs("root")
def test_a_file_that_is_not_executable_is_refused(trusted_dir: Path, copy: Path) -> None:
    copy.chmod(0o644)
    assert refused(copy).rule == "kind"
    assert refused(trusted_dir).rule == "kind"
    os.mkfifo(trusted_dir / "fifo", 0o755)
    assert refused(trusted_dir / "fifo").rule == "kind"


def test_a_named_one_that_is_missing_is_not_replaced_by_the_systems() -> None:
    unusable = refused("/nonexistent/bwrap")
    assert unusable.rule == "missing"
    assert "RUNNER_BWRAP" in unusable.reason


@pytest.mark.needs("root")
def test_an_unusable_candidate_is_skipped_and_reported(
    copy: Path, trusted_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.chmod(0o4755)
    directories = (str(trusted_dir), os.path.dirname(os.path.realpath(REAL)))
    monkeypatch.setattr(host, "BWRAP_DIRECTORIES", directories)
    found = find_bwrap({})
    assert found.path == os.path.realpath(REAL)
    assert "setuid" in found.faults[0]
    monkeypatch.setattr(host, "BWRAP_DIRECTORIES", directories[:1])
    with pytest.raises(BwrapUnusable, match="setuid"):
        find_bwrap({})


def test_none_anywhere_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BWRAP_DIRECTORIES", ("/nonexistent",))
    with pytest.raises(BwrapUnusable) as caught:
        find_bwrap({})
    assert caught.value.rule == "missing"
    assert "apt install bubblewrap" in caught.value.hint


def test_finding_it_starts_no_process_and_loads_nothing_slow() -> None:
    """It is on the path of every launch."""
    code = (
        "import sys\n"
        "started = []\n"
        "sys.addaudithook(lambda event, _: started.append(event) if event.startswith(('os.fork', 'os.exec',"
        " 'os.posix_spawn', 'subprocess')) else None)\n"
        "from sandbox.plan.find_bwrap import find_bwrap\n"
        "find_bwrap({})\n"
        "slow = sys.modules.keys() & {'subprocess', 'ctypes', 'psutil', 'json', 'sandbox.doctor.probes'}\n"
        "print(started, sorted(slow))\n"
    )
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[] []\n", "")

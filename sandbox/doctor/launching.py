"""The launcher, our own program that starts every plugin, tried in a cage."""

from __future__ import annotations

import os

from sandbox.doctor.finding import Finding
from sandbox.doctor.rehearsal import foundation, told
from sandbox.doctor.trial import run_bwrap
from sandbox.files import write_all
from sandbox.plan.bwrap import LAUNCHER
from sandbox.spawn import launcher
from sandbox.spawn.machine_code import executable

_REMEDY = (
    "let bubblewrap execute a memfd: an allowlist of programs (fapolicyd, IMA, a profile of "
    "SELinux or AppArmor) refuses them; the kernel log (journalctl -k) names the denial"
)


def launching(bwrap: str, uid: int | None) -> Finding:
    """Whether the launcher can be executed and connects the streams."""
    options = [*foundation(), "--proc", "/proc", "--chdir", "/"]
    null = os.open(os.devnull, os.O_RDWR)
    streams = os.dup(null), os.dup(null), os.dup(null)
    report_fd = os.memfd_create("report_fd")
    try:
        file = executable("runner-launcher")
        path, detail, own = launcher.PATH.format(file), "executed from memory", file
    except PermissionError:
        file = os.memfd_create("launcher")
        options += ["--perms", "0555", "--file", str(file), LAUNCHER]
        path, detail, own = (
            LAUNCHER,
            "executed from a file in the cage, because vm.memfd_noexec forbids executing memory",
            -1,
        )
    try:
        write_all(file, launcher.image(streams, own, report_fd))
        os.lseek(file, 0, os.SEEK_SET)
        command = (path, "/bin/sh", "-c", ":")
        run = run_bwrap(bwrap, options, command, uid=uid, descriptors=(*streams, report_fd, file))
        report = launcher.read_report(os.pread(report_fd, 64, 0))
    finally:
        for fd in (null, *streams, report_fd, file):
            os.close(fd)
    if run.worked and report.executed:
        return Finding(
            "launcher",
            "ok",
            "the launcher, which connects a plugin's standard streams, runs in a cage",
            detail,
        )
    why = f"it could not execute a shell: {os.strerror(report.errno)}" if report.errno else told(run)
    return Finding(
        "launcher",
        "missing",
        f"the launcher, which connects a plugin's standard streams, does not run in a cage: {why}",
        detail,
        _REMEDY,
        "launcher",
    )

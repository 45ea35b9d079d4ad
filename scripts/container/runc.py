"""Containers run by runc, configured like Docker's unless a Config says otherwise."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

# The capabilities that Docker gives a container's root.
DOCKER_CAPABILITIES = tuple(
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP"),
        *("SETPCAP", "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
    )
)
# For the steps of a build: enough for dpkg.
_BUILD_CAPABILITIES = (*DOCKER_CAPABILITIES, "CAP_SYS_ADMIN")

_MASKED = (
    *("/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware"),
    "/sys/devices/virtual/powercap",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_NAMESPACE = (100_000, 65_536)  # first id outside, how many


class Mount(NamedTuple):
    source: str  # a path, or "tmpfs" for a new tmpfs
    target: str
    options: tuple[str, ...] = ()


class Config(NamedTuple):
    root: Path
    argv: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})
    user: tuple[int, int] = (0, 0)
    directory: str = "/"
    capabilities: tuple[str, ...] = DOCKER_CAPABILITIES
    seccomp: dict[str, Any] | None = None
    masked: bool = True  # parts of /proc and /sys
    read_only: bool = False
    no_new_privileges: bool = False
    user_namespace: bool = False
    network: bool = False  # the host's
    memory: int | None = None
    mounts: tuple[Mount, ...] = ()
    trusted: bool = False  # a step of a build


class Done(NamedTuple):
    code: int
    output: str
    error: str
    seconds: float


class Runc:
    """All containers of one run. Their files are in `work`, their cgroups below `cgroup`."""

    def __init__(self, work: Path, cgroup: str) -> None:
        self._work = work
        self._cgroup = cgroup
        self._numbers = itertools.count(1)
        self._unified = os.path.exists("/sys/fs/cgroup/cgroup.controllers")

    def run(
        self, config: Config, *, stdin: str = "", timeout: float = 120, end_after: str | None = None
    ) -> Done:
        """`end_after`: SIGTERM is sent to its first process once it has printed a line that contains this."""
        name = f"c{next(self._numbers)}"
        bundle = self._work / name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._document(config, name)))
        base = ["runc", "--root", str(self._work / "runc")]
        began = time.monotonic()
        output, error = (bundle / "stdout").open("w+"), (bundle / "stderr").open("w+")
        process = subprocess.Popen(
            [*base, "run", "--bundle", str(bundle), name],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=error,
            text=True,
        )
        assert process.stdin is not None
        try:
            if end_after is not None:
                self._await(bundle / "stdout", end_after, timeout)
                subprocess.run([*base, "kill", name, "TERM"], check=True)
            try:
                process.communicate(stdin, timeout=timeout)
                code = process.returncode
            except subprocess.TimeoutExpired:
                code = -1
            return Done(code, _content(output), _content(error), time.monotonic() - began)
        finally:
            subprocess.run([*base, "delete", "--force", name], capture_output=True, check=False)
            process.kill()
            process.wait()
            shutil.rmtree(bundle)

    @staticmethod
    def _await(path: Path, word: str, timeout: float) -> None:
        until = time.monotonic() + timeout
        while word not in path.read_text():
            if time.monotonic() > until:
                raise TimeoutError(f"the container did not print {word!r} within {timeout:g} s")
            time.sleep(0.05)

    def _document(self, config: Config, name: str) -> dict[str, Any]:
        uid, gid = config.user
        given = list(_BUILD_CAPABILITIES if config.trusted else config.capabilities)
        held = given if uid == 0 else []
        document: dict[str, Any] = {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": uid, "gid": gid},
                "args": list(config.argv),
                "env": [f"{key}={value}" for key, value in {"PATH": _PATH, **config.environment}.items()],
                "cwd": config.directory,
                "capabilities": {
                    "bounding": given,
                    "effective": held,
                    "permitted": held,
                    "inheritable": [],
                    "ambient": [],
                },
                "noNewPrivileges": config.no_new_privileges,
            },
            "root": {"path": str(config.root), "readonly": config.read_only},
            "hostname": name,
            "mounts": [*self._mounts(), *(_mount(each) for each in config.mounts)],
            "linux": self._linux(config, name),
        }
        return document

    def _linux(self, config: Config, name: str) -> dict[str, Any]:
        kinds = ["pid", "ipc", "uts", "mount"]
        kinds += [] if config.network else ["network"]
        kinds += ["cgroup"] if self._unified else []
        kinds += ["user"] if config.user_namespace else []
        linux: dict[str, Any] = {
            "namespaces": [{"type": kind} for kind in kinds],
            "cgroupsPath": f"/{self._cgroup}/{name}",
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        }
        if config.memory is not None:
            # No swap, as in Docker with --memory-swap equal to --memory.
            linux["resources"]["memory"] = {"limit": config.memory, "swap": config.memory}
        if config.masked and not config.trusted:
            linux["maskedPaths"], linux["readonlyPaths"] = list(_MASKED), list(_READ_ONLY)
        if config.seccomp is not None:
            linux["seccomp"] = config.seccomp
        if config.user_namespace:
            first, size = USER_NAMESPACE
            ids = [{"containerID": 0, "hostID": first, "size": size}]
            linux["uidMappings"] = linux["gidMappings"] = ids
        return linux

    def _mounts(self) -> list[dict[str, Any]]:
        def mount(target: str, kind: str, *options: str) -> dict[str, Any]:
            return {"destination": target, "type": kind, "source": kind, "options": list(options)}

        shut = ("nosuid", "noexec", "nodev")
        return [
            mount("/proc", "proc", *shut),
            mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            mount(
                "/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"
            ),
            mount("/sys", "sysfs", *shut, "ro"),
            mount("/sys/fs/cgroup", "cgroup", *shut, "ro"),
            mount("/dev/mqueue", "mqueue", *shut),
            mount("/dev/shm", "tmpfs", *shut, "mode=1777", "size=67108864"),
        ]


def _mount(mount: Mount) -> dict[str, Any]:
    if mount.source == "tmpfs":
        options = ["nosuid", "nodev", "noexec", "mode=1777", *mount.options]
        return {"destination": mount.target, "type": "tmpfs", "source": "tmpfs", "options": options}
    options = ["rbind", "rprivate", *mount.options]
    return {"destination": mount.target, "type": "bind", "source": mount.source, "options": options}


def _content(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()

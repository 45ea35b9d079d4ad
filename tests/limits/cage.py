"""Short plugins that run with limits through the real command line, and the reports of their runs.

Whether a cgroup or an rlimit enforces a limit depends on the machine and the caller. `enforced_by` asks the
runner, and the tests show that its answer is true. Nothing here assumes root or cgroup v1.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from runner.outcome import schema
from sandbox.limits.site import INNER
from tests.conftest import Caller
from tests.manifests import SANDBOX, nexo

PYTHON = "#!/usr/bin/python3 -I\n"
SH = "#!/bin/sh\n"

# Limits that need cgroups. Without cgroups an rlimit enforces them less strictly, or nothing does.
BY_CGROUP = ("memory", "pids", "cpu", "cpu_time", "io")
_INIT_TO_PROGRAM = ("init", "bwrap", "bwrap_init", "program")

MANIFEST = (
    nexo("{id}", "./plugin")
    + SANDBOX
    + """\
fs_read_paths = {read}
fs_write_paths = {write}

[plugin.limits]
{limits}
"""
)


def policy(
    mode: str = "prefer",
    *,
    default: Mapping[str, object] | None = None,
    ceiling: Mapping[str, object] | None = None,
    read: tuple[str, ...] = (),
    write: tuple[str, ...] = ("${state_dir}",),
) -> str:
    """A policy with `mode` for every limit that needs cgroups."""
    lines = [f"version = 1\n[read]\nceiling = {_toml(read)}\n[write]\nceiling = {_toml(write)}"]
    defaults, ceilings = default or {}, ceiling or {}
    for name in dict.fromkeys((*BY_CGROUP, *defaults, *ceilings)):
        lines.append(f"[limits.{name}]")
        if name in BY_CGROUP:
            lines.append(f'mode = "{mode}"')
        lines += [f"default = {_toml(defaults[name])}"] if name in defaults else []
        lines += [f"ceiling = {_toml(ceilings[name])}"] if name in ceilings else []
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


PREFER = policy()


@dataclass(frozen=True)
class Result:
    """How an invocation ended, and what its report says."""

    status: int
    out: str
    err: str
    report: Mapping[str, Any] = field(repr=False)

    @property
    def outcome(self) -> tuple[str, str, str]:
        """code, phase, cause"""
        outcome = self.report["outcome"]
        return outcome["code"], outcome["phase"], outcome["cause"]

    @property
    def message(self) -> str:
        return str(self.report["outcome"]["message"])

    @property
    def hint(self) -> str:
        return str(self.report["outcome"]["hint"])

    @property
    def hits(self) -> list[str]:
        return list(self.report["limits_hit"])

    @property
    def exit(self) -> Mapping[str, Any]:
        return dict(self.report["exit"])

    @property
    def usage(self) -> Mapping[str, Any]:
        return dict(self.report["usage"])

    @property
    def cpu(self) -> float:
        """Seconds of processor time."""
        return float(self.usage["cpu_user"] + self.usage["cpu_system"])

    def limit(self, name: str) -> Mapping[str, Any]:
        (found,) = (limit for limit in self.report["limits"] if limit["name"] == name)
        return dict(found)

    @property
    def printed(self) -> Any:
        """The last line the plugin printed, as JSON."""
        assert self.out, f"the plugin printed nothing: {self}"
        return json.loads(self.out.splitlines()[-1])


def _check_report(result: Result) -> None:
    """Check what is true of every report."""
    _schema().validate(result.report)
    assert result.exit["status"] == result.status
    assert bool(result.exit["left"]) == result.exit["kill_incomplete"]
    limits = result.report["limits"]
    assert {b["name"] for b in limits if b["degraded"]} <= set(result.report["degraded"])
    assert all(b["enforced_by"] or (b["degraded"] and b["effective"] is None) for b in limits)
    # RLIMIT_CPU counts whole seconds: fractions are rounded up.
    most = {b["name"]: math.ceil(b["requested"]) for b in limits if b["enforced_by"] == "RLIMIT_CPU"}
    assert all(
        b["effective"] is None or b["effective"] <= most.get(b["name"], b["requested"]) for b in limits
    )
    assert set(result.hits) <= {b["name"] for b in limits}


@functools.cache
def _schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema())


class Running:
    """A running plugin. `end` closes its stdin, waits for it and returns the Result."""

    def __init__(self, process: subprocess.Popen[bytes], report: Path) -> None:
        self.process = process
        self.result: Result | None = None
        self._report = report

    @property
    def family(self) -> dict[str, int]:
        """The host pids of the cell's init, of both bwrap processes and of the plugin's first process."""
        pid, found = self.process.pid, {}
        for name in _INIT_TO_PROGRAM:
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            found[name] = pid
        return found

    @property
    def pid(self) -> int:
        """The host pid of the plugin's first process."""
        return self.family["program"]

    def group(self, controller: str) -> Path:
        """The plugin's cgroup, as a path on the host."""
        return group_of(self.pid, controller)

    def line(self) -> str:
        """The next line that the plugin prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode("utf-8", "surrogateescape").rstrip("\n")

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def end(self, timeout: float = 120.0) -> Result:
        if self.result is None:
            streams = self.process.communicate(timeout=timeout)
            out, err = ((data or b"").decode("utf-8", "surrogateescape") for data in streams)
            report = json.loads(self._report.read_bytes()) if self._report.exists() else {}
            self.result = Result(self.process.returncode, out, err, report)
            if report:
                _check_report(self.result)
        return self.result


class Box:
    """Runs plugins with limits as one caller, each in a folder of its own."""

    def __init__(self, caller: Caller, folder: Path) -> None:
        self.caller = caller
        self.folder = folder
        self.runners: list[int] = []  # pids of all runners started here
        self._count = 0

    def plugin(
        self,
        code: str,
        *,
        name: str = "plugin",
        limits: Mapping[str, object] | None = None,
        read: tuple[str, ...] = (),
        write: tuple[str, ...] = (),
    ) -> Path:
        """Write a plugin that runs `code` (Python, unless it starts with #!) and return its folder."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)
        self._write(folder / "plugin", code if code.startswith("#!") else PYTHON + code, 0o755)
        asked = "\n".join(f"{limit} = {_toml(value)}" for limit, value in (limits or {}).items())
        text = MANIFEST.format(id=name, read=_toml(read), write=_toml(write), limits=asked)
        self._write(folder / "nexo-plugin.toml", text, 0o644)
        return folder

    def run(
        self,
        code: str,
        *options: str,
        name: str = "plugin",
        limits: Mapping[str, object] | None = None,
        policy: str | None = PREFER,
        read: tuple[str, ...] = (),
        write: tuple[str, ...] = (),
        stdin: str | None = None,
        timeout: float = 120.0,
        **popen: Any,
    ) -> Result:
        """Run `runner exec` to its end. `limits` are the manifest's. `policy` is TOML, or None for the
        runner's default."""
        folder = self.plugin(code, name=name, limits=limits, read=read, write=write)
        streams = {} if stdin is not None else {"stdin": subprocess.DEVNULL}
        with self._started(folder, options, policy, {**streams, **popen}) as running:
            if stdin is not None:
                assert running.process.stdin is not None
                running.process.stdin.write(stdin.encode())
            return running.end(timeout)

    @contextmanager
    def running(
        self,
        code: str,
        *options: str,
        name: str = "plugin",
        limits: Mapping[str, object] | None = None,
        policy: str | None = PREFER,
        read: tuple[str, ...] = (),
        write: tuple[str, ...] = (),
        **popen: Any,
    ) -> Iterator[Running]:
        """A plugin that has printed "ready". Leaving the context closes its stdin and waits for it."""
        folder = self.plugin(code, name=name, limits=limits, read=read, write=write)
        with self._started(folder, options, policy, popen) as running:
            line = running.line()
            assert line == "ready", f"{line!r} {running.end()}"
            yield running
            running.end()

    @contextmanager
    def _started(
        self, folder: Path, options: tuple[str, ...], policy: str | None, popen: Mapping[str, Any]
    ) -> Iterator[Running]:
        self._count += 1
        report = self.caller.home / f"report-{self._count}.json"
        process = self.caller.start(
            "exec", *self.policy_options(policy), *options, "--report", report, folder, **popen
        )
        self.runners.append(process.pid)
        with process:
            try:
                yield Running(process, report)
            except BaseException:
                process.kill()
                raise

    def explain(self, code: str, *options: str, policy: str | None = PREFER, **plugin: Any) -> dict[str, Any]:
        """The document that `runner explain` prints."""
        folder = self.plugin(code, **plugin)
        done = self.caller("explain", "--format", "json", *self.policy_options(policy), *options, folder)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def policy_options(self, policy: str | None) -> tuple[str, ...]:
        if policy is None:
            return ()
        path = self.folder / f"policy-{abs(hash(policy))}.toml"
        if not path.exists():
            self._write(path, policy, 0o644)
        return "--policy", str(path)

    def _write(self, path: Path, text: str, mode: int) -> None:
        if not path.exists() or path.read_text() != text:  # unchanged: the runner's cache stays valid
            path.write_text(text)
            path.chmod(mode)
            self.caller.give(path)

    def groups_left(self) -> list[str]:
        """Cgroups of runners that were started here, without the runner's own leaf (v2): that one stays until
        the unit ends or the next runner starts."""
        ours = tuple(f"runner-{pid}-" for pid in self.runners)
        return [
            f"{folder}/{name}"
            for mount, _, _ in _cgroup_mounts()
            for folder, names, _ in os.walk(mount)  # skips groups that others remove meanwhile
            for name in names
            if name.startswith(ours) and not name.endswith("-self")
        ]


# --- how this machine enforces limits -----------------------------------------------------------------------


def enforced_by(box: Box, limit: str) -> str:
    """The means for `limit`, as this caller: "cgroup v1", "cgroup v2", "RLIMIT_…", or "" for none.

    `runner explain` says so, under a policy that accepts any means.
    """
    if box.caller.name not in _known:
        _known[box.caller.name] = dict(_explain_means(box))
    return _known[box.caller.name][limit]


def by_cgroup(box: Box, limit: str) -> bool:
    return enforced_by(box, limit).startswith("cgroup")


_known: dict[str, dict[str, str]] = {}


def _explain_means(box: Box) -> Iterator[tuple[str, str]]:
    limits = {"memory": "64M", "pids": 32, "cpu": 1, "cpu_time": "10s", "io": "100M"}
    for limit in box.explain("", name="asked", limits=limits)["limits"]:
        if limit["name"] in BY_CGROUP:
            assert limit["degraded"] == (not limit["enforced_by"].startswith("cgroup")), limit
            yield limit["name"], limit["enforced_by"]


def whole_group(group: Path) -> Path:
    """What the runner made for a plugin. With controllers of v2 that is a group with another one inside."""
    return group.parent if group.name == INNER else group


def group_of(pid: int, controller: str) -> Path:
    """The directory of a process's cgroup for `controller`, named as in v2."""
    legacy = "blkio" if controller == "io" else controller
    unified = ""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if legacy in names.split(","):
            return _visible(path, legacy)
        if not names:
            unified = path
    return _visible(unified, "")


def _visible(path: str, controller: str) -> Path:
    for mount, root, words in _cgroup_mounts():
        if controller in words or (not controller and not words):
            return Path(mount, os.path.relpath(path, root))
    raise LookupError(f"no cgroup file system with {controller or 'v2'} is mounted")


@functools.cache
def _cgroup_mounts() -> tuple[tuple[str, str, frozenset[str]], ...]:
    """Mount point, root and controllers of each cgroup file system. v2 has no controllers here."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split()[3:5]
        if kind in ("cgroup", "cgroup2"):
            words = frozenset(options.split(",")) if kind == "cgroup" else frozenset()
            found.append((point, root, words))
    return tuple(found)


def rlimit_of(pid: int, name: str) -> int | None:
    """The hard limit by its name in /proc/PID/limits; None: unlimited. (prlimit may not read a plugin's.)"""
    (line,) = (line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith(name))
    hard = line[len(name) :].split()[1]
    return None if hard == "unlimited" else int(hard)

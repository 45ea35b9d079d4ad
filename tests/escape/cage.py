"""The probe plugin in its cage, and controls: the same probe with a layer of the cage removed.

Every attack runs twice. Through `runner exec` it must fail. In the control, without the layer that stops it,
it must succeed. A test whose control fails proves nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, SPARE_UID, SYSTEM_PATH, Caller

PROBE = ROOT / "tests/plugins/probe/probe.py"
ACTS = ROOT / "sandbox/attacks/probe.py"
# The uid of root's controls, in place of the leased uid root's runner would use. No account has it.
STAND_IN_UID = SPARE_UID + 2

MANIFEST = """\
[plugin]
id = "{id}"
version = "1.0.0"
name = "Probe"
description = "Tries one forbidden thing."
min_nexo_version = ">=0.1"

[plugin.entrypoint]
command = {command}
args = {args}
{tables}
"""


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack, and the exit status and output of the program that made it."""

    code: int
    out: str
    err: str
    answer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> Any:
        """What the attack returned. Fails if the attack did not succeed."""
        assert "done" in self.answer, f"the attack did not succeed: {self}"
        return self.answer["done"]

    @property
    def refused(self) -> str:
        """The name of the errno. Fails if the attack was not refused."""
        assert "refused" in self.answer, f"the attack was not refused: {self}"
        return str(self.answer["refused"])


def parse_result(done: subprocess.CompletedProcess[str]) -> AttackResult:
    lines = done.stdout.splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    return AttackResult(done.returncode, done.stdout, done.stderr, answer if isinstance(answer, dict) else {})


def split_results(answer: AttackResult) -> list[AttackResult]:
    return [AttackResult(answer.code, answer.out, answer.err, each) for each in answer.done]


def toml(value: str | Sequence[str]) -> str:
    return json.dumps(value) if isinstance(value, str) else f"[{', '.join(json.dumps(v) for v in value)}]"


def sandbox_table(read: Sequence[str] = (), write: Sequence[str] = (), more: str = "") -> str:
    return (
        f"[plugin.sandbox]\nenabled = true\nfs_read_paths = {toml(read)}\n"
        f"fs_write_paths = {toml(write)}\n{more}\n"
    )


class Running:
    """A plugin in its cage."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.out = b""  # its stdout after "ready", set when it has ended

    @property
    def pid(self) -> int:
        """The plugin's pid on the host: the innermost first child."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid


@dataclass(frozen=True)
class ProbeCage:
    caller: Caller
    folder: Path  # the plugin's own; any user may write to its subfolder `open`

    def manifest(
        self,
        tables: str = "",
        *,
        command: str = "./probe.py",
        args: Sequence[str] = (),
        plugin_id: str = "probe",
    ) -> None:
        text = MANIFEST.format(id=plugin_id, command=toml(command), args=toml(args), tables=tables)
        path = self.folder / "nexo-plugin.toml"
        if not path.exists() or path.read_text() != text:  # unchanged: the runner's cache stays valid
            path.write_text(text)
            path.chmod(0o644)

    def attack(
        self,
        *words: str,
        tables: str = "",
        options: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        **run: Any,
    ) -> AttackResult:
        """Run one attack in the cage, through the real command line."""
        self.manifest(tables)
        return parse_result(self.caller("exec", *options, self.folder, "--", *words, env=env, **run))

    def attacks(self, *attempts: Sequence[str], **more: Any) -> list[AttackResult]:
        """Run several attacks in one launch."""
        return split_results(self.attack("many", json.dumps(attempts), **more))

    @contextmanager
    def running(
        self, *words: str, tables: str = "", options: Iterable[str] = (), env: Mapping[str, str] | None = None
    ) -> Iterator[Running]:
        """A plugin in the cage that has printed "ready". Leaving the context closes its stdin."""
        self.manifest(tables)
        process = self.caller.start("exec", *options, self.folder, "--", *words, env=env)
        with process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line == b"ready\n", line + (process.stderr.read() if process.stderr else b"")
                running = Running(process)
                yield running
                running.out, _ = process.communicate(timeout=60)
            except BaseException:
                process.kill()
                raise

    def outside(self, *words: str, **run: Any) -> AttackResult:
        """Run the same program as the same caller, without a cage."""
        return self._run([*self.caller.prefix, str(self.folder / "probe.py"), *words], **run)

    def under_plain_bwrap(
        self, *words: str, bwrap: Sequence[str] = ("--dev-bind", "/", "/"), **run: Any
    ) -> AttackResult:
        """Run the same program under bubblewrap with these few options."""
        argv = [*self.caller.prefix, "bwrap", *bwrap, "--", str(self.folder / "probe.py"), *words]
        return self._run(argv, **run)

    def without(
        self,
        *words: str,
        remove: Sequence[str] = (),
        replace: Mapping[str, str] | None = None,
        tables: str = "",
        options: Iterable[str] = (),
        drop: bool = True,
        **run: Any,
    ) -> AttackResult:
        """Run the runner's own bwrap command line with some words removed or replaced.

        `drop`: as root, switch to a plugin's uid first, as root's runner does.
        """
        self.manifest(tables)
        explained = self.caller("explain", "--format", "argv", *options, self.folder)
        assert explained.returncode == 0, explained.stderr
        line = explained.stdout.strip()
        for word, other in {**dict.fromkeys(remove, ""), **(replace or {})}.items():
            assert f" {word} " in line, f"{word!r} is not in the plan: {line}"
            line = line.replace(f" {word} ", f" {other} ")
        probe = str(self.folder / "probe.py")
        assert f" -- {probe}" in line
        line = line.replace(f" -- {probe}", f' -- {probe} "$@"')
        become = list(self.caller.prefix)
        if drop and self.caller.uid == 0:
            uid = STAND_IN_UID
            become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--"]
        return self._run([*become, "bash", "-c", line, "bash", *words], **run)

    def _run(
        self,
        argv: Sequence[str],
        *,
        input: str | None = None,  # noqa: A002 -- named as in subprocess.run
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "/",
        timeout: float = 60.0,
        **popen: Any,
    ) -> AttackResult:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done = subprocess.run(
            argv,
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout,
            **{**streams, **popen},
        )
        return parse_result(done)


def make_cage(caller: Caller, folder: Path) -> ProbeCage:
    """Put the probe in a plugin folder that belongs to the caller."""
    shutil.copyfile(PROBE, folder / "probe.py")
    (folder / "probe.py").chmod(0o755)
    shutil.copyfile(ACTS, folder / "acts.py")
    (folder / "acts.py").chmod(0o644)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    caller.give(folder)
    cage = ProbeCage(caller, folder)
    cage.manifest()
    return cage

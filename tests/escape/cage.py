"""The probe inside the cage, and the same probe with something taken away from it.

Every attack is made twice: through `runner exec`, where it must fail, and as a control without the layer that
stops it, where it must succeed. A test whose control fails says nothing.
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
# Who the controls are, when root's runner would have dropped to a leased uid: one that is nobody's either.
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
class Told:
    """What came of an attack, and how the program that made it ended."""

    code: int
    out: str
    err: str
    answer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> Any:
        """What the attack gained. Fails if it gained nothing."""
        assert "done" in self.answer, f"the attack did not succeed: {self}"
        return self.answer["done"]

    @property
    def refused(self) -> str:
        """The errno's name. Fails if nothing was refused."""
        assert "refused" in self.answer, f"the attack was not refused: {self}"
        return str(self.answer["refused"])


def told(done: subprocess.CompletedProcess[str]) -> Told:
    lines = done.stdout.splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    return Told(done.returncode, done.stdout, done.stderr, answer if isinstance(answer, dict) else {})


def several(answer: Told) -> list[Told]:
    return [Told(answer.code, answer.out, answer.err, each) for each in answer.done]


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
        self.out = b""  # what it said after "ready", once it has ended

    @property
    def pid(self) -> int:
        """Of the plugin itself, as the host counts: the innermost first child."""
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid


@dataclass(frozen=True)
class RemoteCell:
    caller: Caller
    folder: Path  # the plugin's own; everybody may write to its subfolder `open`

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
        if not path.exists() or path.read_text() != text:  # else the runner need not read it anew
            path.write_text(text)
            path.chmod(0o644)

    def attack(
        self,
        *words: str,
        tables: str = "",
        options: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        **run: Any,
    ) -> Told:
        """In the cage, through the real command line."""
        self.manifest(tables)
        return told(self.caller("exec", *options, self.folder, "--", *words, env=env, **run))

    def attacks(self, *attempts: Sequence[str], **more: Any) -> list[Told]:
        """Several in one launch."""
        return several(self.attack("many", json.dumps(attempts), **more))

    @contextmanager
    def running(
        self, *words: str, tables: str = "", options: Iterable[str] = (), env: Mapping[str, str] | None = None
    ) -> Iterator[Running]:
        """In the cage, after it has said "ready". Its input ends with the context, and it with that."""
        self.manifest(tables)
        process = self.caller.start("exec", *options, self.folder, "--", *words, env=env)
        with process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line == b"ready\n", line + (process.stderr.read() if process.stderr else b"")
                running = Running(process)
                yield running
                running.out, _ = process.communicate(timeout=20)
            except BaseException:
                process.kill()
                raise

    def outside(self, *words: str, **run: Any) -> Told:
        """The same program, as the same caller, without any cage."""
        return self._run([*self.caller.prefix, str(self.folder / "probe.py"), *words], **run)

    def loosely(self, *words: str, bwrap: Sequence[str] = ("--dev-bind", "/", "/"), **run: Any) -> Told:
        """Under a bubblewrap that is asked for nothing much."""
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
    ) -> Told:
        """The runner's own bwrap command line, with some of its words removed or replaced.

        `drop`: root's control first becomes a plugin's uid, as root's runner would.
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
    ) -> Told:
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
        return told(done)


def make_cage(caller: Caller, folder: Path) -> RemoteCell:
    """A plugin folder with the probe, the caller's own as far as it has one."""
    shutil.copyfile(PROBE, folder / "probe.py")
    (folder / "probe.py").chmod(0o755)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    caller.give(folder)
    cage = RemoteCell(caller, folder)
    cage.manifest()
    return cage

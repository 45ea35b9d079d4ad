"""What a gateway on stdio tells about its plugins: on its stderr, to its client, and for `runner advice`.

That is which hosts were refused, which lists failed, and how a plugin failed, with the end of its stderr. A
client is the same person's program, and gets no values of variables, as the file that `runner advice` reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import trio

from runner.approvals.tools import identity_of
from runner.launch.advice.file import AdviceFile
from runner.launch.command import environ_of_places
from runner.outcome import Advice
from runner.plugin import Plugin
from runner.protocol.dialect import Notice, Progress
from sandbox.document.diagnostic import printable

# How a plugin's process failed. The other codes are about a call, and its caller has them as the answer.
_TOLD = tuple(
    (
        "launch_failed handshake_failed timeout crashed malformed_response policy_denied sandbox_unavailable"
        " internal"
    ).split()
)
_CLOSING_SECONDS = 1.0  # to write the rest


class Telling:
    def __init__(
        self,
        environ: Mapping[str, str],
        plugin: Callable[[str], Plugin | None],
        say: Callable[[str], None],
        tell: Callable[[str, str, str], None],
    ) -> None:
        """`plugin`: of this name. `tell`: tells the client, by the plugin's name, a level and a text."""
        self._environ = environ
        self._plugin = plugin
        self._say = say
        self._tell = tell
        self._files: dict[str, AdviceFile] = {}  # by identity
        self._unwritten: dict[AdviceFile, None] = {}
        self._changed = trio.Event()

    def start(self, remarks: Iterable[str]) -> None:
        for remark in map(printable, remarks):
            self._say(remark)
            self._tell("", "warning", remark)

    def remarked(self, name: str, remark: str) -> None:
        """Something is wrong with the lists of a plugin. Stderr and the client have it already."""
        self._keep(name, [remark])

    def hear(self, name: str, event: Notice | Progress) -> None:
        """What a plugin says beside its answers. Only advice about hosts is ours."""
        if isinstance(event, Notice) and event.kind == "advice" and isinstance(event.value, dict):
            self._tell_all(name, "warning", self._keep(name, [Advice(**event.value).text]))

    def ended(self, name: str, report: Mapping[str, Any]) -> None:
        """A process of a plugin has ended."""
        outcome = report["outcome"]
        if outcome["code"] not in _TOLD:
            return
        lines = [": ".join(filter(None, (outcome["code"], outcome["message"])))]
        lines += [Advice(**each).text for each in report.get("advice", ())]
        stderr = (report.get("session") or {}).get("stderr_tail", "")
        names = (report.get("grant") or {}).get("env", ())
        self._tell_all(name, "error", self._keep(name, lines, stderr, names))

    async def write(self) -> None:
        """Write what is to be kept, as it comes. In a thread: another gateway may be writing."""
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            while self._unwritten:
                file = next(iter(self._unwritten))
                del self._unwritten[file]
                await trio.to_thread.run_sync(file.write)

    def close(self) -> None:
        """Write the rest."""
        until = time.monotonic() + _CLOSING_SECONDS
        for file in self._unwritten:
            if time.monotonic() < until:
                file.write()

    def _tell_all(self, name: str, level: str, lines: Iterable[str]) -> None:
        told = [f"{name}: {line}" for line in lines]
        for line in told:
            self._say(line)
        if told:
            self._tell(name, level, "\n".join(told))

    def _keep(self, name: str, lines: Iterable[str], stderr: str = "", env: Iterable[str] = ()) -> list[str]:
        """Returns the lines as they are kept. `env`: names of variables that the plugin has."""
        plugin = self._plugin(name)
        if plugin is None:  # a server elsewhere, or one that is gone: nothing of it is in a cage
            return []
        identity = identity_of(plugin)
        if identity not in self._files:
            self._files[identity] = AdviceFile(identity, environ_of_places(plugin, self._environ))
        file = self._files[identity]
        values = [each.value or self._environ.get(each.name, "") for each in plugin.spec.env]
        file.conceal((*values, *(self._environ.get(each, "") for each in env)))
        if plugin.template is not None and plugin.template.env_file:
            stderr = ""  # nobody here knows the values of that file
        kept = file.take(lines, stderr)
        self._unwritten[file] = None
        self._changed.set()
        return kept

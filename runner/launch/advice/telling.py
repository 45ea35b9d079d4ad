"""Tell people while a plugin runs which hosts it asked for and did not reach: each once, a bounded number.

The plugin chooses the names and how many there are. So each line says that the plugin asked, and the option
in it allows that one name and nothing wider. Nothing is imported for a plugin that asks for none.
"""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.launch.advice.scene import Scene
    from runner.launch.stages import Started
    from runner.outcome import Advice
    from sandbox.network.egress import AuditLine

MOST_TOLD = 16
_MOST_LOOPBACK = 64  # refusals by its own loopback: for each the sockets of this machine are looked at


class HostTeller:
    def __init__(self, started: Started) -> None:
        self._started = started
        self._scene: Scene | None = None
        self._told: set[tuple[str, int, str]] = set()
        self._loopback_left = _MOST_LOOPBACK

    def advice(self, line: AuditLine) -> Advice | None:
        """What to tell people about a host that was refused or not reached, the first time; else None."""
        key = line.name, line.port, line.reason if line.kind == "ssh" else line.verdict
        if line.verdict not in ("refused", "failed") or key in self._told or len(self._told) > MOST_TOLD:
            return None
        from runner.launch.advice.advice import host_advice
        from runner.launch.network_report import failed_host, refused_host, told_of_loopback
        from runner.launch.report import make_scene
        from runner.outcome import Advice
        from sandbox.network.egress import OWN_LOOPBACK

        if line.reason == OWN_LOOPBACK:
            if not self._loopback_left:
                return None
            self._loopback_left -= 1
            if not told_of_loopback()(line):
                return None
        self._told.add(key)
        if len(self._told) > MOST_TOLD:
            more = f"the plugin asked for more than {MOST_TOLD} hosts that it did not reach"
            return Advice("host", f"{more}; the others are not shown here")
        self._scene = self._scene or make_scene(self._started)
        if self._scene is None:
            return None
        return host_advice(self._scene, failed_host(line) if line.verdict == "failed" else refused_host(line))

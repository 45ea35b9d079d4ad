"""The control plane of a daemon: settings that are followed, the database, and the parts of its API."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import trio

from runner.ledger.ledger import Ledger
from runner.ledger.sqlite_file import DatabaseUnusable
from runner.package.fault import PackageFault
from runner.serve.control.api import ControlApi
from runner.serve.control.bindings import ControlBindings
from runner.serve.control.database import ControlDatabase, open_control_database
from runner.serve.control.discovery import Discovery
from runner.serve.control.packages import ControlPackages, OnChange
from runner.serve.control.settings import ControlSettings, fault_text, read_control_settings
from runner.serve.control.store import PackageFolder
from runner.serve.openapi import RoutePart
from runner.serve.refusal import ControlUnusable
from runner.serve.sources import SourceFault, fault_of
from sandbox.document.diagnostic import DocumentError
from sandbox.identity.state import IMPORTED, state_root

_DATABASE = "control.db"  # beside the ledger
_MOST_READS = 5  # of one reload, while new folders turn up


class ControlPlane:
    """Made by `open_control`."""

    def __init__(
        self,
        path: str,
        settings: ControlSettings,
        database: ControlDatabase,
        ledger: Ledger,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._environ, self._say = path, environ, say
        self.faults: tuple[SourceFault, ...] = ()  # of the settings that were read last
        self.settings = settings  # as they are now
        self.database = database
        # Called after a package or a binding has changed, with "package" or "binding" and its id; and with
        # "settings" and "" after these have.
        self.listeners: list[OnChange] = []
        # Begins to watch these folders. Returns whether one of them was not watched before.
        self.follow: Callable[[tuple[str, ...]], bool] = lambda folders: False
        # Beside the states of plugins, where no other plugin is shown it.
        store = settings.store or os.path.join(os.path.dirname(state_root(environ)), IMPORTED)
        # One for each database: what one does not know is removed, and another may have it.
        own = hashlib.sha256(os.path.realpath(database.path).encode("utf-8", "surrogateescape"))
        folder = PackageFolder(os.path.join(store, own.hexdigest()[:16]))
        self.packages = ControlPackages(database, ledger, folder, lambda: self.settings, self._tell, environ)
        self.bindings = ControlBindings(database, ledger, self.packages, lambda: self.settings, self._tell)
        self.discovery = Discovery(database)
        # Each has routes at the door; others may be added before the daemon runs.
        self.parts: list[RoutePart] = [ControlApi(self.packages, self.bindings, self.discovery)]

    def org_of(self, token: bytes) -> str:
        """The org that a token belongs to, or ''."""
        return self.settings.org_of(token)

    def _tell(self, subject: str, name: str) -> None:
        for each in self.listeners:
            each(subject, name)

    async def reload(self) -> None:
        """Read the settings again, and judge all packages by them. Settings with a fault are told, and those
        from before stay."""
        try:
            for _ in range(_MOST_READS):
                found = await trio.to_thread.run_sync(read_control_settings, self._path, self._environ)
                if not self.follow(found.watched):
                    break  # else files may have changed after they were read, and before they were watched
        except DocumentError as error:
            faults = tuple(fault_of(each) for each in error.diagnostics)
            if faults != self.faults:
                self._say(f"{fault_text(error)}\nthe control plane goes on with its settings from before")
            self.faults = faults
            self.follow(self.settings.watched)
            return
        self.faults = ()
        for key in ("database", "store"):
            if getattr(found, key) != getattr(self.settings, key):
                self._say(f"{self._path}: another {key} counts when the daemon is started again")
        self.settings = found
        try:
            await self.packages.judge_again()
        except DatabaseUnusable as unusable:
            self._say(f"{unusable}; {unusable.hint}")
        self._tell("settings", "")


@asynccontextmanager
async def open_control(
    path: str, ledger: Ledger, environ: Mapping[str, str], say: Callable[[str], None]
) -> AsyncIterator[ControlPlane]:
    """`path`: of the settings. Raises ControlUnusable and DatabaseUnusable."""
    try:
        settings = read_control_settings(path, environ)
    except DocumentError as error:
        raise ControlUnusable(fault_text(error)) from None
    if not settings.store and not state_root(environ).startswith("/"):
        raise ControlUnusable(f"{path}: HOME is not the path of a folder; set it, or name the store")
    file = settings.database or os.path.join(os.path.dirname(ledger.path), _DATABASE)
    async with open_control_database(file) as database:
        control = ControlPlane(path, settings, database, ledger, environ, say)
        try:
            await control.packages.sweep()
        except PackageFault as fault:
            raise ControlUnusable(f"{fault}; {fault.hint}") from None
        await control.packages.judge_again()
        yield control

"""The running half of a control plane in the test's process: real packages, real cages, no door."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from runner.launch.remote import forkserver
from runner.ledger.ledger import Ledger, open_ledger
from runner.ledger.retry import Schedule
from runner.lifecycle.supervisor import Supervisor, open_supervisor
from runner.package.listing import list_package
from runner.protocol.calls import CallRequest
from runner.protocol.secrets import Secrets
from runner.serve.control.database import (
    BindingRow,
    ControlDatabase,
    ControlFile,
    PackageRow,
    canonical,
    open_control_database,
)
from runner.serve.control.events import read_event, subscribers
from runner.serve.control.running import BindingCall, RunningBindings
from runner.serve.control.settings import ControlSettings, OrgSettings
from runner.serve.deliveries import Deliveries
from runner.serve.desk import CallAnswer, Desk
from runner.serve.metrics import Metrics
from tests.conftest import ROOT, SYSTEM_PATH

ENVIRON = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
SECRETS = {"acme": "the-secret-of-acme", "rival": "the-secret-of-rival"}
_KINDS = {
    "search": "tools",
    "reader": "tools",
    "notify": "hooks",
    "window": "compactors",
    "triage": "harnesses",
}
_TELLING = '"secrets": sorted(secrets()),'  # of the plugin: names only


class Plane:
    def __init__(
        self,
        folder: Path,
        supervisor: Supervisor,
        ledger: Ledger,
        database: ControlDatabase,
        policy: str | None,
    ) -> None:
        self.ledger, self.database, self.supervisor = ledger, database, supervisor
        self.folder = folder
        orgs = {
            org: OrgSettings((org.encode(),), Secrets({"api_key": value})) for org, value in SECRETS.items()
        }
        self.settings = ControlSettings(orgs)
        self.running = RunningBindings(supervisor, database, lambda: self.settings, policy, ENVIRON, ledger)
        self.desk = Desk(supervisor, ledger, None, Metrics())  # type: ignore[arg-type]
        self.deliveries = Deliveries(supervisor, ledger, Metrics(), lambda name: (), self.running.target_of)

    async def add_package(self, folder: Path, name: str = "acme~devkit@0.1.0") -> PackageRow:
        digest = list_package(str(folder)).digest
        row = PackageRow(name, "acme/devkit", "0.1.0", "vai", digest=digest, folder=str(folder))
        return (await self.database.do(ControlFile.import_package, row, "operator"))[0]

    async def bind(self, name: str, export: str, org: str = "acme", **changes: Any) -> BindingRow:
        """Make or change a binding. `changes`: keys of its record."""
        slots = {"api_key": f"secret://{org}/api_key"} if export in ("search", "triage") else {}
        record = {
            "binding_id": name,
            "package_id": "acme/devkit",
            "package_version": "0.1.0",
            "export_id": export,
            "scope": {"org_id": org},
            "secrets": slots,
            "status": "active",
            "rollout": {"traffic_percent": 100},
            **changes,
        }
        row = BindingRow(
            *(name, record["scope"]["org_id"], record["scope"].get("project_id", "")),
            *("acme~devkit@0.1.0", export, _KINDS[export]),
            active=int(record["status"] == "active"),
            traffic_percent=record["rollout"]["traffic_percent"],
            record=canonical(record),
        )
        stored = await self.database.do(ControlFile.put_binding, row, None, "operator", "changed")
        self.running.wake()
        return stored

    async def call(
        self,
        binding: str,
        given: Any = None,
        context: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        seen: list[Any] | None = None,
    ) -> CallAnswer:
        """Call by a binding, as the routes do. `seen`: gets the progress."""
        live = await self.running.find(binding)
        assert live is not None
        on_progress = None if seen is None else seen.append
        call = CallRequest(
            *(live.name, live.row.export, {} if given is None else given, live.row.kind, None, context),
            *(on_progress, f"org:{live.row.org}", key),
        )
        accepted = await self.desk.accept(call, BindingCall(self.running, live))
        if isinstance(accepted, CallAnswer):
            return accepted
        return await self.desk.make(accepted, call)

    async def records(self, **query: Any) -> list[dict[str, Any]]:
        """The newest first."""
        return [json.loads(row.document) for row in await self.database.do(ControlFile.records, **query)]

    async def send(self, org: str, **event: Any) -> list[tuple[str, str]]:
        """Send an event of an org. Returns the bindings that get it and the ids of the deliveries."""
        made, kind = read_event(event, org)
        rows = await self.ledger.enqueue_all(made, await subscribers(self.running, made, kind))
        self.deliveries.wake()
        return [(row.plugin, row.id) for row in rows]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 -- the product has no event for it
        await trio.sleep(0.01)


def put_devkit(folder: Path, *, telling: bool = False) -> Path:
    """The package of the tests. `telling`: it repeats its secrets wherever it can, and says why a call is
    cancelled."""
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", folder)
    if telling:
        program = folder / "bin/plugin"
        text = program.read_text()
        assert _TELLING in text
        text = text.replace(_TELLING, '"secrets": secrets(),')
        for said in ('"as asked"', 'f"step {number}"'):
            text = text.replace(said, "json.dumps(secrets())")
        say = "    print(json.dumps(secrets()), file=sys.stderr, flush=True)\n"
        text = text.replace("    act = asked.get", say + "    act = asked.get")
        say = "            print('told', message['reason'], file=sys.stderr, flush=True)\n"
        text = text.replace("            then = asked.get", say + "            then = asked.get")
        program.write_text(text)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@asynccontextmanager
async def plane(folder: Path, policy: str | None = None) -> AsyncIterator[Plane]:
    """`folder`: gets the databases."""
    os.makedirs(folder, 0o700, exist_ok=True)
    schedule = Schedule(attempts=2, first_seconds=0.0)
    try:
        async with (
            open_ledger(str(folder / "ledger.db"), schedule=schedule) as ledger,
            open_control_database(str(folder / "control.db")) as database,
            open_supervisor() as supervisor,
            trio.open_nursery() as nursery,
        ):
            made = Plane(folder, supervisor, ledger, database, policy)
            nursery.start_soon(made.running.run)
            nursery.start_soon(made.deliveries.run)
            yield made
            nursery.cancel_scope.cancel()
    finally:
        forkserver.close()

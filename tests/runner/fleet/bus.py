"""NATS servers and workers for tests: real processes on loopback, with ports and folders of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.fleet.connection import NoFleet, connect, read_address
from runner.fleet.streams import FleetSizes, make_streams
from tests.conftest import NATS_SERVER, Caller
from tests.ports import free_port
from tests.tables import wait_for

SECONDS = 60.0


class Bus:
    """One server, or a cluster. `disk`: the bytes of a disk of its own, that no other process sees."""

    def __init__(
        self, folder: Path, count: int = 1, extra: str = "", scheme: str = "nats", disk: int = 0
    ) -> None:
        assert NATS_SERVER is not None
        self._folder, self._extra, self._scheme, self._disk = folder, extra, scheme, disk
        numbers = [free_port() for _ in range(3 * count)]
        self.ports = numbers[:count]
        self._routes, self._monitors = numbers[count : 2 * count], numbers[2 * count :]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count

    @property
    def url(self) -> str:
        return ",".join(f"{self._scheme}://127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int = 0) -> None:
        folder = self._folder / f"nats{number}"
        folder.mkdir(exist_ok=True)
        cluster = ""
        if len(self.ports) > 1:
            routes = ", ".join(f"nats://127.0.0.1:{port}" for port in self._routes)
            listen = f"127.0.0.1:{self._routes[number]}"
            cluster = f'cluster {{ name: fleet, listen: "{listen}", routes: [{routes}] }}\n'
        config = folder / "nats.conf"
        config.write_text(
            f'pid_file: "{folder}/pid"\nserver_name: n{number}\nlisten: "127.0.0.1:{self.ports[number]}"\n'
            f'http: "127.0.0.1:{self._monitors[number]}"\n'
            f'jetstream {{ store_dir: "{folder}/js", max_file_store: 4G, max_memory_store: 512M }}\n'
            f"{cluster}{self._extra}\n"
        )
        store = folder / "js"
        store.mkdir(exist_ok=True)
        caged = ("bwrap", "--die-with-parent", "--dev-bind", "/", "/")
        own = ("--size", str(self._disk), "--tmpfs", str(store), "--")
        with open(folder / "log", "ab") as log:
            self.processes[number] = subprocess.Popen(
                [*(caged + own if self._disk else ()), str(NATS_SERVER), "-c", str(config)],
                stdout=log,
                stderr=log,
            )

    def fill_disk(self, number: int = 0) -> Path:
        """Fill the disk of a server's own. Returns what to remove."""
        folder = self._folder / f"nats{number}"
        own = Path(f"/proc/{(folder / 'pid').read_text().strip()}/root{folder}/js")
        assert own.stat().st_dev != folder.stat().st_dev, "it is the disk of this machine"
        with open(own / "filler", "wb", buffering=0) as file:
            left = 2 * self._disk
            for size in (1 << 16, 4096, 1):
                with contextlib.suppress(OSError):
                    while left > 0:
                        left -= file.write(bytes(size)) or 0
        assert left > 0, "it took more than it has"
        return own / "filler"

    def kill(self, number: int = 0) -> None:
        process = self.processes[number]
        if process is not None:
            process.kill()
            process.wait(SECONDS)
            self.processes[number] = None

    def is_ready(self, number: int = 0) -> bool:
        process = self.processes[number]
        assert process is not None and process.poll() is None, (
            self._folder / f"nats{number}/log"
        ).read_text()
        url = f"http://127.0.0.1:{self._monitors[number]}/healthz"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.loads(answer.read())["status"] == "ok"
        except (urllib.error.URLError, OSError):
            return False

    def make(self, address: str = "", sizes: FleetSizes | None = None) -> list[str]:
        """The streams, when the cluster has a leader, which a busy machine may lose again."""

        async def make() -> list[str]:
            async with connect(read_address(address or self.url), "test") as bus:
                return await make_streams(
                    bus.nc, sizes or FleetSizes(replicas=len(self.ports), megabytes=256)
                )

        for _ in range(9):
            with contextlib.suppress(NoFleet):
                return asyncio.run(make())
        return asyncio.run(make())


def _started(folder: Path, count: int, extra: str, scheme: str, disk: int) -> Bus:
    """Servers that are ready. Somebody else may take a port that was free, so that it is tried again."""
    for last in (False, False, True):
        bus = Bus(folder, count, extra, scheme, disk)
        for number in range(count):
            bus.start(number)
        try:
            assert all(wait_for(partial(bus.is_ready, number)) for number in range(count))
            break
        except AssertionError:
            for number in range(count):
                bus.kill(number)
            if last:
                raise
    return bus


@contextlib.contextmanager
def bus_in(
    folder: Path, count: int = 1, extra: str = "", *, make: bool = True, scheme: str = "nats", disk: int = 0
) -> Iterator[Bus]:
    folder.mkdir(exist_ok=True)
    bus = _started(folder, count, extra, scheme, disk)
    try:
        if make:
            bus.make()
        yield bus
    finally:
        for number in range(count):
            bus.kill(number)


class WorkerProcess:
    """A running `runner worker`."""

    def __init__(self, process: subprocess.Popen[bytes], manager: socket.socket) -> None:
        self.process, self._manager = process, manager

    def wait_ready(self) -> None:
        while True:
            said = self._manager.recv(4096).decode()
            if "READY=1" in said.split("\n"):
                return

    def end(self) -> str:
        """End it by SIGTERM. Returns what it said."""
        self.process.terminate()
        _, err = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 0, err
        return err.decode()


@contextlib.contextmanager
def working(
    caller: Caller, folder: Path, url: str, *options: str, name: str = "w1", slots: int = 4
) -> Iterator[WorkerProcess]:
    """A worker with the plugins of folder/plugins."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = folder / f"notify-{name}"
        path.unlink(missing_ok=True)
        manager.bind(str(path))
        path.chmod(0o777)
        manager.settimeout(SECONDS)
        words: Sequence[str] = ("worker", "--nats", url, "--config", str(folder / "plugins"), "--name", name)
        env = {"NOTIFY_SOCKET": str(path)}
        process = caller.start(*words, "--slots", str(slots), *options, env=env)
        with process:
            worker = WorkerProcess(process, manager)
            try:
                worker.wait_ready()
                yield worker
            except BaseException as error:
                process.kill()
                if process.stderr is not None and not process.stderr.closed:
                    error.add_note(process.stderr.read().decode())
                raise
            finally:
                if process.poll() is None:
                    process.kill()


def ask(url: str, act: Any) -> Any:
    """Run an async function with a client of the fleet."""
    from runner.fleet.client import open_client

    async def main() -> Any:
        async with open_client(read_address(url)) as client:
            return await act(client)

    return asyncio.run(main())

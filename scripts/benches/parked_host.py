"""A host that starts a plugin by a launch and from parked cells: `parked_host.py MANIFEST`.

For each line of stdin it prints one JSON document: the seconds until the plugin's first byte, for each way.
It imports only installed packages: the user that is measured may not be able to read the checkout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from runner.launch.remote.remote_cell import open_cage
from runner.launch.stages import Invocation
from runner.session.parking import open_parking

# bubblewrap still builds the mounts when a cell is said to be parked.
PARKED_SECONDS = 0.05


async def first_byte(opening: AbstractAsyncContextManager[Any]) -> float:
    start = time.perf_counter()
    async with opening as cell:
        assert cell is not None and await cell.stdout.receive_some(1)
        return time.perf_counter() - start


async def main(manifest: str) -> None:
    given = Invocation(manifest), dict(os.environ)
    async with open_parking(1) as parking:
        while await trio.to_thread.run_sync(sys.stdin.readline):
            launched = await first_byte(open_cage(given[0], environ=given[1]))
            async with open_cage(given[0], environ=given[1], parks=True) as cell:
                await cell.parked()
                await trio.sleep(PARKED_SECONDS)
                start = time.perf_counter()
                cell.release()
                assert await cell.stdout.receive_some(1)
                released = time.perf_counter() - start
            parking._most = 1
            parking.fill(*given)
            while not parking.waiting:
                assert not parking.fault, parking.fault
                await trio.sleep(PARKED_SECONDS)
            await trio.sleep(PARKED_SECONDS)
            parking._most = 0  # what is parked for the next call is not measured with this one
            taken = await first_byte(parking.take(*given))
            print(json.dumps([launched, released, taken]), flush=True)


trio.run(main, sys.argv[1])

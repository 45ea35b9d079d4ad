"""A submitter that can be killed: `submitter.py URL FILE AT-ONCE`, with one call on each line of stdin.

Each line is JSON: {"id", "plugin", "tool", "input", "kind", "durable"}. What came of a call is one line of
the file. Who comes after a killed one gets the calls without a line, and submits them again by their ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from runner.fleet.client import FleetClient, FleetPlugin, open_client
from runner.fleet.connection import NoFleet, read_address
from runner.serve.refusal import Refused
from tests.runner.fleet.inside import new_call


async def submit(
    client: FleetClient, plugins: dict[str, FleetPlugin], each: dict[str, Any]
) -> dict[str, Any]:
    call = new_call(each["plugin"], each["tool"], each["input"], kind=each.get("kind"), call=each["id"])
    plugin = plugins[each["plugin"]]
    while True:
        try:
            answer = await client.call(plugin, call, durable=each["durable"])
        except (Refused, NoFleet) as error:
            if not each["durable"]:
                return {"id": each["id"], "code": type(error).__name__}
            await asyncio.sleep(0.2)
            continue
        if answer.status == 429 and not each["durable"]:
            await asyncio.sleep(0.05)
            continue
        code = "ok" if answer.is_ok else answer.document["error"]["code"]
        outcome = answer.document.get("execution_outcome")
        return {"id": each["id"], "code": code, "execution_outcome": outcome}


async def main(url: str, path: str, at_once: int) -> None:
    waiting = iter([json.loads(line) for line in sys.stdin])
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    async with open_client(read_address(url), stays=True) as client:
        plugins: dict[str, FleetPlugin] = {}
        while len(plugins) < 3:
            try:
                plugins = {each.name: each for each in await client.plugins()}
            except NoFleet:
                pass
            await asyncio.sleep(0.1)

        async def work() -> None:
            for each in waiting:
                done = await submit(client, plugins, each)
                os.write(file, f"{json.dumps(done)}\n".encode())

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

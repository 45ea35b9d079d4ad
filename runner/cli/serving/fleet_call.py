"""`runner call --fleet URL`: a call that a worker of a fleet makes."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner.cli.serving.fleet_option import fleet_verb
from runner.cli.serving.via import read_document, read_seconds, read_words, tell_answer
from runner.cli.shared.text import say
from runner.protocol.calls import CallRequest
from sandbox.document.diagnostic import printable

if TYPE_CHECKING:
    from runner.fleet.connection import FleetAddress

_SWITCHES = ("--json", "--durable", "--no-wait")


def call_fleet(words: Sequence[str]) -> int:
    return fleet_verb("call", lambda: _call(words))


def _call(words: Sequence[str]) -> int:
    from runner.fleet.connection import read_address

    given, found = read_words(words, "--fleet URL", _SWITCHES)
    seconds = read_seconds(given.get("--timeout"))
    document = read_document(given, found[1])
    if "--no-wait" in given and "--durable" not in given:
        raise ValueError("--no-wait: only a durable call goes on without somebody who waits; add --durable")
    address = read_address(given["--fleet"])
    status, answer = asyncio.run(_submit(address, found[0], document, seconds, given))
    if "--no-wait" in given and status == 202:
        print(json.dumps(answer))
        say(printable(f"runner call: to ask for the answer: {_asking(words, answer['id'])}"))
        return 0
    return tell_answer(status, answer, as_json="--json" in given)


def _asking(words: Sequence[str], call: str) -> str:
    """The same command line with the call's id as its key, which gets the answer of that call. A password in
    the URL is not repeated."""
    kept = [word for word in words if word not in ("--durable", "--no-wait")]
    kept = ["URL" if "://" in word and "@" in word else word for word in kept]
    if not any(word == "--key" or word.startswith("--key=") for word in kept):
        kept += ["--key", call]
    return shlex.join(("runner", "call", *kept))


async def _submit(
    address: FleetAddress, name: str, document: dict[str, Any], seconds: float | None, given: dict[str, str]
) -> tuple[int, Any]:
    from runner.fleet.client import new_call, open_client

    async with open_client(address) as fleet:
        plugin = await fleet.find(name)
        tool, value, kind, context = (document[key] for key in ("tool", "input", "kind", "context"))
        request = CallRequest(plugin.name, tool, value, kind, seconds, context)
        call = new_call(request, call=given.get("--key"))
        if "--no-wait" in given:
            await fleet.submit(plugin, call)
            return 202, {"id": call.id}
        # With a key the answer has to be that of the first call, so that it is a durable one.
        durable = "--durable" in given or "--key" in given
        answer = await fleet.call(plugin, call, durable=durable)
        return answer.status, answer.document

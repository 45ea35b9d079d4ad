"""What the verbs about a fleet share: what is said if it cannot be used, and the loop that they run in."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from runner.cli.serving.via import tell_error
from runner.cli.shared.text import print_diagnostics, say
from runner.extras import missing
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import DocumentError, printable

HELP = "the servers of a fleet (nats://HOST:PORT), or a file with servers, user and keys: docs/fleet.md"


def fleet_verb(verb: str, act: Callable[[], int]) -> int:
    """Call it, and say what is wrong. Returns the exit status."""
    try:
        from runner.fleet.connection import NoFleet
        from runner.serve.refusal import Refused
    except ModuleNotFoundError as error:
        say(f"runner {verb}: {missing('fleet', error)}")
        return EXIT["launch_failed"]
    try:
        return act()
    except ModuleNotFoundError as error:
        say(f"runner {verb}: {missing('fleet', error)}")
        return EXIT["launch_failed"]
    except DocumentError as error:
        print_diagnostics(error.diagnostics, sys.stderr)
        return USAGE_ERROR
    except ValueError as error:
        say(printable(f"runner {verb}: {error}"))
        return USAGE_ERROR
    except Refused as refused:
        return tell_error(refused.status, refused.document())
    except (NoFleet, BaseExceptionGroup) as error:
        found = _only(error)
        if not isinstance(found, NoFleet):
            raise
        say(printable(f"runner {verb}: {found}"))
        return EXIT["launch_failed"]


def with_fleet(word: str, act: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Call a function with a client of the fleet. Raises what `fleet_verb` tells."""
    import asyncio

    from runner.fleet.client import open_client
    from runner.fleet.connection import read_address

    address = read_address(word)

    async def main() -> Any:
        async with open_client(address) as client:
            return await act(client, *args)

    return asyncio.run(main())


def ask_workers(verb: str, args: argparse.Namespace, tell: Callable[[str, str], None]) -> int:
    """Ask workers about the plugin of the arguments: `logs`, or what `ctl` names so. Returns the exit status.
    Raises what `fleet_verb` tells."""
    from runner.fleet import operate

    what = getattr(args, "action", verb)
    failed = with_fleet(args.fleet, operate.ask_workers, what, args.name, args.worker, tell)
    for worker, why in failed.items():
        say(printable(f"runner {verb}: the worker {worker}: {why}"))
    return EXIT["launch_failed"] if failed else 0


def _only(error: BaseException) -> BaseException:
    """The one that is in groups of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error

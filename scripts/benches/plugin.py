"""Call a plugin of your own many times over open sessions, and print how long the calls took, as JSON.

A session that ends is opened again for the next call. A call that the plugin answers with an error counts
with its time. What would fail the same way every time ends the run: a plugin that does not start, and a call
that the runner refuses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio

import runner
from scripts.benches.figures import percentile


async def measure(calls: int, sessions: int, call: Sequence[Any], kind: Any, opening: Any) -> dict[str, Any]:
    """`call`: a name and an input. The clock starts when all sessions are open."""
    taken: list[float] = []
    outcomes = Counter[str]()
    ready: list[None] = []
    all_ready = trio.Event()
    began, left = 0.0, calls

    async def work() -> None:
        nonlocal began, left
        arrived = False
        while left > 0:
            async with runner.open_plugin(**opening) as plugin:
                if not arrived:
                    arrived = True
                    ready.append(None)
                    if len(ready) == sessions:
                        began = trio.current_time()
                        all_ready.set()
                    await all_ready.wait()
                failed = False
                while left > 0 and not failed:
                    left -= 1
                    at = trio.current_time()
                    try:
                        await plugin.call(*call, kind=kind)
                        outcomes["hook_failed" if plugin.substituted else "ok"] += 1
                    except runner.InvalidCall:
                        raise
                    except runner.PluginError as error:
                        outcomes[error.outcome.code] += 1
                    except runner.PluginFailure as failure:
                        if failure.outcome.phase in ("manifest", "policy", "plan", "launch"):
                            raise
                        outcomes[failure.outcome.code] += 1
                        failed = True
                        continue
                    taken.append(1000 * (trio.current_time() - at))

    async with trio.open_nursery() as nursery:
        for _ in range(sessions):
            nursery.start_soon(work)
    seconds = trio.current_time() - began
    latency = {f"p{percent}": round(percentile(taken, percent), 3) for percent in (50, 90, 99) if taken}
    if taken:
        latency = {"min": round(min(taken), 3), **latency, "max": round(max(taken), 3)}
    return {
        "calls": calls,
        "outcomes": dict(outcomes),
        "seconds": round(seconds, 3),
        "per_second": round(calls / seconds, 1),
        "latency_ms": latency,
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-plugin", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("manifest", metavar="MANIFEST")
    parser.add_argument("name", metavar="NAME", help="what to call")
    parser.add_argument("--input", type=json.loads, metavar="JSON")
    parser.add_argument("--kind", help="what NAME names (default: the first that the contract has)")
    parser.add_argument("--policy", help="a name or a file")
    parser.add_argument("--server", help="which one of a configuration that names several")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args(words)
    if not 0 < args.sessions <= args.calls:
        parser.error("--sessions: at least 1, and not more than --calls")
    opening = {"path": args.manifest, "policy": args.policy, "server": args.server}
    try:
        found = trio.run(measure, args.calls, args.sessions, (args.name, args.input), args.kind, opening)
    except ExceptionGroup as group:
        refused, others = group.split((runner.PluginError, runner.PluginFailure))
        if refused is None or others is not None:
            raise
        first: Exception = refused
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        print(f"bench: {first}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure what the runner costs: launches, ends, calls, sessions, daemons, networks and waiting.

Alternatives that are compared are interleaved in one run, because a machine's speed changes over minutes.
Started by root, each part is measured as root and as an ordinary user.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sandbox.speed.value import NamedTuple
from scripts.benches import (
    at_once,
    binds,
    call,
    credentials,
    gateway,
    growth,
    host_sessions,
    images,
    kill,
    launch,
    learn,
    look,
    machine,
    network,
    pages,
    parked,
    peers,
    plots,
    serve,
    staged,
    talks,
    waiting,
    workloads,
)
from scripts.benches.caller import Caller, Unable, callers, reason
from scripts.benches.pages import Run
from scripts.benches.rows import Table, left_out

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
KIB = 1 << 10


class Counts(NamedTuple):
    """How often each thing is measured, or how many there are at most."""

    launches: int
    kills: int
    bombs: int
    calls: int
    colds: int
    larges: int
    sessions: int
    connections: int
    downloads: int
    onces: int
    starts: int
    seconds: int
    most: int
    files: int


# 100 kills are the fewest that have a 99th percentile.
FULL = Counts(60, 100, 20, 2000, 30, 30, 64, 1000, 20, 20, 10, 10, 500, 100_000)
QUICK = Counts(4, 5, 2, 100, 3, 3, 8, 100, 2, 3, 3, 2, 10, 1000)
BINDS = (1, 10, 100)
SESSIONS = (1, 10, 100, 500)
IDLE = 200  # plugins of a daemon

_MEANINGS = {
    "launches": "launches of each kind",
    "kills": "kills of an idle plugin",
    "bombs": "kills of a fork bomb",
    "calls": "calls over an open session",
    "colds": "calls that start the plugin",
    "larges": "answers of 4 MiB",
    "sessions": "sessions that are called all at once",
    "connections": "connections to a server",
    "downloads": "downloads of 256 MiB",
    "onces": "calls of plugins that answer only one",
    "starts": "starts beside each number of open sessions, and rounds of work",
    "seconds": "seconds of waiting",
    "most": "sessions that are open at most",
    "files": "files that a staged build makes",
}


def _launch(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return launch.bench(caller, counts.launches)


def _parked(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return parked.bench(caller, counts.launches)


def _images(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return images.bench(caller, max(2, counts.launches // 2))


def _binds(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return binds.bench(caller, BINDS, max(2, counts.launches // 2))


def _learn(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return learn.bench(caller, max(2, counts.launches // 2))


def _look(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return look.bench(caller, max(2, counts.launches // 2))


def _peers(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return peers.bench(caller, max(2, counts.launches // 2), found)


def _workloads(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return workloads.bench(caller, counts.starts, max(2, counts.calls // 10), found)


def _at_once(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return at_once.bench(caller, max(2, counts.starts // 2), found)


def _kill(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return kill.bench(caller, counts.kills, counts.bombs)


def _call(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return call.bench(caller, counts.calls, counts.colds, counts.larges)


def _framings(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return talks.bench_framings(caller, counts.calls, counts.onces)


def _answers(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    sizes = {KIB: counts.calls // 2, 64 * KIB: counts.calls // 4, 4 * KIB * KIB: counts.larges}
    return talks.bench_answers(caller, {size: max(2, count) for size, count in sizes.items()})


def _sessions(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return call.bench_many(caller, counts.sessions)


def _growth(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    wanted = tuple(count for count in SESSIONS if count <= counts.most)
    return growth.bench(caller, wanted, max(2, counts.calls // 10), counts.starts)


def _serve(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return serve.bench(caller, counts.calls, min(counts.most, IDLE))


def _gateway(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    starts = max(2, counts.starts)
    return [*gateway.bench(caller, counts.calls, starts), *host_sessions.bench(caller, max(2, starts // 2))]


def _credentials(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return credentials.bench(caller, max(2, counts.launches // 2), counts.connections, counts.downloads)


def _network(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return network.bench(caller, max(2, counts.launches // 2), counts.connections, counts.downloads)


def _staged(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return staged.bench(caller, counts.files, max(1, counts.starts // 3))


def _waiting(caller: Caller, counts: Counts, found: peers.FoundPeers) -> list[Table]:
    return waiting.bench(caller, counts.seconds)


Part = Callable[[Caller, Counts, peers.FoundPeers], list[Table]]
PARTS: Mapping[str, Part] = {
    "launch": _launch,
    "parked": _parked,
    "peers": _peers,
    "workloads": _workloads,
    "at-once": _at_once,
    "images": _images,
    "binds": _binds,
    "learn": _learn,
    "look": _look,
    "kill": _kill,
    "call": _call,
    "framings": _framings,
    "answers": _answers,
    "sessions": _sessions,
    "growth": _growth,
    "serve": _serve,
    "gateway": _gateway,
    "network": _network,
    "credentials": _credentials,
    "staged": _staged,
    "waiting": _waiting,
}


class Options(NamedTuple):
    """The command line."""

    parts: tuple[str, ...]
    counts: Counts
    as_json: bool
    install: bool
    write: bool
    source: Path | None  # an earlier run to show or write, instead of measuring


def parse(words: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=(__doc__ or "").partition("\n")[0],
        epilog="A run of all parts, with the usual counts, writes docs/performance/ARCHITECTURE.json, and "
        "page and plots of all architectures. Any other only prints, unless --write is given.",
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"what to measure, everything by default: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few samples of everything, in under two minutes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with all samples")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="install other sandboxes that are missing: with apt-get, and from npm and PyPI into "
        ".venv/bench-peers",
    )
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write docs/performance/ARCHITECTURE.json, the page and the plots, or do not",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="measure nothing: take the run that --json or --write wrote to this file",
    )
    for name, meaning in _MEANINGS.items():
        numbers = f"{getattr(FULL, name)}, with --quick {getattr(QUICK, name)}"
        parser.add_argument(f"--{name}", type=_count, metavar="N", help=f"{meaning} ({numbers})")
    args = parser.parse_args(words)
    unknown = [word for word in args.parts if word not in PARTS]
    if unknown:
        parser.error(f"there is no part {' and no part '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.parts and args.write:
        parser.error("--write replaces the page about all parts: leave out the names of parts")
    given = {name: number for name in Counts._fields if (number := getattr(args, name)) is not None}
    counts = (QUICK if args.quick else FULL)._replace(**given)
    usual = not args.quick and not given
    write = args.write if args.write is not None else not args.parts and usual
    if args.source and args.write is None:
        write = False
    return Options(tuple(args.parts) or tuple(PARTS), counts, args.json, args.peers, write, args.source)


def _count(word: str) -> int:
    number = int(word)
    if number < 2:
        raise argparse.ArgumentTypeError("at least 2 samples are needed")
    return number


def main(words: Sequence[str]) -> int:
    options = parse(words)
    if options.source is not None:
        return _show(options.source, options.write)
    bwrap = os.environ.get("RUNNER_BWRAP") or shutil.which("bwrap", path=peers.PATH)
    if not bwrap or not os.access(bwrap, os.X_OK):
        print("bench: there is no bubblewrap here: apt-get install bubblewrap", file=sys.stderr)
        return 1
    if os.geteuid() != 0:
        print(
            "bench: not root: left out are the runner as root, runc and crun, connections and downloads "
            "through a gate, and what only root can install",
            file=sys.stderr,
        )
    # A shell starts what it runs in the background with SIGINT ignored. The runner would inherit that, and
    # not notice the second of the two signals that end it at once.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its folders are removed
    os.closerange(3, 1024)  # a descriptor that a shell left open could have the number that bwrap needs
    watch = machine.Watch()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    wanted = {"peers", "workloads", "at-once"} & {*options.parts}
    found = peers.find(options.install) if wanted else peers.FoundPeers((), (), ())
    about = machine.look(bwrap)._replace(peers=found.versions)
    if not options.as_json:
        print(", ".join(f"{name} {value}" for name, value in about.facts()))
    tables, faults = _measure(options, found, watch)
    run = Run(" ".join(("scripts/bench", *words)), date, about, watch.load(), tables)
    document = pages.as_document(run)
    if options.as_json:
        print(json.dumps(document))
    else:
        print(f"\n{run.load.sentence()}")
    if options.write:
        write(document)
    if faults:
        print(f"bench: not measured: {'; '.join(faults)}", file=sys.stderr)
    return 1 if faults else 0


def _measure(
    options: Options, found: peers.FoundPeers, watch: machine.Watch
) -> tuple[list[Table], list[str]]:
    """The tables, and what failed. A part that fails does not stop the others."""
    tables: list[Table] = []
    faults: list[str] = []
    with callers() as measured:
        for part in options.parts:
            for caller in measured:
                watch.look()
                began = time.monotonic()
                print(f"bench: {part}, as {caller.name} …", end="", file=sys.stderr, flush=True)
                try:
                    new = PARTS[part](caller, options.counts, found)
                except Exception as fault:  # noqa: BLE001 -- what was measured before is not lost
                    text = str(fault) if isinstance(fault, Unable) else f"{type(fault).__name__}: {fault}"
                    print(f" {text}", file=sys.stderr)
                    faults.append(f"{part}, as {caller.name}")
                    new = [left_out(part, caller.name, reason(text))]
                else:
                    print(f" {time.monotonic() - began:.0f} s", file=sys.stderr)
                tables += new
                for table in () if options.as_json else new:
                    print(f"\n{pages.as_text(table)}", flush=True)
    return tables, faults


def _show(source: Path, into_docs: bool) -> int:
    """Print the page of an earlier run, or write the page and the plots."""
    try:
        document = json.loads(source.read_text())
    except (OSError, ValueError) as fault:
        print(f"bench: {source}: {fault}", file=sys.stderr)
        return 1
    if not isinstance(document, dict) or document.get("format") != pages.FORMAT:
        print(f"bench: {source}: not a run in format {pages.FORMAT}; measure again", file=sys.stderr)
        return 1
    if into_docs:
        write(document)
    else:
        print(pages.as_page([document]), end="")
    return 0


def write(document: pages.Document, folder: Path = DOCS) -> None:
    """Write the document in place of the one of the same architecture, and page and plots of all of them."""
    runs = folder / "performance"
    runs.mkdir(exist_ok=True)
    own = f"performance/{pages.architecture_of(document)}.json"
    (folder / own).write_text(pages.as_lines(document))
    documents = written_runs(runs)
    files = {"performance.md": pages.as_page(documents), **plots.draw(documents)}
    for name, text in files.items():
        (folder / name).write_text(text)
    print(f"bench: {', '.join((own, *files))} are written to {folder}", file=sys.stderr)


def written_runs(folder: Path) -> list[pages.Document]:
    """The runs that are stored there, the newest first."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda document: str(document["date"]), reverse=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

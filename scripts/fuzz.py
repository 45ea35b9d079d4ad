"""Run the targets of tests/fuzz/targets.py: see scripts/fuzz.

Each target runs in a process of its own. What kills it, or keeps it busy where no signal is handled, is found
too: the input at hand is in memory that both processes see.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import MOST_BYTES, mutate

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 2.0  # of processor time for one input
_HANG_SECONDS = 600.0  # for one input, until the process is killed: the machine may be busy
_MINIMISE_SECONDS = 10.0
_MOST_MEMORY = 4 << 30
_MOST_FAULTS = 8  # of a target
_LONGEST_EXAMPLE = 4096


class TooSlow(BaseException):
    """Not an Exception, so that no target takes it for a refusal."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        usage="scripts/fuzz [TARGET…] [--seconds N] [--seed N]\n       scripts/fuzz TARGET FILE",
        description="Give parsers inputs that nobody would write. A fault is stored, with the line that runs"
        " it again; exit status 1.",
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="what to fuzz; without any, everything (see --list)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="of processor time, for all of them together (default: 60)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int.from_bytes(os.urandom(4), "big"),
        help="the same seed makes the same inputs in the same order, where atheris is not installed",
    )
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--atheris", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.atheris:
        return _run_atheris(args.targets[0], args.seconds, args.atheris)
    from tests.fuzz.targets import TARGETS

    if args.list:
        print("\n".join(TARGETS))
        return 0
    if len(args.targets) == 2 and args.targets[0] in TARGETS and args.targets[1] not in TARGETS:
        try:
            raw = Path(args.targets[1]).read_bytes()
        except OSError as error:
            parser.error(f"{args.targets[1]} is no target, and no file: {error.strerror}")
        return _run_once(args.targets[0], raw)
    if not args.seconds > 0:
        parser.error("--seconds: it has to be more than 0")
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]}; scripts/fuzz --list prints them")
    names = args.targets or list(TARGETS)
    guided = importlib.util.find_spec("atheris") is not None
    print(f"{len(names)} targets, seed {args.seed}, {'atheris' if guided else 'mutations'}", flush=True)
    found = [
        _guided(name, args.seconds / len(names))
        if guided
        else _forked(name, args.seconds / len(names), args.seed)
        for name in names
    ]
    return int(any(found))


def _run_once(name: str, data: bytes) -> int:
    """Print what the input means. Raises what the target raises. Returns 1 if it took too long."""
    from tests.fuzz.targets import TARGETS, meaning

    began = time.process_time()
    found = meaning(TARGETS[name], data)
    took = time.process_time() - began
    print(f"{name}: {found}: {took:.3f} s of processor time")
    return int(took > MOST_SECONDS)


# --- mutations ----------------------------------------------------------------------------------------------


class CurrentInput:
    """The input at hand, in memory that the parent sees too."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 + MOST_BYTES)
        self._count = 0

    def set(self, data: bytes) -> None:
        self._count += 1
        self._memory[:16] = len(data).to_bytes(8, "big") + self._count.to_bytes(8, "big")
        self._memory[16 : 16 + len(data)] = data

    def get(self) -> bytes:
        return self._memory[16 : 16 + int.from_bytes(self._memory[:8], "big")]

    @property
    def number(self) -> bytes:
        return self._memory[8:16]


def _forked(name: str, seconds: float, seed: int) -> bool:
    """Fuzz a target in a child. Returns whether there was a fault."""
    current = CurrentInput()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
            code = int(_fuzz(name, seconds, seed, current))
        except KeyboardInterrupt:
            pass
        except BaseException:  # noqa: BLE001 -- the child has to end here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    number, since = current.number, time.monotonic()
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(0.05)
        if current.number != number:
            number, since = current.number, time.monotonic()
        elif time.monotonic() > since + _HANG_SECONDS:
            os.kill(pid, signal.SIGKILL)
    if os.WIFSIGNALED(ended[1]):
        died = signal.Signals(os.WTERMSIG(ended[1])).name
        _store(name, current.get(), f"the process was ended by {died}")
    return ended[1] != 0


def _fuzz(name: str, seconds: float, seed: int, current: CurrentInput) -> bool:
    from tests.fuzz.targets import TARGETS, examples, meaning

    target, random = TARGETS[name], Random(f"{seed} {name}")
    pool = examples(name)
    begin = list(pool)
    seen: set[str] = set()
    faults: dict[str, bytes] = {}
    count, slowest, slow = 0, 0.0, b""
    signal.signal(signal.SIGPROF, _raise_slow)
    start = time.process_time()
    while time.process_time() < start + seconds and len(faults) < _MOST_FAULTS:
        data = begin.pop() if begin else mutate(random, pool)
        current.set(data)
        fault, found, took = _try(target, data, meaning)
        count += 1
        if fault and fault not in faults:
            faults[fault] = _smaller(target, data, fault, meaning)
            _store(name, faults[fault], fault)
        elif not fault and found not in seen:
            seen.add(found)
            pool += [data] if len(data) <= _LONGEST_EXAMPLE else []
        if took > slowest:
            slowest, slow = took, data
    rate = count / max(0.001, time.process_time() - start)
    told = f"{name:18} {count:8} inputs {rate:8.0f}/s {len(seen):5} meanings"
    print(f"{told}  slowest {slowest * 1000:6.0f} ms for {len(slow)} bytes  {len(faults)} faults")
    return bool(faults)


def _raise_slow(*_: object) -> None:
    raise TooSlow


def _try(target: Any, data: bytes, meaning: Any) -> tuple[str, str, float]:
    """Returns the fault or '', the meaning, and the seconds."""
    began = time.process_time()
    found = fault = ""
    try:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        found = meaning(target, data)
    except TooSlow:
        fault = f"more than {MOST_SECONDS} s"
    except Exception as error:  # noqa: BLE001 -- this is what is looked for
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{type(error).__name__} at {os.path.relpath(frame.filename, ROOT)}:{frame.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return fault, found, time.process_time() - began


def _smaller(target: Any, data: bytes, fault: str, meaning: Any) -> bytes:
    """The input without the parts that the fault does not need, as far as that is found soon."""
    last = time.process_time() + _MINIMISE_SECONDS
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data) and time.process_time() < last:
            shorter = data[:at] + data[at + size :]
            if _try(target, shorter, meaning)[0] == fault:
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _store(name: str, data: bytes, fault: str) -> None:
    file = ROOT / "tests/fuzz/inputs" / name / hashlib.sha256(data).hexdigest()[:12]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    shown = file.relative_to(ROOT)
    print(
        f"{name}: {fault}: {len(data)} bytes in {shown}\n    again: scripts/fuzz {name} {shown}", flush=True
    )


# --- atheris ------------------------------------------------------------------------------------------------


def _guided(name: str, seconds: float) -> bool:
    """Fuzz a target with atheris. Returns whether there was a fault."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.fuzz", name, "--seconds", str(seconds), "--atheris", folder]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        told = [line for line in done.stdout.splitlines() if line.startswith("Done ")]
        print(f"{name:18} {''.join(told)}", flush=True)
        found = [file for file in Path(folder).iterdir() if file.is_file()]
        for file in found:
            _store(name, file.read_bytes(), file.name.partition("-")[0])
        if done.returncode and not found:
            print(done.stdout)
        return bool(done.returncode)


def _run_atheris(name: str, seconds: float, folder: str) -> int:
    import atheris

    with atheris.instrument_imports(include=["runner", "sandbox"]):
        from tests.fuzz.targets import TARGETS, examples, meaning
    corpus = Path(folder) / "corpus"
    corpus.mkdir()
    for number, data in enumerate(examples(name)):
        (corpus / str(number)).write_bytes(data)
    limits = (
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={MOST_BYTES}",
        f"-timeout={round(MOST_SECONDS * 10)}",
    )
    words = [sys.argv[0], str(corpus), f"-artifact_prefix={folder}/", "-rss_limit_mb=4096", *limits]
    atheris.Setup(words, lambda data: meaning(TARGETS[name], data) and None)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

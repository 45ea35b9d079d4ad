"""A process that writes to a ledger and is killed at a chosen statement. Started by test_crash.py.

It reads one JSON line for each run, and answers with one: everything that the run said before it ended. Each
run is a fork of this process, which has one thread.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import sys
from typing import Any

from runner.ledger.file import Attempt, LedgerFile, LedgerUnusable, open_file
from runner.ledger.rows import Delivery, Effect, EndOfCall, LedgerRefusal, Verdict, digest, row_of
from runner.protocol.calls import CallRequest

_connect = sqlite3.connect
VERDICTS: tuple[Verdict, ...] = ("acked", "retry", "dead")


def _run(order: dict[str, Any], said: int) -> None:
    def say(*words: Any) -> None:
        os.write(said, json.dumps(words).encode() + b"\n")

    left = [order["crash_at"]]

    def count(statement: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(*args: Any, **settings: Any) -> sqlite3.Connection:
        made = _connect(*args, **settings)
        made.set_trace_callback(count)
        return made

    sqlite3.connect = connect  # type: ignore[assignment]  # also the statements of opening and recovery count
    clock = [order["now"]]
    file = open_file(order["path"], clock=lambda: clock[0], chance=lambda: 0.0)
    if "file_size" in order:  # a disk without room: every write beyond this fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_size"], order["file_size"]))
    open_calls: dict[str, float | None] = {}  # and when they were asked
    attempts: list[Attempt] = []
    for number, (act, argument) in enumerate(order["acts"]):
        clock[0] += 7.0
        name = f"{order['run']}-{number}"
        try:
            _act(file, act, argument, name, open_calls, attempts, say)
        except LedgerRefusal as refusal:
            say("refused", type(refusal).__name__)
        except LedgerUnusable as unusable:
            say("unusable", str(unusable))
    say("finished")
    os.kill(os.getpid(), signal.SIGKILL)


def _act(
    file: LedgerFile,
    act: str,
    argument: int,
    name: str,
    open_calls: dict[str, float | None],
    attempts: list[Attempt],
    say: Any,
) -> None:
    if act == "accept":
        key = None if argument == 0 else f"key-{argument}"
        effect: Effect = "read_only" if argument % 2 else "unknown"
        request = CallRequest("demo", "tool", argument, "tool", caller="uid:1", key=key)
        call = row_of(name, request, digest(argument), effect)
        accepted = file.do(LedgerFile.accept, call)
        say("accepted" if accepted.fresh else "known", accepted.row.id)
        if accepted.fresh:
            open_calls[accepted.row.id] = None
    elif act == "ask" and None in open_calls.values():
        call_id = next(call for call, asked in open_calls.items() if asked is None)
        say("asking", call_id)
        file.do(LedgerFile.ask, call_id, file.clock())
        say("ran", call_id)
        open_calls[call_id] = file.clock()
    elif act == "end" and open_calls:
        call_id = [*open_calls][argument % len(open_calls)]
        asked = open_calls.pop(call_id)
        say("ending", call_id)
        code = "launch_failed" if asked is None else "ok"
        file.do(LedgerFile.end, call_id, EndOfCall(code, digest("x"), started=asked))
        say("ended", call_id, code)
    elif act == "enqueue":
        delivery = Delivery(f"delivery-{argument}", "demo", "hook", '{"type":"run.completed"}')
        file.do(LedgerFile.enqueue, delivery)
        say("queued", delivery.id)
    elif act == "claim":
        names = iter(f"{name}-{each}" for each in range(1000))
        claimed = file.do(LedgerFile.claim, 1 + argument, lambda: next(names))
        for attempt in claimed:
            say("attempt", attempt.delivery.id, attempt.number, attempt.invocation)
        attempts.extend(claimed)
    elif act == "settle" and attempts:
        attempt = attempts.pop(0)
        verdict = VERDICTS[argument % 3]
        say("settling", attempt.delivery.id, attempt.number)
        state = file.do(LedgerFile.settle, attempt, verdict, EndOfCall("ok", started=file.clock()))
        say("settled", attempt.delivery.id, attempt.number, state)
    elif act == "repeat":
        row = file.do(LedgerFile.repeat, f"delivery-{argument}")
        say("repeated", row.id)


def main() -> None:
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                _run(json.loads(line), write)
            except BaseException as error:  # noqa: BLE001 -- the test reads it
                os.write(write, json.dumps(["bug", repr(error)]).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            lines = [json.loads(each) for each in said]
        os.waitpid(child, 0)
        sys.stdout.write(json.dumps(lines) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Many calls over sessions that are already open, and how long they took."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from runner.cli.live.output import Output
from runner.cli.live.session import (
    SessionRequest,
    cancelled_by_signals,
    interrupted,
    run_on_trio,
    unwritten_result,
)
from runner.contracts.registry import find_contract
from runner.exceptions import PluginError, PluginFailure
from runner.outcome import EXIT
from runner.protocol.dialect import Notice
from runner.session.pool import Pool, open_pool
from runner.session.prepared import PreparedCall, prepare_call
from runner.session.session import Session

# A launch or a call that fails for one of these fails the same way every time.
_PERMANENT = (
    *("manifest_invalid", "policy_invalid", "policy_denied", "sandbox_unavailable"),
    *("invalid_call", "tool_not_exposed"),
)
# This one may not: a rollout leaves one call out and includes the next. So it ends the calls after this many
# in a row.
_PASSING = "binding.inactive"
_MOST_PASSING = 1000


def call_many(
    request: SessionRequest, output: Output, repeat: int, concurrency: int, *, prepares: bool = False
) -> int:
    """`prepares`: the contract prepares each call anew."""
    tally = CallTally(repeat)
    work = _many_prepared if prepares else _many
    wall, numbers = run_on_trio(work, request, output, tally, min(repeat, concurrency))
    output.result(tally.summary(wall))
    if tally.first is not None:
        output.failure(tally.first)
        return EXIT[tally.first.outcome.code]
    if tally.done < repeat:
        cancelled = interrupted(numbers[0] if numbers else signal.SIGTERM)
        output.failure(cancelled)
        return EXIT["cancelled"]
    if output.unwritten is not None:
        failed = unwritten_result(output.unwritten)
        if not isinstance(output.unwritten, BrokenPipeError):
            output.failure(failed)
        return EXIT[failed.outcome.code]
    return 0


class CallTally:
    def __init__(self, wanted: int) -> None:
        self.wanted = self.left = wanted
        self.done = 0
        self.seconds: list[float] = []
        self.codes: Counter[str] = Counter()
        self.first: PluginError | PluginFailure | None = None
        self._passing = 0  # refusals in a row that need not be final

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def count(
        self, seconds: float | None, error: PluginError | PluginFailure | None = None, code: str = "ok"
    ) -> None:
        self.done += 1
        self.codes[code if error is None else error.outcome.code] += 1
        self.first = self.first or error
        if seconds is not None:
            self.seconds.append(seconds)

        passing = isinstance(error, PluginError) and error.code == _PASSING
        self._passing = self._passing + 1 if passing else 0
        if error is not None and error.outcome.code in _PERMANENT and self._passing in (0, _MOST_PASSING):
            self.left = 0

    def summary(self, wall: float) -> dict[str, Any]:
        ordered = sorted(self.seconds)

        def at(part: float) -> float | None:
            return (
                round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) if ordered else None
            )

        latency = {f"p{int(part * 100)}": at(part) for part in (0.5, 0.9, 0.99)}
        return {
            "calls": self.done,
            "outcomes": dict(self.codes),
            "seconds": round(wall, 3),
            "per_second": round(self.done / wall, 1) if wall else None,
            "latency_ms": {"min": at(0.0), **latency, "max": at(1.0)},
        }


async def _many_prepared(
    request: SessionRequest, output: Output, tally: CallTally, concurrency: int
) -> tuple[float, list[int]]:
    """The same for calls that are prepared one by one. A call's time is from its acceptance to its answer."""
    living: list[Session] = []

    def opened(
        prepared: PreparedCall, made: Callable[[Session], None]
    ) -> AbstractAsyncContextManager[Session]:
        def both(session: Session) -> None:
            living.append(session)
            made(session)

        return request.prepared_session(prepared, both)

    async def worker(pool: Pool) -> None:
        while tally.take():
            began = trio.current_time()
            try:
                prepared = await prepare_call(
                    request.invocation,
                    request.call,
                    seconds=request.seconds,
                    secrets=request.secrets,
                    config=request.config,
                )
                await pool.call(prepared)
            except PluginError as error:
                tally.count(trio.current_time() - began, error)
            except PluginFailure as failure:
                tally.count(None, failure)
            else:
                tally.count(trio.current_time() - began)
            living[:] = [session for session in living if session.report is None]
            output.progress({"progress": tally.done, "total": tally.wanted})

    def on_signal(first: bool) -> None:
        if not first:
            for session in living:
                session.kill()

    began = trio.current_time()
    what = f"{request.call.name} × {tally.wanted}"
    async with (
        cancelled_by_signals(on_signal) as numbers,
        output.showing(what),
        open_pool(opened) as pool,
        trio.open_nursery() as workers,
    ):
        for _ in range(concurrency):
            workers.start_soon(worker, pool)
    return trio.current_time() - began, numbers


async def _many(
    request: SessionRequest, output: Output, tally: CallTally, concurrency: int
) -> tuple[float, list[int]]:
    """Seconds since all sessions were open, and the signals that came meanwhile."""
    clock: list[float] = []
    living: list[Session] = []
    ready = Counter[str]()
    go = trio.Event()

    async def worker() -> None:
        arrived = False
        try:
            while tally.left > 0:
                try:
                    async with request.session(living.append) as session:
                        if not arrived:
                            arrived = True
                            await _wait_for_all()
                        while tally.take():
                            if not await _one(session):
                                break  # a new session for the next
                            if session.is_one_shot:
                                break
                except PluginFailure as failure:
                    if tally.take():
                        tally.count(None, failure)
                finally:
                    living[:] = [session for session in living if session.report is None]
        finally:
            if not arrived:
                ready["failed"] += 1
                _start_if_all()

    async def _wait_for_all() -> None:
        ready["open"] += 1
        _start_if_all()
        await go.wait()

    def _start_if_all() -> None:
        if ready.total() >= concurrency and not clock:
            clock.append(trio.current_time())
            go.set()

    async def _one(session: Session) -> bool:
        """Whether the session can be used again."""
        began = trio.current_time()
        try:
            await session.call(request.call, seconds=request.seconds)
            if session.is_one_shot:
                await session.conclude()
        except PluginError as error:
            error.stderr = session.stderr
            tally.count(trio.current_time() - began, error)
        except PluginFailure as error:
            error.stderr = session.stderr
            tally.count(None, error)
            return not session.is_over
        else:
            if session.substituted and "hook_failed" not in tally.codes:  # only the first is printed
                told = {"hook": request.call.name, "why": session.substituted}
                if find_contract(session.terms.plugin.contract).policy_answers_hooks:
                    told["on_failure"] = session.terms.on_hook_failure
                output.event(Notice("hook_failed", told))
            tally.count(trio.current_time() - began, code="hook_failed" if session.substituted else "ok")
        output.progress({"progress": tally.done, "total": tally.wanted})
        return not session.is_over  # a hook's answer may be the policy's, for a plugin that died of it

    def on_signal(first: bool) -> None:
        if not first:
            for session in living:
                session.kill()

    what = f"{request.call.name} × {tally.wanted}"
    async with (
        cancelled_by_signals(on_signal) as numbers,
        output.showing(what),
        trio.open_nursery() as workers,
    ):
        for _ in range(concurrency):
            workers.start_soon(worker)
    now = trio.current_time()
    return now - (clock[0] if clock else now), numbers

"""A worker of a fleet: takes calls for the plugins it offers, no more than it has slots for. On asyncio.

Every durable call has an entry in the ledger before it begins. A call that comes again is answered from its
entry, runs again if its effect class allows that, or ends with an unknown outcome (`_begin`). Only who knows
an entry's last revision can end it, so that a worker that was taken for dead cannot end a call again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from itertools import count
from typing import Any, Literal, NamedTuple

import nats.errors
import nats.js.errors
import trio
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from runner.fleet import names
from runner.fleet.clock import FleetClock, Now
from runner.fleet.connection import Connected, NoFleet, server_words, tells_full_disk
from runner.fleet.crossing import AsyncioThread, CancelledOnTrio, end_tasks
from runner.fleet.entries import FleetLedger, Held, LedgerEntry, LedgerFull, is_disk_full
from runner.fleet.messages import BadMessage, FleetCall, decode_call
from runner.fleet.shares import DEAD, LEDGER, FleetShares, SharedRoom
from runner.fleet.streams import NO_STREAM_CODE, NO_STREAMS, consumer_config, read_bucket, require_streams
from runner.fleet.worker_plugins import Hold, Offer, Performed, WorkerPlugins, repeat_of, unperformed
from runner.ledger.retry import Schedule, next_try
from runner.ledger.rows import digest
from runner.lifecycle.exceptions import Unavailable, UnknownPlugin
from runner.outcome import Outcome
from runner.serve.alerts import Alerts
from runner.serve.desk import CallAnswer, failed
from runner.serve.refusal import STATUS, outcome_error

_BEGIN_SECONDS = 60.0  # for servers that do not answer yet
_POLL_SECONDS = 1.0  # between looks for calls that nobody announced
_FLAG_SECONDS = 10.0  # between readings of the flags; a change is told at once
_PULL_SECONDS = 5.0
_SHARE_BEATS = 12  # between readings of all shares; a change is told at once
_MOST_FETCHED = 32  # at once
_MOST_CANCELLED = 1000  # calls of a user that are not here, and must not begin when they come
_MOST_USERS = 1000
_MOST_COPY = 32  # characters
_MOST_REASON = 1000  # characters
_MOST_HELD_BYTES = 128 << 10  # of all reasons why plugins do not run, in what a worker shows
_MOST_KEPT_BYTES = 768 << 10  # of an input, in a dead letter: NATS takes messages of 1 MiB
_MOST_PROGRESS = 1000  # of a call
_MOST_PROGRESS_BYTES = 64 << 10
_LAUNCH_FAILURES = 3
_TRIAL_SECONDS = 60.0  # between trials of a node that is bad
_ELSEWHERE_SECONDS = 2.0
_ASK_SECONDS = 2.0
_NODE = ("launch_failed", "sandbox_unavailable")
_TRIAL_BYTES = 4096  # a block of most disks
_DISK_FULL = "the disk of a NATS server ({}) is full, so that no durable call is stored or begins"
_FULL = "the ledger of the fleet is nearly full, so that no durable call begins"

WorkerState = Literal["ready", "drained", "draining", "bad"]
_CANCELLED = Outcome("cancelled", "call", "the call was cancelled", "deleted")
_DRAINED = Outcome("cancelled", "call", "the worker ends", "draining")
_LATE = Outcome("timeout", "call", "the deadline had passed before a worker began the call", "deadline")


class WorkerOptions(NamedTuple):
    name: str
    slots: int = 4
    version: str = ""
    schedule: Schedule = Schedule(names.MOST_ATTEMPTS, first_seconds=10.0)
    trial: Callable[[], Awaitable[str]] | None = None  # on trio: what is wrong with this machine, or ''
    now: Now = time.time  # this machine's clock


class _Running:
    """A call that this worker has."""

    def __init__(self, message: Msg | None = None, reply: str = "") -> None:
        self.message = message  # of the stream; the newest, if it came again
        self.reply = reply  # where somebody waits
        self.inner: asyncio.Task[Performed] | None = None
        self.ended_by: Outcome | None = None  # why it was cancelled
        self.asked = False  # the plugin
        self.reported = 0  # pieces of progress

    def cancel(self, why: Outcome) -> None:
        self.ended_by = self.ended_by or why
        if self.inner is not None:
            self.inner.cancel()


class _Submission(NamedTuple):
    """Which message a durable call came with, and which submission that is a copy of."""

    free_since: int | None
    freed_by: str

    def is_after(self, entry: LedgerEntry) -> bool:
        """Whether the call was submitted once more, after it had ended without asking the plugin. Another
        copy of what has ended does not count: its submitter was told that nothing ran."""
        if entry.free_since is None or self.free_since is None:
            return False
        return self.free_since > entry.free_since and self.freed_by not in ("", entry.freed_by)


class _Pull:
    def __init__(self, number: int, digest: str, places: int) -> None:
        self.number, self.digest, self.places = number, digest, places
        self.got = 0
        self.ended = asyncio.Event()


class FleetWorker:
    def __init__(
        self,
        bus: Connected,
        thread: AsyncioThread,
        own_plugins: WorkerPlugins,
        options: WorkerOptions,
        say: Callable[[str], None],
    ) -> None:
        self._nc, self._js, self._address = bus
        self._thread, self._own_plugins, self._options, self._say = thread, own_plugins, options, say
        self._alerts = Alerts(say, time.monotonic)
        self._ledger = FleetLedger(self._js)
        self._shares = FleetShares(self._js)
        self._told_full: set[tuple[str, str]] = set()  # users and rooms, since the shares were read
        self._state: WorkerState = "ready"
        self._reason = ""
        self.remark = ""  # what else people should know, while nothing is wrong with the worker itself
        self._clock = FleetClock(options.now)
        self._since = self._clock.now()
        self._running: dict[tuple[str, str], _Running] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()  # by user
        self._flags: Mapping[str, str] = {}
        self._offers: dict[str, Offer] = {}  # by digest
        self._told_holds: Mapping[str, Hold] = {}  # by digest
        self._subscriptions: dict[str, list[Subscription]] = {}  # by digest
        self._calling: set[Subscription] = set()  # to calls, until they are drained
        self._pull: _Pull | None = None  # one at a time
        self._numbers = count()
        self._inbox = f"{self._nc.new_inbox()}.pull"
        self._changed = asyncio.Event()  # what is offered, or how many places are free
        self._due = asyncio.Event()  # there may be durable calls
        self._flagged = asyncio.Event()
        self._doubted = asyncio.Event()  # the clock, before it is compared as usual
        self._consumers: set[str] = set()
        self._has_room = True  # in the ledger
        self._disk_fault = ""
        self._leader = server_words(bus.nc)  # the server that has the ledger
        self._unlisted = ""  # why no submitter can see this worker
        self._letters: int | None = None  # dead ones, of the whole fleet; None: it was not told yet
        self._launch_failures = 0
        self._counts = {"done": 0, "late": 0}  # late: it was taken for dead, and its end came after another

    # --- its life -------------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        """Work until this task is cancelled. Raises NoFleet if the streams are missing."""
        buckets = (f"KV_{names.FLAGS}", f"KV_{names.SHARES}")
        await require_streams(self._js, *buckets, seconds=_BEGIN_SECONDS)
        if await self._ask(self._options.name, "-", "-") is not None:
            raise NoFleet(f"a worker of the name {self._options.name} is in the fleet; use another --name")
        await self._nc.subscribe(f"{self._inbox}.*", cb=self._on_pulled)
        await self._nc.subscribe("runner.cancel.*.*", cb=self._on_cancel)
        await self._nc.subscribe(names.ask(self._options.name, "*", "*"), cb=self._on_ask)
        for what in names.OPERATED:
            await self._nc.subscribe(names.operate(what, self._options.name, "*"), cb=self._on_operator)
        await self._nc.subscribe(names.entry(names.FLAGS, ">"), cb=self._on_flag)
        await self._nc.subscribe(names.entry(names.SHARES, "*"), cb=self._shares.on_change)
        await self._read_flags()
        await self._shares.read()
        await self._measure_rooms()
        await self._require_clock()  # before it offers anything
        self.refresh()
        await self._subscribe()
        await self._show()
        await self._audit("began", {"slots": self._options.slots})
        ready()
        loops = (
            self._keep_subscribed(),
            self._fetch_all(),
            self._beat(),
            self._follow_clock(),
            self._follow_ledger(),
            self._follow_flags(),
            self._try_node(),
        )
        tasks = [asyncio.ensure_future(each) for each in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            await end_tasks(*tasks)

    def refresh(self) -> None:
        """What may run here may have changed."""
        self._offers = {each.digest: each for each in self._own_plugins.offers()}
        self._changed.set()
        self._due.set()

    async def drain(self, seconds: float) -> None:
        """Take no more calls, and wait for those that run. What still runs then is cancelled."""
        self._state, self._reason = "draining", "it was told to end"
        self._changed.set()
        await self._show()
        try:
            async with asyncio.timeout(seconds):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            pass
        for running in list(self._running.values()):
            running.cancel(_DRAINED)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=names.LOST_SECONDS)
        await self._shares.tell()
        await self._audit("ended", {})
        await self._forget()

    @property
    def _free(self) -> int:
        """Places that no call has. Those that a pull may fill count as free: who waits goes first, and what
        the pull brings then is given back."""
        return self._options.slots - len(self._running)

    @property
    def _takes(self) -> bool:
        if self._clock.was_set:
            self._doubted.set()
        return self._state == "ready" and self._clock.is_right

    @property
    def _stores(self) -> bool:
        """Whether durable calls may begin."""
        return self._takes and self._has_room and not self._disk_fault

    def _start(self, work: Coroutine[Any, Any, None], key: tuple[str, str]) -> None:
        async def whole() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 -- our bug, of this call only: it comes again
                self._say(f"internal: the call {'.'.join(key)}: {type(error).__name__}: {error}")
            finally:
                self._running.pop(key, None)
                self._changed.set()
                self._due.set()

        task = asyncio.get_running_loop().create_task(whole())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._changed.set()  # it may be full now

    # --- what it shows and is told --------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(names.BEAT_SECONDS)
            for running in list(self._running.values()):
                if running.message is not None:
                    await _quietly(running.message.in_progress())
                elif running.reply:
                    await self._say_that_it_runs(running.reply)

    async def _follow_ledger(self) -> None:
        """Not in `_beat`: signs of life do not wait for an answer."""
        for number in count(1):
            self._alerts.flush()
            await self._shares.tell()
            if number % _SHARE_BEATS == 1 or self._disk_fault:
                await self._try_disk()
            if number % _SHARE_BEATS == 0:
                await self._shares.read()  # of what was changed, something may not have been heard
                self._told_full.clear()
            await self._measure_rooms()
            await asyncio.sleep(names.BEAT_SECONDS)

    async def _measure_rooms(self) -> None:
        """If they cannot be measured, what is known counts."""
        try:
            letters = await self._js.stream_info(names.DEAD)
            info = await self._js.stream_info(f"KV_{names.LEDGER}")
        except (nats.errors.Error, TimeoutError):
            return
        if info.cluster is not None and info.cluster.leader:
            self._leader = info.cluster.leader
        self._letters = letters.state.messages
        had, most = self._has_room, info.config.max_bytes or 0
        self._shares.measured(LEDGER, most)
        self._shares.measured(DEAD, letters.config.max_bytes or 0)
        self._has_room = most <= 0 or info.state.bytes <= most * names.MOST_FILLED
        if had and not self._has_room:
            self._say(f"{_FULL}; runner ps --fleet shows how full it is")
        elif self._has_room and not had:
            self._due.set()

    async def _try_disk(self) -> None:
        """Write a little to it. Nobody else may notice: a submission that is refused does not come here."""
        if not tells_full_disk(self._nc):
            return
        fault, subject = "", names.entry(names.LEDGER, f"{names.TRIAL}.{self._options.name}")
        try:
            await self._js.publish(subject, bytes(_TRIAL_BYTES))
        except (nats.errors.Error, TimeoutError) as error:
            if not is_disk_full(error):
                return
            fault = _DISK_FULL.format(self._leader)
        had, self._disk_fault = self._disk_fault, fault
        if bool(had) != bool(fault):
            self._say(f"{fault}; make room there" if fault else "the disk of the NATS server has room again")
            self._due.set()
            await self._show()

    def _held(self) -> dict[str, tuple[str, str]]:
        """Of the plugins here that do not run: by whom or how they are held, and why. By digest."""
        found: dict[str, tuple[str, str]] = dict(self._own_plugins.holds())
        for name, why in self._flags.items():
            if name.startswith("quarantine."):
                found[name.partition(".")[2]] = "operator", why or "quarantined"
        return found

    def presence(self) -> dict[str, Any]:
        held, left, plugins = self._held(), _MOST_HELD_BYTES, []
        for each in self._offers.values():
            row: dict[str, Any] = {
                key: getattr(each, key) for key in ("name", "digest", "contract", "version")
            }
            if each.durable:
                row["durable"] = each.durable
            if each.digest in held:
                kind, why = held[each.digest]
                left -= len(json.dumps(why))
                row |= {"hold": kind, "held": why if left > 0 else kind}
            plugins.append(row)
        return {
            "worker": self._options.name,
            "version": self._options.version,
            "state": "bad" if self._state == "ready" and self._clock.fault else self._state,
            "reason": self._reason
            or self._clock.fault
            or self._disk_fault
            or ("" if self._has_room else _FULL)
            or self.remark,
            "slots": self._options.slots,
            "running": len(self._running),
            "since": self._since,
            "at": self._clock.now(),
            "done": self._counts["done"],
            "late": self._counts["late"],
            **({} if self._letters is None else {"dead": self._letters}),
            "plugins": plugins,
        }

    async def _show(self) -> int | None:
        """Returns the number of the message, or None if no server says that it has it."""
        raw = json.dumps(self.presence()).encode()
        try:
            return (await self._js.publish(names.entry(names.WORKERS, self._options.name), raw)).seq
        except (nats.errors.Error, TimeoutError):
            return None

    async def _forget(self) -> None:
        """It is not listed any more."""
        subject = names.entry(names.WORKERS, self._options.name)
        await _quietly(self._js.publish(subject, b"", headers={"KV-Operation": "DEL"}))

    async def _audit(self, what: str, detail: Mapping[str, Any]) -> None:
        row = {"at": self._clock.now(), "worker": self._options.name, "what": what, **detail}
        await _quietly(self._js.publish(names.audit(self._options.name), json.dumps(row).encode()))

    async def _on_flag(self, message: Msg) -> None:
        self._flagged.set()

    async def _follow_flags(self) -> None:
        while True:
            self._flagged.clear()
            try:
                async with asyncio.timeout(_FLAG_SECONDS):
                    await self._flagged.wait()
            except TimeoutError:
                pass
            await self._read_flags()

    async def _read_flags(self) -> None:
        """Flags only take away. If they cannot be read, those that are known count."""
        try:
            found = await read_bucket(self._js, names.FLAGS)
        except (nats.errors.Error, TimeoutError):
            return
        flags = {key: raw[:500].decode("utf-8", "replace") for key, raw in found.items()}
        if flags == self._flags:
            return
        self._flags = flags
        drained = f"drain.{self._options.name}" in flags
        if drained and self._state == "ready":
            self._state, self._reason = "drained", flags[f"drain.{self._options.name}"] or "by an operator"
        elif not drained and self._state == "drained":
            self._state, self._reason = "ready", ""
        await self._audit("flags", {"flags": sorted(flags)})
        self._changed.set()
        self._due.set()
        await self._show()

    def _served(self) -> dict[str, Offer]:
        """The plugins whose calls it takes now, by digest."""
        if not self._takes:
            return {}
        held = self._held()
        return {each: offer for each, offer in self._offers.items() if each not in held}

    async def _on_operator(self, message: Msg) -> None:
        """An operator asks about a plugin: the servers' permissions let nobody else. It is answered within
        the account of the workers only, whatever a configuration lets other accounts ask."""
        _, what, _, mark = message.subject.split(".")
        if not message.reply.startswith("_INBOX."):
            return
        offer = self._offers.get(mark)
        try:
            if offer is None:
                raise UnknownPlugin(mark)
            if what == "logs":
                told = {"text": await self._thread.on_trio(self._own_plugins.logs, offer)}
            else:
                state = await self._thread.on_trio(self._own_plugins.reset, offer)
                if (why := self._flags.get(f"quarantine.{mark}")) is not None:
                    state = f"{state}, and held by an operator until runner ctl release: {why}"
                told = {"state": state}
                await self._audit("reset", {"plugin": offer.name, "digest": mark})
                self.refresh()
        except (UnknownPlugin, CancelledOnTrio) as gone:
            told = {"error": str(gone) or "the worker ends"}
        await _quietly(self._nc.publish(message.reply, json.dumps(told).encode()))

    # --- its clock ------------------------------------------------------------------------------------------

    async def _require_clock(self) -> None:
        """Raises NoFleet if it cannot be compared with the servers'."""
        last = time.monotonic() + _BEGIN_SECONDS
        while not await self._compare_clock():
            if self._unlisted:
                raise NoFleet(self._unlisted)
            if time.monotonic() > last:
                hint = "has this user the permissions of this version (policies/nats/fleet.conf)?"
                raise NoFleet(f"the servers do not tell when they stored that this worker is here; {hint}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _follow_clock(self) -> None:
        """Say every few seconds that this worker is here. The clock is compared by that message."""
        while True:
            try:
                async with asyncio.timeout(names.BEAT_SECONDS):
                    await self._doubted.wait()
            except TimeoutError:
                pass
            self._doubted.clear()
            had = self._unlisted
            await self._compare_clock()
            if bool(had) != bool(self._unlisted):
                here = "the servers have the list of workers again, with this one"
                self._say(f"{self._unlisted}; until then nobody sees this worker" if not had else here)

    async def _compare_clock(self) -> bool:
        """Returns whether that was possible. If it was not, what is known counts."""
        sent, subject = time.monotonic(), names.entry(names.WORKERS, self._options.name)
        if (number := await self._show()) is None:
            await self._look_for_list()
            return False
        self._unlisted = ""
        try:
            # From the leader: another server might still have the one before. A later one is also ours.
            found = await self._js.get_msg(f"KV_{names.WORKERS}", subject=subject)
        except (nats.errors.Error, TimeoutError):
            return False
        if found.time is None or (found.seq or 0) < number:
            return False
        had, doubted = self._clock.fault, self._clock.was_set
        self._clock.compare(found.time.timestamp(), sent)
        fault = self._clock.fault
        if bool(had) != bool(fault):
            self._say(
                f"{fault}; set it (NTP)"
                if fault
                else "the clock of its machine is right: it takes calls again"
            )
            await self._audit("bad" if fault else "good", {"reason": fault})
            await self._show()
        if doubted or bool(had) != bool(fault):
            self._changed.set()
            self._due.set()
        return True

    async def _look_for_list(self) -> None:
        """The list of workers is in memory, so that it is gone when the only server was started again."""
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                await self._js.get_msg(f"KV_{names.WORKERS}", seq=1)
        except nats.js.errors.NotFoundError as error:
            if error.err_code == NO_STREAM_CODE:
                self._unlisted = NO_STREAMS.format(f"KV_{names.WORKERS}")
        except (nats.errors.Error, TimeoutError):
            pass

    # --- a bad node -----------------------------------------------------------------------------------------

    def _judge_node(self, outcome: Outcome) -> None:
        if outcome.code in _NODE and outcome.phase != "manifest":
            self._launch_failures += 1
        elif outcome.code not in ("overloaded", "quarantined", "cancelled", "policy_denied", "invalid_call"):
            self._launch_failures = 0

    async def _try_node(self) -> None:
        """Launches that fail may be one plugin's fault. A trial says whether it is this machine's."""
        while self._options.trial is not None:
            await asyncio.sleep(_POLL_SECONDS if self._state != "bad" else _TRIAL_SECONDS)
            if self._launch_failures < _LAUNCH_FAILURES and self._state != "bad":
                continue
            fault = await self._thread.on_trio(self._options.trial)
            self._launch_failures = 0
            if fault and self._state == "ready":
                self._state, self._reason = "bad", fault
            elif not fault and self._state == "bad":
                self._state, self._reason = "ready", ""
            else:
                continue
            self._say(f"this node {'leaves the fleet: ' + fault if fault else 'is back in the fleet'}")
            await self._audit("bad" if fault else "good", {"reason": fault})
            self._changed.set()
            await self._show()

    # --- calls that somebody waits for ----------------------------------------------------------------------

    async def _keep_subscribed(self) -> None:
        """One task, so that subscriptions do not overtake each other."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._tell_holds()
            try:
                await self._subscribe()
            except (nats.errors.Error, TimeoutError):
                await asyncio.sleep(_POLL_SECONDS)
                self._changed.set()

    async def _tell_holds(self) -> None:
        """Before it unsubscribes: who finds nobody then looks why."""
        before, now = self._told_holds, self._own_plugins.holds()
        if before == now:
            return
        self._told_holds = now
        await self._show()
        for mark in (each for each in now if before.get(each) != now[each]):
            name = self._offers[mark].name if mark in self._offers else ""
            if now[mark].kind == "quarantined":
                self._alerts.tell(
                    "quarantine",
                    f"{name or mark} is quarantined: {now[mark].reason}; {names.QUARANTINE_HINT}",
                )
            await self._audit("held", {"plugin": name, "digest": mark, **now[mark]._asdict()})

    async def _subscribe(self) -> None:
        wanted = self._served() if self._free > 0 else {}
        for each in [known for known in self._subscriptions if known not in wanted]:
            for subscription in self._subscriptions.pop(each):
                # What is on its way arrives, and is answered. A task of its own, because it does not let
                # itself be cancelled.
                draining = asyncio.ensure_future(subscription.drain())  # type: ignore[no-untyped-call]
                try:
                    await asyncio.shield(draining)
                except (nats.errors.Error, TimeoutError):
                    # The client would subscribe to it again with its next connection.
                    self._nc._remove_sub(subscription._id)
                self._calling.discard(subscription)
        for each in [one for one in wanted if one not in self._subscriptions]:
            self._subscriptions[each] = [
                await self._nc.subscribe(names.waited("*", each), names.GROUP, cb=self._on_call),
                await self._nc.subscribe(names.hint(each), names.GROUP, cb=self._on_hint),
            ]
            self._calling.add(self._subscriptions[each][0])

    async def _on_hint(self, message: Msg) -> None:
        self._due.set()

    async def _on_ask(self, message: Msg) -> None:
        user, key = message.subject.split(".")[-2:]
        if _has_inbox(message):
            # The call itself may have come before the question, and wait to be looked at.
            while any(each.pending_msgs for each in self._calling):  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0)
            known = b"running" if (user, key) in self._running else b"unknown"
            await _quietly(self._nc.publish(message.reply, known))

    async def _on_cancel(self, message: Msg) -> None:
        user, key = message.subject.split(".")[-2:]
        if message.data:  # only this copy of a waited call, which is not here
            key = _copy(key, message.data.decode("ascii", "replace"))
        if (found := self._running.get((user, key))) is not None:
            found.cancel(_CANCELLED)
        else:
            # Of each user's own, so that nobody pushes out what another has cancelled.
            keys = self._cancelled.setdefault(user, OrderedDict())
            keys[key] = None
            if len(keys) > _MOST_CANCELLED:
                keys.popitem(last=False)
            if len(self._cancelled) > _MOST_USERS:
                self._cancelled.popitem(last=False)

    async def _on_call(self, message: Msg) -> None:
        user, hexadecimal = message.subject.split(".")[-2:]
        if not _has_inbox(message):
            return  # nobody waits for it
        offer = self._served().get(hexadecimal)
        try:
            call = decode_call(message.data, self._clock.now())
        except BadMessage as bad:
            outcome = Outcome("invalid_call", "call", str(bad))
            await self._answer(message, failed(outcome))
            return
        place = user, call.key
        if self._was_cancelled(user, _copy(call.key, (message.headers or {}).get(names.COPY, ""))):
            return  # another copy took its place
        if offer is None and (why := self._quarantine(hexadecimal)) is not None:
            await self._answer(message, self._named(failed(why, id=call.id)))
            return
        if offer is None or self._free <= 0 or place in self._running:
            outcome = Outcome(
                "overloaded", "call", "all places of this worker are taken", "no_slot", "call again"
            )
            await self._answer(message, failed(outcome, id=call.id))
            return
        self._running[place] = _Running(reply=message.reply)
        self._start(self._serve_waited(message, user, call, offer), place)

    async def _serve_waited(self, message: Msg, user: str, call: FleetCall, offer: Offer) -> None:
        running = self._running[user, call.key]
        await self._say_that_it_runs(message.reply)
        began = self._clock.now()
        done = self._refusal(user, call, offer)
        if done is None:
            done = await self._perform(running, user, call, offer, None)
        running.reply = ""
        await self._answer(message, done.answer)
        self._counts["done"] += 1
        record = self._record(user, call, offer, done, began, 1)
        # Of its own, because a durable call may have the same id.
        subject = names.record(user, f"waited~{secrets.token_hex(12)}")
        await _quietly(self._js.publish(subject, json.dumps(record).encode()))

    async def _say_that_it_runs(self, reply: str) -> None:
        """Also for servers: one forgets the way back to another account that nobody uses for a minute."""
        await _quietly(self._nc.publish(reply, json.dumps({"worker": self._options.name}).encode()))

    async def _answer(self, message: Msg, answer: CallAnswer) -> None:
        document = {"status": answer.status, "document": answer.document, "headers": dict(answer.headers)}
        await _quietly(self._nc.publish(message.reply, json.dumps(document).encode()))

    def _refusal(self, user: str, call: FleetCall, offer: Offer) -> Performed | None:
        """Why the call must not begin."""
        outcome = None
        if call.plugin != offer.name:
            message = f"the plugin of this digest is {offer.name}, and the call is for {call.plugin[:200]}"
            outcome = Outcome("invalid_call", "call", message)
        elif self._was_cancelled(user, call.key):
            outcome = _CANCELLED
        elif call.deadline <= self._clock.now():
            outcome = _LATE
        if outcome is None:
            return None
        return unperformed(call.id, outcome, "dead" if outcome is _LATE else "ended")._replace(asked=False)

    def _was_cancelled(self, user: str, key: str) -> bool:
        keys = self._cancelled.get(user, OrderedDict())
        found = keys.pop(key, True) is None
        if not keys:
            self._cancelled.pop(user, None)
        return found

    async def _perform(
        self, running: _Running, user: str, call: FleetCall, offer: Offer, attempt: int | None
    ) -> Performed:
        loop = asyncio.get_running_loop()

        def on_progress(value: Mapping[str, Any]) -> None:  # on trio
            loop.call_soon_threadsafe(self._tell_progress, running, user, call.key, value)

        if call.seconds is not None:
            call = call._replace(seconds=max(0.0, min(call.seconds, call.deadline - self._clock.now())))

        async def on_ask(_: float) -> None:  # on trio
            # In this order: either who cancels the call sees that the plugin is asked, or it is not asked.
            running.asked = True
            if running.ended_by is not None:
                await trio.sleep_forever()  # the cancellation is on its way

        running.inner = loop.create_task(
            self._thread.on_trio(self._own_plugins.perform, offer, call, user, attempt, on_progress, on_ask)
        )
        if running.ended_by is not None:
            running.inner.cancel()
        try:
            done = await running.inner
        except (asyncio.CancelledError, CancelledOnTrio):
            if running.ended_by is None and not running.inner.done():
                raise  # this task itself is cancelled
            outcome = running.ended_by or _DRAINED
            done = unperformed(call.id, outcome)._replace(asked=running.asked)
        self._judge_node(done.outcome)
        if done.outcome.code == "quarantined":
            done = done._replace(answer=self._named(done.answer))
        return done

    def _quarantine(self, mark: str) -> Outcome | None:
        """What is said about a plugin that was given up. Who called may not have heard of it yet."""
        kind, why = self._held().get(mark, ("", ""))
        known = self._offers.get(mark)
        if known is None or kind not in ("operator", "quarantined"):
            return None
        return Unavailable(known.name, "quarantined", why).outcome

    def _named(self, answer: CallAnswer) -> CallAnswer:
        """With the name of this worker: another one may have the plugin in order."""
        error = answer.document["error"]
        message = f"on the worker {self._options.name}: {error['message']}"
        told = {**error, "message": message, "hint": names.QUARANTINE_HINT}
        return answer._replace(document={**answer.document, "error": told})

    def _tell_progress(self, running: _Running, user: str, key: str, value: Mapping[str, Any]) -> None:
        running.reported += 1
        if (
            running.reported <= _MOST_PROGRESS
            and len(raw := json.dumps(value).encode()) <= _MOST_PROGRESS_BYTES
        ):
            task = asyncio.get_running_loop().create_task(
                _quietly(self._nc.publish(names.progress(user, key), raw))
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _record(
        self, user: str, call: FleetCall, offer: Offer, done: Performed, began: float, attempt: int
    ) -> dict[str, Any]:
        given = digest([call.input, dict(call.context or {})])
        unknown = done.answer.document.get("execution_outcome")
        return {
            "id": call.id,
            "user": user,
            "plugin": offer.name,
            "digest": offer.digest,
            "tool": call.tool,
            "kind": call.kind or "",
            "worker": self._options.name,
            "attempt": attempt,
            "effect": self._own_plugins.effect(offer, call.tool),
            "began": began,
            "ended": self._clock.now(),
            "code": done.outcome.code,
            "cause": done.outcome.cause,
            "input_digest": given.digest,
            "input_bytes": given.size,
            "output_digest": done.output.digest,
            "output_bytes": done.output.size,
            **({"execution_outcome": unknown} if unknown else {}),
        }

    # --- durable calls --------------------------------------------------------------------------------------

    async def _fetch_all(self) -> None:
        while True:
            self._due.clear()
            for offer in self._served().values():
                while self._stores and (places := min(self._free, _MOST_FETCHED)) > 0:
                    if await self._fetch(offer, places) < places:
                        break
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def _fetch(self, offer: Offer, places: int) -> int:
        """Ask for so many calls. Returns how many came."""
        pull = self._pull = _Pull(next(self._numbers), offer.digest, places)
        try:
            if offer.digest not in self._consumers:
                await self._js.add_consumer(names.CALLS, consumer_config(offer.digest))
                self._consumers.add(offer.digest)
            asked = json.dumps({"batch": pull.places, "no_wait": True}).encode()
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{names.CALLS}.{names.consumer(offer.digest)}"
            await self._nc.publish(subject, asked, reply=f"{self._inbox}.{pull.number}")
            async with asyncio.timeout(_PULL_SECONDS):
                await pull.ended.wait()
        except (nats.errors.Error, TimeoutError):
            self._consumers.discard(offer.digest)  # it may be gone
        finally:
            self._pull = None
        return pull.got

    async def _on_pulled(self, message: Msg) -> None:
        pull = self._pull
        if "Status" in (message.headers or {}):  # nothing more for the pull of this number
            if pull is not None and message.subject == f"{self._inbox}.{pull.number}":
                pull.ended.set()
            return
        user, hexadecimal = message.subject.split(".")[-2:]  # that it was published to
        if pull is not None and pull.digest == hexadecimal and pull.got < pull.places:
            pull.got += 1
            if pull.got == pull.places:
                pull.ended.set()
        offer = self._served().get(hexadecimal)
        if offer is None or self._free <= 0:
            await _quietly(message.nak(_POLL_SECONDS))
            return
        try:
            call = decode_call(message.data, self._clock.now())
        except BadMessage as bad:
            await self._bury_bad(message, user, offer, str(bad))
            return
        place = user, call.key
        if (known := self._running.get(place)) is not None:
            # It came again although it runs here: the signs of life were lost with the connection.
            if known.message is not None:
                known.message = message
            else:
                await _quietly(message.nak(names.BEAT_SECONDS))
            return
        self._running[place] = _Running(message)
        self._start(self._serve_durable(user, call, offer), place)

    async def _bury_bad(self, message: Msg, user: str, offer: Offer, why: str) -> None:
        key = f"bad~{message.metadata.sequence.stream}"
        letter = {"id": key, "user": user, "plugin": offer.name, "digest": offer.digest, "reason": why}
        raw = json.dumps({**letter, "at": self._clock.now()}).encode()
        if self._within_share(user, DEAD, len(raw)):
            try:
                await self._js.publish(names.dead(user, key), raw)
            except (nats.errors.Error, TimeoutError):
                return  # it comes again
            self._shares.add(user, DEAD, len(raw))
        await _quietly(message.term())

    def _within_share(self, user: str, room: SharedRoom, size: int = 0) -> bool:
        if self._shares.has_room(user, room, size):
            return True
        if (user, room.name) not in self._told_full:
            self._told_full.add((user, room.name))
            what = "no durable call of it begins" if room is LEDGER else "no dead letter of it is kept"
            self._say(f"the submitter {user} has its share of the fleet's {room.name}: {what}")
        return False

    async def _serve_durable(self, user: str, call: FleetCall, offer: Offer) -> None:
        running = self._running[user, call.key]
        submission = _submission(running.message)
        # A call that has begun is finished even if its submitter has no room.
        if not self._within_share(user, LEDGER) and await self._ledger.read(user, call.key) is None:
            await self._refuse(running, user, call)
            return
        try:
            held = await self._begin(running, user, call, offer, submission)
        except LedgerFull as full:
            await self._try_disk()
            self._say(f"the ledger of the fleet takes no entry, so the call {call.id} does not begin: {full}")
            await self._hand_back(running, names.BEAT_SECONDS)
            return
        if held is None:
            return
        attempt = held.entry.attempt
        if running.ended_by is _DRAINED:  # nothing ran
            await self._release(running, user, call, held, 0.0)
            return
        done = self._refusal(user, call, offer)
        if done is None:
            done = await self._perform(running, user, call, offer, attempt)
        self._counts["done"] += 1
        if running.ended_by is _DRAINED:
            if not done.asked or repeat_of(self._own_plugins, offer, call.tool) == "again":
                await self._release(running, user, call, held, 0.0)
                return
            done = self._unknown(call, "the worker ended while the call ran")
        pause = self._pause(call, done, attempt)
        if pause is not None:
            await self._release(running, user, call, held, pause)
            return
        if not done.asked:
            held = held._replace(entry=held.entry._replace(**submission._asdict()))
        await self._end(running, user, call, offer, held, done)

    async def _refuse(self, running: _Running, user: str, call: FleetCall) -> None:
        """It does not begin, and nothing is written: its user has no room. Who waits for it is told."""
        message = f"the durable calls of {user} have taken their share of the fleet's ledger"
        hint = (
            f"an entry is kept for {LEDGER.days} days: come back later, or call without --durable and --key"
        )
        outcome = Outcome("overloaded", "call", message, "share", hint)
        told = {"status": STATUS[outcome.code], "document": outcome_error(outcome, id=call.id)}
        await _quietly(self._nc.publish(names.done(user, call.key), json.dumps(told).encode()))
        if running.message is not None:
            await _quietly(running.message.term())

    def _pause(self, call: FleetCall, done: Performed, attempt: int) -> float | None:
        """Seconds until a call that did not succeed is tried again. None: it is not."""
        if done.fate == "elsewhere":
            busy = done.outcome.code in ("overloaded", "quarantined", "cancelled")
            return _ELSEWHERE_SECONDS if busy or attempt < names.MOST_ATTEMPTS else None
        if done.fate == "retry" and call.retry:
            due = next_try(self._options.schedule, attempt, 0.0, secrets.randbelow(1000) / 1000)
            return None if due is None or self._clock.now() + due > call.deadline else due
        return None

    async def _begin(
        self, running: _Running, user: str, call: FleetCall, offer: Offer, submission: _Submission
    ) -> Held | None:
        """Write that the call begins. Returns None if it must not begin: then it was seen to."""
        nonce = secrets.token_hex(12)
        last, attempt = 0, 1
        while True:
            mine = LedgerEntry(
                "began", self._options.name, nonce, attempt, offer.name, call.tool, self._clock.now()
            )
            held = await self._ledger.write(user, call.key, mine, last)
            if held is not None:
                self._shares.add(user, LEDGER, held.size)
                return held
            found = await self._ledger.read(user, call.key)
            if found is None:
                last, attempt = 0, 1
                continue
            last, attempt = found.revision, found.entry.attempt + 1
            if found.entry.state == "ended" and submission.is_after(found.entry):
                attempt = 1
                continue
            if found.entry.state == "ended":
                await self._tell_end(running, user, call, found.entry)
                return None
            if found.entry.state == "waiting":
                continue
            if await self._runs(found.entry.worker, user, call.key):
                # Its signs of life were lost, or the submitter has stored the call a second time.
                await self._hand_back(running, names.BEAT_SECONDS)
                return None
            # It had begun, and the worker that began it is gone.
            if repeat_of(self._own_plugins, offer, call.tool) == "again" and attempt <= names.MOST_ATTEMPTS:
                continue
            lost = f"the worker {found.entry.worker} was lost while the call ran"
            await self._end(running, user, call, offer, found, self._unknown(call, lost))
            return None

    async def _runs(self, worker: str, user: str, key: str) -> bool:
        """Whether another worker says that it runs a call. One that does not answer is lost."""
        if worker == self._options.name or not names.is_token(worker):
            return False  # an earlier life of this one: what it runs now does not come here
        answer = await self._ask(worker, user, key)
        if answer is None:
            answer = await self._ask(worker, user, key)
        return answer == b"running"

    async def _ask(self, worker: str, user: str, key: str) -> bytes | None:
        """What a worker says about a call; None if nothing."""
        try:
            return bytes((await self._nc.request(names.ask(worker, user, key), timeout=_ASK_SECONDS)).data)
        except (nats.errors.Error, TimeoutError):
            return None

    def _unknown(self, call: FleetCall, why: str) -> Performed:
        message = f"{why}, and nobody knows what it did"
        outcome = Outcome("crashed", "call", message, "worker_lost", "find out, and call again with a new id")
        return unperformed(call.id, outcome, "dead", invocation=None, execution_outcome="unknown")

    async def _release(self, running: _Running, user: str, call: FleetCall, held: Held, pause: float) -> None:
        """Let it be tried again, here or elsewhere."""
        entry = held.entry._replace(state="waiting")
        if await self._ledger.write(user, call.key, entry, held.revision) is None:
            self._counts["late"] += 1
        await self._hand_back(running, pause)

    async def _hand_back(self, running: _Running, pause: float) -> None:
        if running.message is not None:
            await _quietly(running.message.nak(pause or None))

    async def _end(
        self, running: _Running, user: str, call: FleetCall, offer: Offer, held: Held, done: Performed
    ) -> None:
        entry = held.entry._replace(
            state="ended",
            plugin=held.entry.plugin or offer.name,
            tool=held.entry.tool or call.tool,
            nonce=held.entry.nonce if held.entry.worker == self._options.name else secrets.token_hex(12),
            ended=self._clock.now(),
            status=done.answer.status,
            document=done.answer.document,
            record=self._record(user, call, offer, done, held.entry.began, held.entry.attempt),
            dead=None if done.fate == "ended" else done.outcome.message[:_MOST_REASON],
        )
        written = await self._ledger.write(user, call.key, entry, held.revision)
        if written is not None:
            self._shares.add(user, LEDGER, written.size)
        else:
            # Another worker took this one for dead and ended the call, or began it again.
            self._counts["late"] += 1
            await self._audit("late", {"id": call.id, "user": user, "code": done.outcome.code})
            found = await self._ledger.read(user, call.key)
            if found is None or found.entry.state != "ended":
                return
            entry = found.entry
        await self._tell_end(running, user, call, entry)

    async def _tell_end(self, running: _Running, user: str, call: FleetCall, entry: LedgerEntry) -> None:
        """Its record, once, and then the stream forgets the call."""
        if entry.dead is not None:
            self._alerts.tell(
                "dead letter",
                f"{user}.{call.id} is a dead letter: {entry.dead}; runner ctl dead --fleet lists them",
            )
            told = {"id": call.id, "user": user, "reason": entry.dead, "at": entry.ended}
            row = {key: (entry.record or {}).get(key) for key in ("plugin", "digest", "code", "attempt")}
            # Written by us it may be longer than as it came: 1e9 becomes 1000000000.0.
            whole = {"call": call._asdict()} if len(json.dumps(call.input)) <= _MOST_KEPT_BYTES else {}
            letter = json.dumps({**told, **row, **whole}).encode()
            if self._within_share(user, DEAD, len(letter)):
                await self._ledger.publish(names.dead(user, call.key), letter, once=True)
                self._shares.add(user, DEAD, len(letter))
        record = json.dumps(entry.record or {}).encode()
        await self._ledger.publish(names.record(user, call.key), record)
        await _quietly(self._nc.publish(names.done(user, call.key), b""))
        if running.message is not None:
            await _quietly(running.message.ack())


def _submission(message: Msg | None) -> _Submission:
    if message is None:
        return _Submission(None, "")
    word = (message.headers or {}).get(names.SUBMISSION, "")
    return _Submission(message.metadata.sequence.stream, word[:_MOST_COPY])


def _copy(key: str, word: str) -> str:
    return f"{key}.{word[:_MOST_COPY]}"


def _has_inbox(message: Msg) -> bool:
    """Whether the answer goes to one. A worker may publish what submitters may not, and the servers let
    anybody name any subject for the answer, such as a flag. "_R_." is a server's own, for a user of another
    account."""
    return message.reply.startswith(("_INBOX.", "_R_."))


async def _quietly(sending: Awaitable[Any]) -> None:
    """Send what may be lost: it is said again, or somebody asks."""
    try:
        await sending
    except (nats.errors.Error, TimeoutError):
        pass

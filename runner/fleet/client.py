"""Submits calls to a fleet. On asyncio; runner/fleet/library.py has the same for trio.

async with open_client(read_address("nats://127.0.0.1:4222")) as fleet:
    answer = await fleet.call(await fleet.find("notes"), new_call(CallRequest(...)))
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import Header

from runner.fleet import names
from runner.fleet.clock import MOST_SECONDS, Now, clock_words
from runner.fleet.connection import Connected, FleetAddress, NoFleet, connect, server_words, words_of
from runner.fleet.entries import FULL, LedgerEntry, decode_entry, is_disk_full
from runner.fleet.messages import BadMessage, FleetCall, decode_call, encode_call
from runner.fleet.streams import NO_STREAMS, get_direct, read_messages
from runner.ledger.rows import digest
from runner.outcome import Outcome
from runner.protocol import wire
from runner.protocol.calls import CallRequest, OnProgress
from runner.serve.desk import CallAnswer, failed, refused_answer
from runner.serve.refusal import Refused

_TAKE_SECONDS = 1.0  # for a worker to say that it has a call
_ASK_SECONDS = 5.0  # between questions to the worker of a call whether it still runs
_GRACE_SECONDS = 10.0  # after the deadline, for the answer of a call that began in time
_AGAIN_SECONDS = 30.0  # until a durable call that nobody has begun is stored again; then twice as long
_FIRST_LOOK_SECONDS = 0.5  # into the ledger; its end is told, too
_MOST_LOOK_SECONDS = 5.0
_BUSY_TRIES = 5
_SUBMIT_SECONDS = 30.0
_RESEND_SECONDS = 30.0  # for a waited call that no worker got
_NO_JETSTREAM = 10039  # for this account
_KNOWN_SECONDS = 2.0  # that a list of workers counts
_MOST_PLUGINS = 2000  # of a worker
_MOST_TEXT = 1000
_MOST_NAMED = 5  # workers, in a message
_HOLDS = ("operator", "quarantined", "pending")
_MOST_NUMBER = 1e12
_DISK_FULL = "the disk of a NATS server of the fleet is full, so that no durable call is stored"
DURABLE_KINDS = ("hook", "compactor", "harness")


class WorkerHold(NamedTuple):
    """Why a worker that has a plugin takes no calls for it."""

    worker: str
    kind: str  # "operator" (ctl quarantine), "quarantined" (it failed too often) or "pending" (policy)
    reason: str


class FleetPlugin(NamedTuple):
    """A plugin that workers have."""

    name: str
    digest: str
    contract: str = ""
    version: str = ""
    durable: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()  # that take calls for it
    holds: tuple[WorkerHold, ...] = ()  # workers that have it and take none

    @property
    def held(self) -> str:
        """Why nobody takes calls for it, though some have it. One that still does counts, whatever others
        say."""
        return "" if self.workers else self.hold_words

    @property
    def hold_words(self) -> str:
        """What holds it, worker by worker."""
        if by_people := [each for each in self.holds if each.kind == "operator"]:
            return by_people[0].reason
        told = [f"{each.kind} on {each.worker}: {each.reason}" for each in self.holds[:_MOST_NAMED]]
        more = len(self.holds) - len(told)
        return "; ".join((*told, *([f"and on {more} more"] if more else ())))

    def refusal(self) -> Refused:
        """What a caller is told if it is held."""
        kinds = {each.kind for each in self.holds}
        if "operator" in kinds:
            message = f"the plugin {self.name} is held in this fleet: {self.held}"
            return Refused(503, "quarantined", message, "runner ctl release ends it")
        message = f"no worker takes calls for the plugin {self.name}: {self.held}"
        if "quarantined" in kinds:
            return Refused(503, "quarantined", message, names.QUARANTINE_HINT)
        return Refused(403, "policy_denied", message, "ask the operator of the worker")

    def is_durable(self, call: FleetCall | CallRequest) -> bool:
        return call.kind in DURABLE_KINDS or (call.kind is None and call.tool in self.durable)


def new_call(request: CallRequest, *, call: str | None = None, retry: bool = True) -> FleetCall:
    """Its deadline is that of the request; if it has none, the contract's own limit counts once it runs.
    `call`: its id."""
    plugin, tool, given, kind, seconds, context, *_ = request
    usual = names.USUAL_SECONDS if seconds is None else min(seconds, names.MOST_SECONDS)
    number, deadline = call or f"call_{secrets.token_hex(12)}", time.time() + usual
    return FleetCall(number, plugin, tool, deadline, given, kind, context, seconds, retry)


class FleetClient:
    """Made by `open_client`."""

    def __init__(self, bus: Connected, now: Now = time.time) -> None:
        self.nc, self.js, self.address = bus
        self._now = now  # this machine's clock, by which deadlines are written
        self._stored = (
            -math.inf
        )  # by the servers' clock, less the monotonic one: when a worker last said something
        self._user = self.address.user
        self._waiting: dict[str, asyncio.Queue[Msg]] = {}  # by the last part of the inbox
        self._ends: dict[str, asyncio.Event] = {}  # by key
        self._refused: dict[str, CallAnswer] = {}  # by key: why a durable call does not begin
        self._progress: dict[str, OnProgress] = {}
        self._inbox = ""
        self._listed: tuple[float, list[dict[str, Any]]] = (0.0, [])
        self._listing = asyncio.Lock()

    async def begin(self) -> None:
        self._inbox = f"{self.nc.new_inbox()}.call"
        await self.nc.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        await self.nc.subscribe(names.done(self._user, "*"), cb=self._on_done)
        await self.nc.subscribe(names.progress(self._user, "*"), cb=self._on_progress)

    async def _on_answer(self, message: Msg) -> None:
        if (queue := self._waiting.get(message.subject.rpartition(".")[2])) is not None:
            queue.put_nowait(message)

    async def _on_done(self, message: Msg) -> None:
        key = message.subject.rpartition(".")[2]
        if (event := self._ends.get(key)) is not None:
            found = _json(message.data) if message.data else None
            if isinstance(found, dict) and (refused := _answer_of({"document": None, **found})) is not None:
                self._refused[key] = refused
            event.set()

    async def _on_progress(self, message: Msg) -> None:
        if (tell := self._progress.get(message.subject.rpartition(".")[2])) is not None:
            value = _json(message.data)
            if isinstance(value, dict):
                tell(value)

    # --- what there is --------------------------------------------------------------------------------------

    async def workers(self, *, fresh: bool = True) -> list[dict[str, Any]]:
        """What each worker says about itself. Raises NoFleet."""
        at, listed = self._listed
        if not fresh and time.monotonic() - at < _KNOWN_SECONDS:
            return listed
        at = time.monotonic()
        try:
            found = await read_messages(self.js, names.WORKERS, direct=True)
        except nats.js.errors.NotFoundError:
            raise NoFleet(NO_STREAMS.format(f"KV_{names.WORKERS}")) from None
        except (nats.errors.Error, TimeoutError) as error:
            hint = ""
            if isinstance(error, nats.js.errors.APIError) and error.err_code == _NO_JETSTREAM:
                hint = '; is this user in an account of its own? Then its file needs api = "runner.api"'
            raise NoFleet(f"the servers do not list the workers: {words_of(error, self.nc)}{hint}") from None
        rows = [row for each in found.values() if (row := presence_of(each.data or b"")) is not None]
        self._listed, now = (at, rows), time.monotonic()
        stored = [each.time.timestamp() for each in found.values() if each.time is not None]
        self._stored = max(self._stored, *(each - now for each in stored), -math.inf)
        return rows

    @property
    def behind(self) -> float:
        """The seconds that this clock is at least behind the servers'. Negative: no proof that it is."""
        return self._stored + time.monotonic() - self._now()

    async def _refusal_of(self, plugin: FleetPlugin, call: FleetCall, since: float) -> CallAnswer | None:
        """Why nobody takes calls for a plugin, as workers say since then; None: they do not say. Callers that
        ask at once share a list."""
        async with self._listing:
            with suppress(NoFleet):
                if self._listed[0] < since:
                    await self.workers()
        for each in plugins_of(self._listed[1]):
            if each.digest == plugin.digest and each.held:
                answer = refused_answer(each.refusal())
                return answer._replace(document={**answer.document, "id": call.id})
        return None

    async def plugins(self, *, fresh: bool = True) -> list[FleetPlugin]:
        """Raises NoFleet."""
        return list(plugins_of(await self.workers(fresh=fresh)))

    async def find(self, word: str) -> FleetPlugin:
        """A plugin by its name, or by NAME@DIGEST with the beginning of its digest. Raises Refused and
        NoFleet."""
        plugins = await self.plugins(fresh=False)
        if not (found := _matches(plugins, word)):
            found = _matches(await self.plugins(), word)
        if len(found) > 1 and len(live := [each for each in found if each.workers]) == 1:
            found = live
        if not found:
            hint = "runner ps --fleet lists the plugins"
            raise Refused(404, "unknown_plugin", f"no worker of the fleet has a plugin {word!r}", hint)
        if len(found) > 1:
            listed = ", ".join(f"{each.name}@{each.digest[:12]}" for each in found[:10])
            message = f"workers have {len(found)} different plugins {word!r}: {listed}"
            raise Refused(409, "ambiguous_plugin", message, "name one of them so")
        return found[0]

    # --- calls ----------------------------------------------------------------------------------------------

    async def call(
        self,
        plugin: FleetPlugin,
        call: FleetCall,
        *,
        durable: bool = False,
        on_progress: OnProgress | None = None,
    ) -> CallAnswer:
        """Make a call and wait for its answer. `durable`: it survives workers, servers and this process.
        Raises Refused if it was not submitted, and NoFleet."""
        if plugin.held:
            raise plugin.refusal()
        raw = self._encoded(call)
        with self._heard(call.key, on_progress):
            if durable or plugin.is_durable(call):
                submission = await self._submit(plugin, call, raw)
                return await self.wait_for(call, plugin, submission)
            return await self._request(plugin, call, raw)

    async def submit(self, plugin: FleetPlugin, call: FleetCall) -> None:
        """Store a durable call, and do not wait for its answer. Raises Refused and NoFleet."""
        await self._submit(plugin, call, self._encoded(call))
        self._ends.pop(call.key, None)

    async def cancel(self, call: str) -> None:
        await self.nc.publish(names.cancel(self._user, names.key_of(call)), b"")
        await self.nc.flush()

    async def result(self, call: str) -> LedgerEntry | None:
        """The entry of a durable call; None: it has not begun, or is forgotten. Raises NoFleet."""
        subject = names.entry(names.LEDGER, f"{self._user}.{names.key_of(call)}")
        try:
            found = await get_direct(self.js, f"KV_{names.LEDGER}", subject)
            return decode_entry(found.data or b"{}")
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, TimeoutError, ValueError) as error:
            raise NoFleet(f"the ledger of the fleet cannot be read: {words_of(error, self.nc)}") from None

    async def wait_for(
        self, call: FleetCall, plugin: FleetPlugin | None = None, submission: str = ""
    ) -> CallAnswer:
        """The answer of a durable call. Servers that do not answer are waited for, until the deadline. Raises
        Refused if its id is another call's. `plugin`: if nobody begins the call or runs it, it is stored once
        more, in case that the servers lost it; its id sees to it that it runs once. `submission`: an end that
        another submission came to, which left the key free, does not count."""
        given = digest([call.input, dict(call.context or {})]).digest
        event = self._ends.setdefault(call.key, asyncio.Event())
        pause, again, number = _FIRST_LOOK_SECONDS, _AGAIN_SECONDS, 0
        since, lost = time.monotonic(), False
        passed: set[str] = set()  # ends of other submissions
        try:
            while True:
                try:
                    async with asyncio.timeout(pause):
                        await event.wait()
                except TimeoutError:
                    pause = min(pause * 1.5, _MOST_LOOK_SECONDS)
                told = event.is_set()
                event.clear()
                if (refused := self._refused.pop(call.key, None)) is not None:
                    return refused
                try:
                    entry = await self.result(call.id)
                except NoFleet:
                    entry = None
                if plugin is not None and submission and entry is not None and _is_free(entry, submission):
                    if entry.nonce not in passed:
                        passed.add(entry.nonce)
                        await self._store_again(plugin, call, _again_mark(entry), submission)
                    entry = None
                found = None if entry is None or entry.state != "ended" else _answer_of(entry._asdict())
                if entry is not None and found is not None:
                    same = (entry.plugin, entry.tool) == (call.plugin, call.tool)
                    if not same or (entry.record or {}).get("input_digest", given) != given:
                        message = f"the id {call.id} belongs to another call"
                        raise Refused(409, "key_reused", message, "use a new key for each call")
                    return found
                if told:
                    pause = _FIRST_LOOK_SECONDS  # the server that answered does not know it yet
                if plugin is not None and time.monotonic() - since > again:
                    since, again, number = time.monotonic(), again * 2, number + 1
                    begun = entry is not None and entry.state == "began"
                    if entry is None or (begun and not await self._still_runs(entry.worker, call)):
                        await self._store_again(plugin, call, f".{number}", submission)
                if self._now() > call.deadline + _GRACE_SECONDS:
                    if entry is None or entry.state != "began":
                        message = "no worker ended the call before its deadline"
                        if plugin is not None and (
                            why := await self._refusal_of(plugin, call, time.monotonic())
                        ):
                            message += f"; {why.error['message']}"
                        return _failed(call, "timeout", "deadline", message)
                    # A call that began in time may take as long as its contract lets it. One that nobody runs
                    # is looked for once more: it may have ended after we looked.
                    if await self._still_runs(entry.worker, call):
                        lost = False
                    elif lost:
                        return _lost(call, entry.worker, "")
                    else:
                        lost = True
        finally:
            self._ends.pop(call.key, None)
            self._refused.pop(call.key, None)

    def _encoded(self, call: FleetCall) -> bytes:
        """What a worker would not take is not sent: nobody would answer it. Raises Refused."""
        try:
            raw = encode_call(call)
        except BadMessage as bad:
            raise Refused(
                413, "call_too_large", str(bad), "send less, or let the plugin read it itself"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise Refused(400, "invalid_call", f"the call is not JSON: {error}") from None
        now, behind = self._now(), self.behind
        try:
            decode_call(raw, now)
        except BadMessage as bad:
            raise Refused(400, "invalid_call", f"no worker would take the call: {bad}") from None
        if behind > MOST_SECONDS and now < call.deadline <= now + behind:
            message = f"the clock of this machine is {clock_words(-behind)}, where the deadline has passed"
            raise Refused(503, "clock_behind", message, "set the clock (NTP), or give the call more time")
        return raw

    @contextmanager
    def _heard(self, key: str, on_progress: OnProgress | None) -> Iterator[None]:
        if on_progress is not None:
            self._progress[key] = on_progress
        try:
            yield
        finally:
            self._progress.pop(key, None)

    async def _submit(self, plugin: FleetPlugin, call: FleetCall, raw: bytes) -> str:
        """Returns the name of this submission."""
        self._ends.setdefault(call.key, asyncio.Event())
        submission = secrets.token_hex(8)
        mark = names.message_id(self._user, call.id, self.address.salt)
        headers: dict[str, Any] = {Header.MSG_ID: mark, names.SUBMISSION: submission}
        last = time.monotonic() + _SUBMIT_SECONDS
        while True:
            try:
                done = await self.js.publish(names.durable(self._user, plugin.digest), raw, headers=headers)
                entry = await self.result(call.id) if done.duplicate else None
                if entry is None or not _is_free(entry, submission):
                    break
                if headers[Header.MSG_ID] == (again := f"{mark}{_again_mark(entry)}"):
                    break  # somebody else has submitted it again meanwhile
                headers[Header.MSG_ID] = again
                continue
            except nats.js.errors.APIError as error:
                if is_disk_full(error):
                    hint = "an operator has to make room there; a call without --durable and --key needs none"
                    raise Refused(429, "overloaded", _DISK_FULL, hint, retry_after=60) from None
                if error.err_code in FULL:
                    message = f"the fleet stores no more calls: {error.description}"
                    raise Refused(429, "overloaded", message, "come back later", retry_after=5) from None
                if time.monotonic() > last:
                    raise NoFleet(f"the call was not stored: {error.description}") from None
            except (nats.errors.Error, TimeoutError) as error:
                # It may be stored all the same. The server knows it by its id when it comes again.
                if time.monotonic() > last or isinstance(error, nats.errors.ConnectionClosedError):
                    why = words_of(error, self.nc)
                    raise NoFleet(f"nobody says whether the call {call.id} was stored: {why}") from None
            await asyncio.sleep(_FIRST_LOOK_SECONDS)
        await self.nc.publish(names.hint(plugin.digest), b"")
        return submission

    async def _store_again(self, plugin: FleetPlugin, call: FleetCall, which: str, submission: str) -> None:
        """`which`: the servers drop a message that has the same."""
        mark = names.message_id(self._user, call.id, self.address.salt)
        with suppress(nats.errors.Error, TimeoutError):
            await self.js.publish(
                names.durable(self._user, plugin.digest),
                encode_call(call),
                headers={Header.MSG_ID.value: f"{mark}{which}", names.SUBMISSION: submission},
            )
            await self.nc.publish(names.hint(plugin.digest), b"")

    async def _request(self, plugin: FleetPlugin, call: FleetCall, raw: bytes) -> CallAnswer:
        unserved = _no_worker(plugin, call)
        elsewhere, last = 0, time.monotonic() + min(_RESEND_SECONDS, call.deadline - self._now())
        while elsewhere < _BUSY_TRIES:
            answer = await self._ask_once(plugin, call, raw)
            if answer == unserved or (answer is None and time.monotonic() > last):
                break
            if answer is None:
                continue  # servers may go on sending some calls to one that has stopped
            if not _is_elsewhere(answer):
                return answer
            # It came to a worker that had just become full, or had just given the plugin up.
            elsewhere += 1
            await asyncio.sleep(0.02 * elsewhere)
        return await self._refusal_of(plugin, call, time.monotonic()) or answer or unserved

    async def _ask_once(self, plugin: FleetPlugin, call: FleetCall, raw: bytes) -> CallAnswer | None:
        """Returns None if no worker got it: a server drops what is on its way to one that unsubscribes."""
        word = secrets.token_hex(8)
        queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._waiting[word] = queue
        worker, last = "", time.monotonic() + names.LOST_SECONDS
        before, server = who_has(self._listed[1], plugin), server_words(self.nc)
        try:
            await self.nc.publish(
                names.waited(self._user, plugin.digest),
                raw,
                reply=f"{self._inbox}.{word}",
                headers={names.COPY: word},
            )
            while True:
                try:
                    async with asyncio.timeout(_ASK_SECONDS if worker else _TAKE_SECONDS):
                        message = await queue.get()
                except TimeoutError:
                    if worker:
                        if not await self._still_runs(worker, call) and queue.empty():
                            return _lost(call, worker, server)
                        continue
                    says = await self._who_has(plugin, call, before)
                    if says is None and queue.empty():
                        # A server that has stopped may have it, and pass it on when it goes on. Workers that
                        # know that this copy is void do not begin it then.
                        await self.nc.publish(names.cancel(self._user, call.key), word.encode())
                        says = await self._who_has(plugin, call, before)
                    if not queue.empty():
                        continue
                    if says is None:
                        return None
                    worker = says
                    if not worker and time.monotonic() > last:
                        return _lost(call, worker, server)
                    continue
                if (message.headers or {}).get("Status") == "503":
                    return _no_worker(plugin, call)
                found = _json(message.data)
                if isinstance(found, dict) and "document" in found:
                    return _answer_of(found) or _no_answer(call, worker)
                if isinstance(found, dict) and isinstance(found.get("worker"), str):
                    worker = found["worker"]
        except asyncio.CancelledError:
            await self.nc.publish(names.cancel(self._user, call.key), b"")  # nobody waits for it
            raise
        finally:
            del self._waiting[word]

    async def _who_has(
        self, plugin: FleetPlugin, call: FleetCall, before: set[tuple[str, float]]
    ) -> str | None:
        """The worker that says that it runs the call; '' if one of them says nothing, and None if all of them
        say that they have not got it. The messages of a worker arrive in order, so that its answer to the
        call would have come before."""
        try:
            now = sorted(who_has(await self.workers(), plugin))
        except NoFleet:
            return ""
        said = await asyncio.gather(*(self._ask_worker(worker, call) for worker, _ in now))
        for (worker, _), answer in zip(now, said, strict=True):
            if answer == b"running":
                return worker
        # One that is gone, or has begun again under its name, may have had it.
        same = set(now) == before
        return None if same and all(answer == b"unknown" for answer in said) else ""

    async def _ask_worker(self, worker: str, call: FleetCall) -> bytes:
        if not names.is_token(worker):
            return b""
        try:
            subject = names.ask(worker, self._user, call.key)
            return bytes((await self.nc.request(subject, timeout=_ASK_SECONDS)).data)
        except (nats.errors.Error, TimeoutError):
            return b""

    async def _still_runs(self, worker: str, call: FleetCall) -> bool:
        """Whether the worker that has a call says so. One that does not answer is lost."""
        for _ in range(2):
            if answer := await self._ask_worker(worker, call):
                return answer == b"running"
            await asyncio.sleep(0.5)
        return False


def _is_free(entry: LedgerEntry, submission: str) -> bool:
    """Whether the call ended without asking the plugin, when another submission of it came."""
    return entry.state == "ended" and entry.free_since is not None and entry.freed_by != submission


def _again_mark(entry: LedgerEntry) -> str:
    """One message after each such end, however many submit the call again."""
    return f"~{entry.nonce}"


def presence_of(raw: bytes) -> dict[str, Any] | None:
    """What a worker says about itself, in a known shape: a worker may say anything."""
    found = _json(raw)
    if not isinstance(found, dict):
        return None
    row: dict[str, Any] = {key: _text(found.get(key)) for key in ("worker", "version", "state", "reason")}
    row |= {key: _number(found.get(key)) for key in ("slots", "running", "since", "at", "done", "late")}
    dead = found.get("dead")  # letters, of the whole fleet
    row["dead"] = dead if isinstance(dead, int) and 0 <= dead < _MOST_NUMBER else None
    row["plugins"] = []
    listed = found.get("plugins")
    for each in listed[:_MOST_PLUGINS] if isinstance(listed, list) else ():
        if isinstance(each, dict) and names.is_token(_text(each.get("digest"))):
            keys = ("name", "digest", "contract", "version", "held", "hold")
            durable = each.get("durable")
            named = [_text(name) for name in durable] if isinstance(durable, list) else []
            shown = {key: _text(each.get(key)) for key in keys}
            if shown["held"] and shown["hold"] not in _HOLDS:
                shown["hold"] = "operator"  # earlier workers know no other
            row["plugins"].append({**shown, "durable": named})
    return row


def _text(value: Any) -> str:
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


def _answer_of(found: Mapping[str, Any]) -> CallAnswer | None:
    """In the shape that callers rely on. None: a worker said something else."""
    status, document, headers = found.get("status"), found["document"], found.get("headers")
    if not isinstance(status, int) or not isinstance(document, dict):
        return None
    if status != 200 and not isinstance(document.get("error"), dict):
        return None
    pairs = headers.items() if isinstance(headers, dict) else ()
    return CallAnswer(status, document, {key: value for key, value in pairs if isinstance(value, str)})


def _number(value: Any) -> float:
    usable = isinstance(value, int | float) and abs(value) < _MOST_NUMBER
    return value if usable else 0


def plugins_of(workers: Iterable[Mapping[str, Any]]) -> Iterator[FleetPlugin]:
    """Each plugin once, with those who take calls for it."""
    found: dict[tuple[str, str], FleetPlugin] = {}
    for row in workers:
        for each in row["plugins"]:
            name, mark = each["name"], each["digest"]
            known = found.get((name, mark)) or FleetPlugin(
                name, mark, each["contract"], each["version"], tuple(each["durable"])
            )
            if each["held"]:
                hold = WorkerHold(row["worker"], each["hold"], each["held"])
                known = known._replace(holds=(*known.holds, hold))
            elif row["state"] == "ready":
                known = known._replace(workers=(*known.workers, row["worker"]))
            found[name, mark] = known
    # Those that are taken come last, so that who knows plugins by their names alone knows them.
    yield from sorted(found.values(), key=lambda each: len(each.workers))


def _matches(plugins: list[FleetPlugin], word: str) -> list[FleetPlugin]:
    if found := [each for each in plugins if each.name == word]:
        return found
    name, _, beginning = word.rpartition("@")
    return [each for each in plugins if name == each.name and each.digest.startswith(beginning)]


def who_has(workers: Iterable[Mapping[str, Any]], plugin: FleetPlugin) -> set[tuple[str, float]]:
    """The workers that have a plugin, and since when they run."""
    return {
        (each["worker"], each["since"])
        for each in workers
        if any(one["digest"] == plugin.digest for one in each["plugins"])
    }


def _no_worker(plugin: FleetPlugin, call: FleetCall) -> CallAnswer:
    message = f"no worker has a free place for the plugin {plugin.name}"
    return _failed(call, "overloaded", "no_worker", message, "call again, or add workers")


def _failed(call: FleetCall, code: Any, cause: str, message: str, hint: str = "", **more: Any) -> CallAnswer:
    outcome = Outcome(code, "call", message, cause, hint)
    headers = {"Retry-After": "1"} if code == "overloaded" else {}
    return failed(outcome, id=call.id, invocation=None, **more)._replace(headers=headers)


def _lost(call: FleetCall, worker: str, server: str) -> CallAnswer:
    """`server`: the one that the call was sent to."""
    if not worker:
        message = f"no worker took the call that was sent to the server {server}; perhaps it was lost there"
    else:
        message = f"the worker {worker} was lost while the call ran, or its answer was"
    hint = "nobody knows what it did; with --durable the fleet would"
    return _failed(call, "crashed", "worker_lost", message, hint, execution_outcome="unknown")


def _no_answer(call: FleetCall, worker: str) -> CallAnswer:
    message = f"the worker {worker} answered with something that is no answer"
    return _failed(call, "internal", "no_answer", message, execution_outcome="unknown")


def _is_elsewhere(answer: CallAnswer) -> bool:
    """Whether nothing ran, and another worker may do better. A plugin can choose the cause of its errors, and
    not their code."""
    error = answer.error
    return error.get("code") == "quarantined" or (
        (error.get("code"), error.get("cause")) == ("overloaded", "no_slot")
    )


def _json(raw: bytes) -> Any:
    try:
        return wire.decode(raw)
    except ValueError:
        return None


@asynccontextmanager
async def open_client(
    address: FleetAddress,
    *,
    say: Callable[[str], None] = lambda text: None,
    stays: bool = False,
    now: Now = time.time,
) -> AsyncIterator[FleetClient]:
    """Raises NoFleet."""
    async with connect(address, "runner client", say=say, stays=stays) as bus:
        client = FleetClient(bus, now)
        await client.begin()
        yield client

"""Submits calls to a fleet. On asyncio; runner/fleet/library.py has the same for trio.

async with open_client(read_address("nats://127.0.0.1:4222")) as fleet:
    answer = await fleet.call(await fleet.find("notes"), new_call(...))
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import Header

from runner.fleet import names
from runner.fleet.connection import Connected, FleetAddress, NoFleet, connect, words_of
from runner.fleet.entries import FULL, LedgerEntry, decode_entry
from runner.fleet.messages import BadMessage, FleetCall, decode_call, encode_call
from runner.fleet.streams import NO_STREAMS, read_bucket
from runner.ledger.rows import digest
from runner.outcome import Outcome
from runner.protocol import wire
from runner.serve.desk import CallAnswer
from runner.serve.refusal import STATUS, Refused, outcome_error
from sandbox.speed.value import NamedTuple

_TAKE_SECONDS = 1.0  # for a worker to say that it has a call
_ASK_SECONDS = 5.0  # between questions to the worker of a call whether it still runs
_GRACE_SECONDS = 10.0  # after the deadline, for the answer of a call that began in time
_AGAIN_SECONDS = 30.0  # until a durable call that nobody has begun is stored again; then twice as long
_FIRST_LOOK_SECONDS = 0.5  # into the ledger; its end is told, too
_MOST_LOOK_SECONDS = 5.0
_BUSY_TRIES = 5
_SUBMIT_SECONDS = 30.0
_NO_JETSTREAM = 10039  # for this account
_KNOWN_SECONDS = 2.0  # that a list of workers counts
_MOST_PLUGINS = 2000  # of a worker
_MOST_TEXT = 1000
_MOST_NUMBER = 1e12
DURABLE_KINDS = ("hook", "compactor", "harness")

OnProgress = Callable[[Mapping[str, Any]], None]


class FleetPlugin(NamedTuple):
    """A plugin that workers offer."""

    name: str
    digest: str
    contract: str = ""
    version: str = ""
    durable: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()  # that take calls for it
    held: str = ""  # why nobody does, though some have it

    def is_durable(self, call: FleetCall) -> bool:
        return call.kind in DURABLE_KINDS or (call.kind is None and call.tool in self.durable)


def new_call(
    plugin: str,
    tool: str,
    given: Any = None,
    *,
    kind: str | None = None,
    seconds: float | None = None,
    context: Mapping[str, Any] | None = None,
    call: str | None = None,
    retry: bool = True,
) -> FleetCall:
    """`seconds`: until its deadline; None: the contract's own limit counts once it runs. `call`: its id."""
    usual = names.USUAL_SECONDS if seconds is None else min(seconds, names.MOST_SECONDS)
    return FleetCall(
        id=call or f"call_{secrets.token_hex(12)}",
        plugin=plugin,
        tool=tool,
        deadline=time.time() + usual,
        input=given,
        kind=kind,
        context=context,
        seconds=seconds,
        retry=retry,
    )


class FleetClient:
    """Made by `open_client`."""

    def __init__(self, bus: Connected) -> None:
        self.nc, self.js, self.address = bus
        self._user = self.address.user
        self._waiting: dict[str, asyncio.Queue[Msg]] = {}  # by the last part of the inbox
        self._ends: dict[str, asyncio.Event] = {}  # by key
        self._refused: dict[str, CallAnswer] = {}  # by key: why a durable call does not begin
        self._progress: dict[str, OnProgress] = {}
        self._inbox = ""
        self._listed: tuple[float, list[dict[str, Any]]] = (0.0, [])

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
        try:
            found = await read_bucket(self.js, names.WORKERS)
        except nats.js.errors.NotFoundError:
            raise NoFleet(NO_STREAMS.format(f"KV_{names.WORKERS}")) from None
        except (nats.errors.Error, TimeoutError) as error:
            hint = ""
            if isinstance(error, nats.js.errors.APIError) and error.err_code == _NO_JETSTREAM:
                hint = '; is this user in an account of its own? Then its file needs api = "runner.api"'
            raise NoFleet(f"the servers do not list the workers: {words_of(error)}{hint}") from None
        rows = [row for raw in found.values() if (row := presence_of(raw)) is not None]
        self._listed = time.monotonic(), rows
        return rows

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
            message = f"the plugin {plugin.name} is held in this fleet: {plugin.held}"
            raise Refused(503, "quarantined", message, "runner ctl release ends it")
        raw = self._encoded(call)
        with self._heard(call.key, on_progress):
            if durable or plugin.is_durable(call):
                await self._submit(plugin, call, raw)
                return await self.wait_for(call, plugin)
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
            found = await self.js.get_msg(f"KV_{names.LEDGER}", subject=subject, direct=True)
            return decode_entry(found.data or b"{}")
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, TimeoutError, ValueError) as error:
            raise NoFleet(f"the ledger of the fleet cannot be read: {words_of(error)}") from None

    async def wait_for(self, call: FleetCall, plugin: FleetPlugin | None = None) -> CallAnswer:
        """The answer of a durable call. Servers that do not answer are waited for, until the deadline. Raises
        Refused if its id is another call's. `plugin`: if nobody begins the call or runs it, it is stored once
        more, in case that the servers lost it; its id sees to it that it runs once."""
        given = digest([call.input, dict(call.context or {})]).digest
        event = self._ends.setdefault(call.key, asyncio.Event())
        pause, again, number = _FIRST_LOOK_SECONDS, _AGAIN_SECONDS, 0
        since, lost = time.monotonic(), False
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
                        await self._store_again(plugin, call, number)
                if time.time() > call.deadline + _GRACE_SECONDS:
                    if entry is None or entry.state != "began":
                        return _failed(
                            call, "timeout", "deadline", "no worker ended the call before its deadline"
                        )
                    # A call that began in time may take as long as its contract lets it. One that nobody runs
                    # is looked for once more: it may have ended after we looked.
                    if await self._still_runs(entry.worker, call):
                        lost = False
                    elif lost:
                        return _lost(call, entry.worker)
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
        try:
            decode_call(raw, time.time())
        except BadMessage as bad:
            raise Refused(400, "invalid_call", f"no worker would take the call: {bad}") from None
        return raw

    @contextmanager
    def _heard(self, key: str, on_progress: OnProgress | None) -> Iterator[None]:
        if on_progress is not None:
            self._progress[key] = on_progress
        try:
            yield
        finally:
            self._progress.pop(key, None)

    async def _submit(self, plugin: FleetPlugin, call: FleetCall, raw: bytes) -> None:
        self._ends.setdefault(call.key, asyncio.Event())
        headers: dict[str, Any] = {Header.MSG_ID: names.message_id(self._user, call.id, self.address.salt)}
        last = time.monotonic() + _SUBMIT_SECONDS
        while True:
            try:
                await self.js.publish(names.durable(self._user, plugin.digest), raw, headers=headers)
                break
            except nats.js.errors.APIError as error:
                if error.err_code in FULL:
                    message = f"the fleet stores no more calls: {error.description}"
                    raise Refused(429, "overloaded", message, "come back later", retry_after=5) from None
                if time.monotonic() > last:
                    raise NoFleet(f"the call was not stored: {error.description}") from None
            except (nats.errors.Error, TimeoutError) as error:
                # It may be stored all the same. The server knows it by its id when it comes again.
                if time.monotonic() > last or isinstance(error, nats.errors.ConnectionClosedError):
                    raise NoFleet(
                        f"nobody says whether the call {call.id} was stored: {words_of(error)}"
                    ) from None
            await asyncio.sleep(_FIRST_LOOK_SECONDS)
        await self.nc.publish(names.hint(plugin.digest), b"")

    async def _store_again(self, plugin: FleetPlugin, call: FleetCall, number: int) -> None:
        mark = names.message_id(self._user, call.id, self.address.salt)
        with suppress(nats.errors.Error, TimeoutError):
            await self.js.publish(
                names.durable(self._user, plugin.digest),
                encode_call(call),
                headers={Header.MSG_ID.value: f"{mark}.{number}"},
            )
            await self.nc.publish(names.hint(plugin.digest), b"")

    async def _request(self, plugin: FleetPlugin, call: FleetCall, raw: bytes) -> CallAnswer:
        for number in range(_BUSY_TRIES):
            answer = await self._ask_once(plugin, call, raw)
            if answer is not None and not _is_full(answer):
                return answer
            await asyncio.sleep(0.02 * number)  # it came to a worker that had just become full
        return answer or _no_worker(plugin, call)

    async def _ask_once(self, plugin: FleetPlugin, call: FleetCall, raw: bytes) -> CallAnswer | None:
        """Returns None if no worker got it: a server drops what is on its way to one that unsubscribes."""
        word = secrets.token_hex(8)
        queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._waiting[word] = queue
        worker, last = "", time.monotonic() + names.LOST_SECONDS
        before = _who(self._listed[1], plugin)
        try:
            await self.nc.publish(names.waited(self._user, plugin.digest), raw, reply=f"{self._inbox}.{word}")
            while True:
                try:
                    async with asyncio.timeout(_ASK_SECONDS if worker else _TAKE_SECONDS):
                        message = await queue.get()
                except TimeoutError:
                    if worker:
                        if not await self._still_runs(worker, call) and queue.empty():
                            return _lost(call, worker)
                        continue
                    says = await self._who_has(plugin, call, before)
                    if not queue.empty():
                        continue
                    if says is None:
                        return None
                    worker = says
                    if not worker and time.monotonic() > last:
                        return _lost(call, worker)
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
            now = sorted(_who(await self.workers(), plugin))
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
            keys = ("name", "digest", "contract", "version", "held")
            durable = each.get("durable")
            named = [_text(name) for name in durable] if isinstance(durable, list) else []
            row["plugins"].append({**{key: _text(each.get(key)) for key in keys}, "durable": named})
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
            taking = () if row["state"] != "ready" or each["held"] else (row["worker"],)
            held = each["held"] or known.held
            found[name, mark] = known._replace(workers=(*known.workers, *taking), held=held)
    # One that still takes calls is not held, whatever another worker says. Those come last, so that who knows
    # plugins by their names alone knows them.
    taken = (each._replace(held="") if each.workers else each for each in found.values())
    yield from sorted(taken, key=lambda each: len(each.workers))


def _matches(plugins: list[FleetPlugin], word: str) -> list[FleetPlugin]:
    if found := [each for each in plugins if each.name == word]:
        return found
    name, _, beginning = word.rpartition("@")
    return [each for each in plugins if name == each.name and each.digest.startswith(beginning)]


def _who(workers: Iterable[Mapping[str, Any]], plugin: FleetPlugin) -> set[tuple[str, float]]:
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
    return CallAnswer(
        STATUS[outcome.code], outcome_error(outcome, id=call.id, invocation=None, **more), headers
    )


def _lost(call: FleetCall, worker: str) -> CallAnswer:
    if not worker:
        message = "the fleet did not take the call; perhaps the connection was lost on the way"
    else:
        message = f"the worker {worker} was lost while the call ran, or its answer was"
    hint = "nobody knows what it did; with --durable the fleet would"
    return _failed(call, "crashed", "worker_lost", message, hint, execution_outcome="unknown")


def _no_answer(call: FleetCall, worker: str) -> CallAnswer:
    message = f"the worker {worker} answered with something that is no answer"
    return _failed(call, "internal", "no_answer", message, execution_outcome="unknown")


def _is_full(answer: CallAnswer) -> bool:
    """Whether the worker had no place. A plugin can choose the cause of its errors, and not their code."""
    error = answer.document.get("error", {}) if not answer.is_ok else {}
    return (error.get("code"), error.get("cause")) == ("overloaded", "no_slot")


def _json(raw: bytes) -> Any:
    try:
        return wire.decode(raw)
    except ValueError:
        return None


@asynccontextmanager
async def open_client(
    address: FleetAddress, *, say: Callable[[str], None] = lambda text: None, stays: bool = False
) -> AsyncIterator[FleetClient]:
    """Raises NoFleet."""
    async with connect(address, "runner client", say=say, stays=stays) as bus:
        client = FleetClient(bus)
        await client.begin()
        yield client

"""What operators look at and do: workers, queues and lag, dead letters, flags. On asyncio."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import nats.errors
import nats.js.errors
from nats.js.api import PeerInfo

from runner.fleet import names
from runner.fleet.client import FleetClient, FleetPlugin, plugins_of, who_has
from runner.fleet.clock import MOST_SECONDS, clock_words
from runner.fleet.connection import NoFleet, words_of
from runner.fleet.entries import FleetLedger
from runner.fleet.messages import encode_call, stored_call
from runner.fleet.shares import FleetShares
from runner.fleet.streams import NO_STREAMS, get_direct
from runner.lifecycle.feed import LOG_BYTES
from runner.protocol import wire
from runner.serve.refusal import Refused

_MOST_LETTERS = 1000
_MOST_BASE = 200  # characters of an id that is repeated
_PREFIX = "runner.dead."
_CLOSE_SECONDS = 30.0
_ASK_SECONDS = 10.0
_MOST_WORDS = 500


async def queues(client: FleetClient) -> dict[str, Any]:
    """Workers, and for each plugin what waits for it. Raises NoFleet."""
    workers = await client.workers()
    plugins = {each.digest: each for each in plugins_of(workers)}
    found = []
    try:
        for each in await client.js.consumers_info(names.CALLS):
            mark = each.name.removeprefix("plugin_")
            counts = {
                "waiting": each.num_pending,
                "begun": each.num_ack_pending,
                "again": each.num_redelivered,
            }
            found.append({**_queue(plugins.pop(mark, FleetPlugin("", mark))), **counts})
    except nats.js.errors.NotFoundError:
        raise NoFleet(NO_STREAMS.format(names.CALLS)) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the servers do not tell what waits: {words_of(error, client.nc)}") from None
    found += [{**_queue(each), "waiting": 0, "begun": 0, "again": 0} for each in plugins.values()]
    waiting = {each["digest"]: each["waiting"] for each in found}
    return {"at": time.time(), "workers": workers, "queues": found, "waiting": waiting}


def _queue(plugin: FleetPlugin) -> dict[str, Any]:
    held = {"workers": list(plugin.workers), "held": plugin.hold_words}
    return {"plugin": plugin.name, "digest": plugin.digest, **held}


async def overview(client: FleetClient) -> dict[str, Any]:
    """`queues`, how full the streams are, who has how much of them, and what is wrong with servers and this
    clock. For operators. Raises NoFleet."""
    found = await queues(client)
    streams = {}
    copies: dict[str, list[PeerInfo]] = {}  # by server: its copies that are not as they should be
    try:
        for stream in (names.CALLS, names.RECORDS, names.DEAD, names.AUDIT, f"KV_{names.LEDGER}"):
            info = await client.js.stream_info(stream)
            most = {"most_bytes": info.config.max_bytes, "most_messages": info.config.max_msgs}
            streams[stream] = {"messages": info.state.messages, "bytes": info.state.bytes, **most}
            for each in (info.cluster.replicas if info.cluster is not None else None) or ():
                if each.offline or not each.current:
                    copies.setdefault(each.name or "?", []).append(each)
        shares = FleetShares(client.js)
        await shares.read()
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the servers do not tell how full the streams are: {words_of(error)}") from None
    faults = [_server_words(name, copies[name]) for name in sorted(copies)]
    if client.behind > MOST_SECONDS:
        faults.append(f"the clock of this machine is {clock_words(-client.behind)}, or more")
    return {**found, "streams": streams, "submitters": shares.used(), "faults": faults}


def _server_words(name: str, copies: list[PeerInfo]) -> str:
    streams = f"{len(copies)} stream{'s' * (len(copies) != 1)}"
    if any(each.offline for each in copies):
        return f"the NATS server {name} is away: it has a copy of {streams}"
    silent = max((each.active or 0) / 1e9 for each in copies)
    return f"the NATS server {name} was last heard {silent:.0f} s ago, or lags: its copy of {streams} is old"


async def remove_waiting(client: FleetClient, user: str) -> None:
    """Remove all durable calls of a user that wait. Raises Refused and NoFleet."""
    if not names.is_token(user):
        raise Refused(400, "invalid_name", f"{user[:200]!a} is not the name of a submitter")
    try:
        await client.js.purge_stream(names.CALLS, subject=names.durable(user, "*"))
    except nats.js.errors.NotFoundError:
        raise NoFleet(NO_STREAMS.format(names.CALLS)) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the calls that wait were not removed: {words_of(error)}") from None


async def dead_letters(client: FleetClient) -> list[dict[str, Any]]:
    """Without the calls themselves. Raises NoFleet."""
    try:
        info = await client.js.stream_info(names.DEAD, subjects_filter=">")
        found = [
            await get_direct(client.js, names.DEAD, subject)
            for subject in sorted(info.state.subjects or {})[:_MOST_LETTERS]
        ]
    except nats.js.errors.NotFoundError:
        raise NoFleet(NO_STREAMS.format(names.DEAD)) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the dead letters cannot be read: {words_of(error)}") from None
    letters = []
    for each in found:
        letter = _letter(each.data, (each.subject or "").removeprefix(_PREFIX))
        call = letter.pop("call")
        letters.append({**letter, "tool": call["tool"] if isinstance(call.get("tool"), str) else ""})
    return sorted(letters, key=lambda letter: letter["at"])


def _letter(raw: bytes | None, word: str) -> dict[str, Any]:
    """A dead letter in a known shape: a worker may write anything into it. Who submitted it is in its name,
    and `call` is {} if it has none."""
    try:
        found = wire.decode(raw or b"{}")
    except ValueError as error:
        found = {"reason": f"this dead letter cannot be read: {error}"}
    found = found if isinstance(found, dict) else {}
    call, at = found.get("call"), found.get("at")
    shaped = {
        "user": word.partition(".")[0],
        "letter": word,
        "call": call if isinstance(call, dict) else {},
        "at": at if isinstance(at, int | float) else 0.0,
    }
    return {**found, **shaped}


async def dead_letter(client: FleetClient, word: str) -> dict[str, Any]:
    """One, with its call: by USER.ID as the list shows it. Raises Refused and NoFleet."""
    user, _, key = word.partition(".")
    if not names.is_token(user) or not names.is_token(key):
        raise Refused(400, "invalid_letter", f"{word[:200]!a} is not the name of a dead letter: USER.ID")
    try:
        found = await client.js.get_msg(names.DEAD, subject=names.dead(user, key))  # the leader's
    except nats.js.errors.NotFoundError:
        hint = "runner ctl dead lists them"
        raise Refused(404, "no_such_letter", f"there is no dead letter {word}", hint) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the dead letter cannot be read: {words_of(error)}") from None
    return {**_letter(found.data, word), "number": found.seq or 0}


async def repeat(client: FleetClient, word: str) -> str:
    """Submit the call of a dead letter once more, for its user, with a new id and deadline, and close the
    letter. Returns the id. Raises Refused and NoFleet."""
    letter = await dead_letter(client, word)
    call = stored_call(letter.get("call"))
    digest = letter.get("digest")
    if call is None or not isinstance(digest, str) or not names.is_token(digest):
        message = "the letter has no call: it was none, or too large to be kept"
        raise Refused(409, "no_call", message, f"runner ctl close {word} --fleet URL closes it")
    if all(each.digest != digest for each in await client.plugins()):
        # Nobody would begin it, and nobody would say so.
        message = f"no worker has the plugin of this letter any more: {digest[:12]}"
        raise Refused(409, "unknown_plugin", message, "start a worker that has it, or close the letter")
    user, _, key = letter["letter"].partition(".")
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            found = await FleetLedger(client.js).read(user, key)
    except TimeoutError as error:
        raise NoFleet(f"the ledger of the fleet cannot be read: {words_of(error)}") from None
    if found is not None and found.entry.ended != letter["at"]:
        message = "the call of this letter was submitted again since it ended"
        raise Refused(
            409, "submitted_again", message, f"runner ctl close {word} --fleet URL closes the letter"
        )
    span = min(max(call.seconds or 0.0, names.USUAL_SECONDS), names.MOST_SECONDS)
    base = call.id.partition("~again")[0][:_MOST_BASE]
    # By the letter's own number: who repeats it a second time, or at the same time, gets the same call.
    new = call._replace(id=f"{base}~again{letter['number']}", deadline=time.time() + span)
    headers = {"Nats-Msg-Id": names.message_id(user, new.id, client.address.salt)}
    try:
        await client.js.publish(names.durable(user, digest), encode_call(new), headers=headers)
        await client.nc.publish(names.hint(digest), b"")
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the call was not stored: {words_of(error)}") from None
    await _close(client, letter, {"repeated_as": new.id})
    return new.id


async def close(client: FleetClient, word: str, reason: str) -> None:
    """Close a dead letter without repeating its call. Raises Refused and NoFleet."""
    await _close(client, await dead_letter(client, word), {"reason": reason or "by an operator"})


async def _close(client: FleetClient, letter: dict[str, Any], how: dict[str, str]) -> None:
    """The ledger says that the call is no dead letter any more, so that no worker writes it again. Then the
    audit has the letter's end, and the letter is removed. Raises NoFleet."""
    user, _, key = letter["letter"].partition(".")
    told = {name: str(letter.get(name))[:_MOST_WORDS] for name in ("letter", "plugin", "code")}
    row = {"at": time.time(), "operator": client.address.user, "what": "closed", "dead_letter": told, **how}
    ledger = FleetLedger(client.js)
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            while (found := await ledger.read(user, key)) is not None and found.entry.dead is not None:
                await ledger.write(user, key, found.entry._replace(dead=None), found.revision)
            await client.js.publish(names.audit(client.address.user), json.dumps(row).encode())
            try:
                await client.js.delete_msg(names.DEAD, letter["number"])
            except nats.js.errors.APIError:
                there = await client.js.get_msg(names.DEAD, subject=names.dead(user, key))
                if there.seq == letter["number"]:
                    raise
    except nats.js.errors.NotFoundError:
        pass  # somebody else closed it
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the dead letter was not closed: {words_of(error)}") from None


async def ask_workers(
    client: FleetClient, what: str, name: str, worker: str | None, tell: Callable[[str, str], None]
) -> dict[str, str]:
    """Ask the workers that have a plugin, or one of them, for its stderr (`logs`) or to `reset` it. `tell`
    gets each worker's name and its answer: the text, or the plugin's state. Returns why others did not
    answer. Raises Refused and NoFleet."""
    plugin = await client.find(name)
    known = sorted(each for each, _ in who_has(await client.workers(), plugin) if names.is_token(each))
    if worker is not None and worker not in known:
        message = f"the worker {worker[:200]!a} has no plugin {name[:200]!a}; {', '.join(known)} have it"
        raise Refused(404, "unknown_worker", message, "runner ps --fleet lists the workers")
    failed = {}
    for each in known if worker is None else [worker]:
        try:
            answer = await client.nc.request(names.operate(what, each, plugin.digest), timeout=_ASK_SECONDS)
        except (nats.errors.Error, TimeoutError) as error:
            hint = "is it of this version, and have its user and yours the permissions of this version"
            failed[each] = f"it does not answer ({words_of(error)}); {hint} (policies/nats/fleet.conf)?"
            continue
        try:
            found = wire.decode(answer.data)
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        text = found.get("text" if what == "logs" else "state")
        if isinstance(text, str):
            tell(each, text[-LOG_BYTES:])  # a worker may say anything
        else:
            failed[each] = str(found.get("error", "it answered with something else"))[:_MOST_WORDS]
    return failed


async def set_flag(client: FleetClient, flag: str, reason: str | None) -> None:
    """`reason` None: take the flag away. Raises NoFleet."""
    headers = {"KV-Operation": "DEL"} if reason is None else None
    subject = names.entry(names.FLAGS, flag)
    try:
        await client.js.publish(subject, (reason or "").encode(), headers=headers)
    except nats.js.errors.NoStreamResponseError:
        raise NoFleet(NO_STREAMS.format(f"KV_{names.FLAGS}")) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise NoFleet(f"the flag was not set: {words_of(error)}") from None


async def hold(client: FleetClient, action: str, name: str, reason: str) -> None:
    """Quarantine a plugin (by its name in the fleet), drain a worker, or release whichever has the name.
    Raises Refused and NoFleet."""
    if action == "drain":
        if not names.is_token(name):
            raise Refused(400, "invalid_name", f"{name[:200]!a} is not the name of a worker")
        await set_flag(client, f"drain.{name}", reason or "by an operator")
        return
    if action == "quarantine":
        await set_flag(client, f"quarantine.{(await client.find(name)).digest}", reason or "by an operator")
        return
    if names.is_token(name) and any(each.get("worker") == name for each in await client.workers()):
        await set_flag(client, f"drain.{name}", None)
    else:
        await set_flag(client, f"quarantine.{(await client.find(name)).digest}", None)

"""The streams and buckets of a fleet. An operator makes them; nobody else may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RawStreamMsg,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.client import JetStreamContext

from runner.fleet import names
from runner.fleet.connection import API_SECONDS, NoFleet, words_of

_DAY = 86400.0
_MOST_KEYS = 2000
_PAUSE_SECONDS = 0.5
_DIRECT_SECONDS = (0.5, 0.5, 1.0, 1.0, 2.0)  # for each try
_AT_ONCE = 32  # messages that are asked for
_SAFE_IN_CLUSTERS = (2, 10)
NO_STREAM_CODE = 10059  # of the servers' answer: not of one that a message is missing
NO_STREAMS = "the servers have no stream {}; make it with runner ctl init --fleet URL"


class FleetSizes(NamedTuple):
    replicas: int | None = None  # None: as many as there are, and one at first
    megabytes: int = 1024  # of calls that wait; the ledger and the records have as much, others a quarter
    calls: int = 100_000  # that wait


def stream_configs(sizes: FleetSizes) -> list[StreamConfig]:
    most = sizes.megabytes << 20

    def bucket(name: str, **more: Any) -> StreamConfig:
        """As clients of NATS make a bucket."""
        return StreamConfig(
            name=f"KV_{name}",
            subjects=[names.entry(name, ">")],
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
            deny_delete=True,
            allow_direct=True,
            discard=DiscardPolicy.NEW,
            duplicate_window=10.0,
            num_replicas=sizes.replicas or 1,
            **more,
        )

    def kept(name: str, subject: str, days: int, size: int, **more: Any) -> StreamConfig:
        return StreamConfig(
            name=name,
            subjects=[subject],
            max_age=days * _DAY,
            max_bytes=size,
            max_msg_size=1 << 20,
            duplicate_window=120.0,
            storage=StorageType.FILE,
            num_replicas=sizes.replicas or 1,
            **more,
        )

    # Longer than a deadline may be: a call is ended by its deadline, not by its age.
    calls = kept(names.CALLS, names.durable("*", "*"), 7, most, max_msgs=sizes.calls)
    calls.retention, calls.discard = RetentionPolicy.WORK_QUEUE, DiscardPolicy.NEW
    # Ended longer ago than any call can wait in the stream, so that no call is begun a second time.
    ledger = bucket(names.LEDGER, max_age=14 * _DAY, max_bytes=most, max_msg_size=1 << 20)
    return [
        calls,
        # A record that is published again replaces itself: one for each call.
        kept(names.RECORDS, names.record("*", "*"), 30, most, max_msgs_per_subject=1),
        kept(names.DEAD, names.dead("*", "*"), 30, most // 4, max_msgs_per_subject=1, allow_direct=True),
        kept(names.AUDIT, names.audit("*"), 30, most // 4),
        ledger,
        # In memory, and replicated like all: workers write them again every few seconds.
        bucket(names.WORKERS, max_age=names.GONE_SECONDS, storage=StorageType.MEMORY, max_bytes=64 << 20),
        bucket(names.FLAGS, max_bytes=4 << 20, max_msg_size=4096),
        bucket(names.SHARES, max_age=31 * _DAY, max_bytes=4 << 20, max_msg_size=4096),
    ]


def store_words(configs: Sequence[StreamConfig]) -> str:
    """What the servers set aside when the streams are made."""
    sizes = {StorageType.FILE: 0, StorageType.MEMORY: 0}
    for each in configs:
        sizes[each.storage or StorageType.FILE] += each.max_bytes or 0
    disk, memory = (-(-size >> 20) for size in sizes.values())
    return f"{disk} MiB of disk (max_file_store) and {memory} MiB of memory (max_memory_store)"


async def make_streams(nc: NatsClient, sizes: FleetSizes) -> list[str]:
    """Make what is missing, and change what differs. Returns a line about each, one about the room that they
    take, and one about servers that are too old. Raises NoFleet."""
    js, told, replicas = nc.jetstream(timeout=API_SECONDS), [], sizes.replicas
    configs = stream_configs(sizes)
    room = store_words(configs)
    for config in configs:
        name = config.name or ""
        try:
            try:
                there = (await js.stream_info(name)).config.num_replicas or 1
            except nats.js.errors.NotFoundError:
                there = 0
            replicas = sizes.replicas or there or replicas
            config.num_replicas = replicas or 1
            await (js.update_stream if there else js.add_stream)(config)
            told.append(f"{name}: {'there' if there else 'made'}")
        except (nats.errors.Error, TimeoutError) as error:
            hint = f"are as many servers as --replicas says up, and has each {room}?"
            raise NoFleet(f"the stream {name} cannot be made: {words_of(error)}; {hint}") from None
    told.append(f"room: the streams take up to {room} of each server that has them")
    found = nc.connected_server_version
    if (replicas or 1) > 1 and (found.major, found.minor) < _SAFE_IN_CLUSTERS:
        told.append(
            f"warning: nats-server {found.major}.{found.minor}.{found.patch} can lose a stream of a cluster"
            " when one of the servers is killed; use 2.10 or later (docs/fleet.md)"
        )
    return told


async def require_streams(js: JetStreamContext, *wanted: str, seconds: float = 0.0) -> None:
    """Raises NoFleet if one is missing, or if the servers do not answer for so long: they choose a leader."""
    last = time.monotonic() + seconds
    for name in wanted:
        while True:
            try:
                await js.stream_info(name)
                break
            except nats.js.errors.NotFoundError:
                raise NoFleet(NO_STREAMS.format(name)) from None
            except (nats.errors.Error, TimeoutError) as error:
                if time.monotonic() > last:
                    hint = "has this user the permissions of this version (policies/nats/fleet.conf)?"
                    message = f"the servers do not tell about the stream {name}: {words_of(error)}; {hint}"
                    raise NoFleet(message) from None
            await asyncio.sleep(_PAUSE_SECONDS)


def consumer_config(digest: str) -> ConsumerConfig:
    """One for all workers that have the plugin. A message without a sign of life is delivered again."""
    return ConsumerConfig(
        durable_name=names.consumer(digest),
        filter_subject=names.durable("*", digest),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=names.LOST_SECONDS,
        max_deliver=-1,
        max_ack_pending=5000,
        max_waiting=512,
    )


async def read_bucket(js: JetStreamContext, bucket: str) -> dict[str, bytes]:
    """What is in a small bucket, by key. Raises nats.errors.Error and TimeoutError."""
    found = await read_messages(js, bucket, direct=False)
    return {key: message.data or b"" for key, message in found.items()}


async def read_messages(js: JetStreamContext, bucket: str, direct: bool) -> dict[str, RawStreamMsg]:
    """As `read_bucket`, with the time at which the servers stored each. `direct`: from any server, which may
    not have the last change yet."""
    stream, prefix = f"KV_{bucket}", names.entry(bucket, "")

    async def read(subject: str) -> RawStreamMsg | None:
        try:
            found = await (get_direct(js, stream, subject) if direct else js.get_msg(stream, subject=subject))
        except nats.js.errors.NotFoundError:
            return None
        return None if (found.headers or {}).get("KV-Operation") else found

    info = await js.stream_info(stream, subjects_filter=">")
    subjects = sorted(info.state.subjects or {})[:_MOST_KEYS]
    messages: list[RawStreamMsg | None] = []
    while len(messages) < len(subjects):
        some = subjects[len(messages) : len(messages) + _AT_ONCE]
        messages += await asyncio.gather(*map(read, some))
    pairs = zip(subjects, messages, strict=True)
    return {subject.removeprefix(prefix): found for subject, found in pairs if found is not None}


async def get_direct(js: JetStreamContext, stream: str, subject: str) -> RawStreamMsg:
    """The last message of a subject, from any server. Servers pass such questions on to one that has stopped
    until they notice that (after 85 s, if nobody told them to look more often), so that one without an answer
    is asked again. Raises nats.errors.Error and TimeoutError."""
    for seconds in _DIRECT_SECONDS:
        try:
            async with asyncio.timeout(seconds):
                return await js.get_msg(stream, subject=subject, direct=True)
        except TimeoutError:
            pass
    raise TimeoutError("timeout")

"""Subjects, streams and bounds of a fleet. docs/fleet.md has the same in a table."""

from __future__ import annotations

import hashlib
import hmac
import re

CALLS = "RUNNER_CALLS"
RECORDS = "RUNNER_RECORDS"
DEAD = "RUNNER_DEAD"
AUDIT = "RUNNER_AUDIT"
LEDGER = "runner_calls"  # buckets
WORKERS = "runner_workers"
FLAGS = "runner_flags"
SHARES = "runner_shares"

BEAT_SECONDS = 5.0  # between signs of life of a worker, and of a call that it runs
LOST_SECONDS = 15.0  # without one: a call is free for other workers
GONE_SECONDS = 20.0  # without one: a worker is not listed
MOST_BODY_BYTES = 512 << 10  # of a call, and of its answer: twice fits into a message of NATS (1 MiB)
MOST_ATTEMPTS = 5
OPERATED = ("logs", "reset")  # what operators ask workers about plugins
MOST_FILLED = 0.9  # of the ledger, before no durable call begins: those that run need room for their ends
MOST_SECONDS = 86400.0  # until a deadline
USUAL_SECONDS = 3600.0
GROUP = "workers"  # the queue group: each call goes to one of them
TRIAL = "disk=trial"  # in the ledger's bucket, in the place of a user, who cannot have this name
COPY = "Runner-Copy"  # the header that tells apart the copies of a waited call that is sent again
SUBMISSION = "Runner-Submission"  # the header that all copies of a durable call have that was submitted once
# What callers and operators read about a plugin that a worker has given up.
QUARANTINE_HINT = "an operator sees why with runner logs --fleet, and ends it with runner ctl reset --fleet"

# A part of a subject. A submitter's name is one, so that the server's permissions can be about it.
_TOKEN = re.compile(r"[A-Za-z0-9_~@-]{1,128}")


def is_token(text: str) -> bool:
    return _TOKEN.fullmatch(text) is not None


def key_of(call: str) -> str:
    """The part of subjects that stands for the id of a call, which may have any characters."""
    return call if is_token(call) else f"h~{hashlib.sha256(call.encode()).hexdigest()}"


def message_id(user: str, call: str, salt: bytes) -> str:
    """The Nats-Msg-Id of a call. Nobody without the salt can use it first, and make the server drop the
    call as a repetition."""
    mark = hmac.new(salt, f"{user}.{call}".encode(), hashlib.sha256).hexdigest()[:24]
    return f"{key_of(call)}.{mark}"


def waited(user: str, digest: str) -> str:
    return f"runner.call.{user}.{digest}"


def durable(user: str, digest: str) -> str:
    return f"runner.durable.{user}.{digest}"


def hint(digest: str) -> str:
    """A durable call was stored."""
    return f"runner.hint.{digest}"


def cancel(user: str, key: str) -> str:
    return f"runner.cancel.{user}.{key}"


def progress(user: str, key: str) -> str:
    return f"runner.progress.{user}.{key}"


def done(user: str, key: str) -> str:
    """A durable call has ended: its entry in the ledger has the answer."""
    return f"runner.done.{user}.{key}"


def ask(worker: str, user: str, key: str) -> str:
    """Whether a worker runs a call."""
    return f"runner.ask.{worker}.{user}.{key}"


def operate(what: str, worker: str, digest: str) -> str:
    """An operator asks a worker about a plugin: `logs` is its stderr, `reset` ends its quarantine."""
    return f"runner.{what}.{worker}.{digest}"


def record(user: str, key: str) -> str:
    return f"runner.records.{user}.{key}"


def dead(user: str, key: str) -> str:
    return f"runner.dead.{user}.{key}"


def audit(worker: str) -> str:
    return f"runner.audit.{worker}"


def entry(bucket: str, key: str) -> str:
    """The subject of an entry of a bucket."""
    return f"$KV.{bucket}.{key}"


def consumer(digest: str) -> str:
    return f"plugin_{digest}"

"""The record that each call by a binding leaves: what was called, for whom, how it ended, what it was given
and what it used. No input, no output and no secret is in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from runner.ledger.rows import cut
from runner.outcome import outcome_document
from runner.protocol.dialect import CallEnd
from runner.serve.answers import read_moment
from runner.serve.control.database import MOST_ROWS, BindingRow, RecordRow
from runner.serve.refusal import Refused
from runner.session.account import CallAccount

STATUSES = ("succeeded", "failed", "cancelled", "retryable_failure")
_MOST_BYTES = 64 << 10  # of one record: a plugin says how long some parts are
_LARGE_PARTS = ("late", "checkpoint", "stderr_tail")  # that are left out of a longer one, one after the other
_TOLD = ("code", "phase", "cause", "message")  # of an outcome
_SHORT = 500  # characters, of which each may take twelve bytes in JSON
_GRANTED = ("policy", "network", "scratch", "seccomp", "limits", "unsandboxed")
_MOST_QUERY = 256  # characters of a value


def record_row(
    call: str,
    binding: BindingRow,
    invocation: Mapping[str, Any],
    end: CallEnd,
    account: CallAccount | None,
    input_bytes: int,
) -> RecordRow:
    """The record of a call. `invocation`: the contract's own. `call`: the id that the daemon gave it, since
    what a caller says about itself must not decide which record is written."""
    report: Mapping[str, Any] = (account.report if account is not None else None) or {}
    outcome = outcome_document(end.outcome)
    document = {
        **invocation,
        # Of a call that was refused, the contract's record has what the caller said.
        "invocation_id": call,
        "binding_id": binding.id,
        "org_id": binding.org,
        "project_id": binding.project or invocation["project_id"],
        "started_at": _rfc3339(end.began),
        "ended_at": _rfc3339(end.ended),
        "binding_revision": binding.revision,
        "outcome": {key: cut(outcome[key]) for key in _TOLD},
        "granted": _chosen(report.get("grant"), _GRANTED),
        "exit": _chosen(report.get("exit"), ("code", "signal", "ended_by", "forced")),
        "usage": _usage(report, input_bytes),
        "stderr_tail": "" if account is None else account.stderr,
    }
    for part in ("", *_LARGE_PARTS, "outcome"):
        if part == "outcome":  # of it, the beginnings stay
            document[part] = {key: outcome[key][:_SHORT] for key in _TOLD}
        elif part:
            document[part] = None
        if part:
            document["left_out"] = [*document.get("left_out", ()), part]
        text = json.dumps(document)
        if len(text) <= _MOST_BYTES:
            break
    return RecordRow(
        invocation=call,
        started=end.began,
        ended=end.ended,
        status=invocation["status"],
        binding=binding.id,
        org=binding.org,
        project=binding.project,
        kind=binding.kind,
        export=binding.export,
        package=binding.package,
        document=text,
    )


def _rfc3339(seconds: float) -> str:
    """RFC 3339, in UTC, with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _chosen(found: Mapping[str, Any] | None, keys: tuple[str, ...]) -> dict[str, Any] | None:
    return None if found is None else {key: found.get(key) for key in keys}


def _usage(report: Mapping[str, Any], input_bytes: int) -> dict[str, Any]:
    """null: nothing ran, or the process lives on and its share of this call is not known."""
    used = report.get("usage") or {}
    said = report.get("session") or {}
    return {
        "cpu_user": used.get("cpu_user"),
        "cpu_system": used.get("cpu_system"),
        "max_rss": used.get("max_rss"),
        "bytes_in": input_bytes,
        "bytes_out": said.get("stdout_bytes"),
    }


# --- questions ----------------------------------------------------------------------------------------------


class RecordQuery(NamedTuple):
    since: float | None = None
    until: float | None = None
    binding: str | None = None
    status: str | None = None
    before: int | None = None
    most: int = 100
    org: str | None = None


def read_query(given: Mapping[str, str]) -> RecordQuery:
    """The query of a request. Raises Refused."""
    known = ("since", "until", "binding", "status", "limit", "after", "org")
    for key, value in given.items():
        if key not in known or len(value) > _MOST_QUERY:
            raise _wrong(
                f"{key[:60]!a} is not a key of this query, or too long: there are {', '.join(known)}"
            )
    status = given.get("status")
    if status not in (None, *STATUSES):
        raise _wrong(f"status is one of {', '.join(STATUSES)}")
    return RecordQuery(
        read_moment(given, "since"),
        read_moment(given, "until"),
        given.get("binding"),
        status,
        _number(given, "after", None),
        min(_number(given, "limit", 100) or 1, MOST_ROWS),
        given.get("org"),
    )


def _number(given: Mapping[str, str], key: str, default: int | None) -> int | None:
    word = given.get(key)
    if word is None:
        return default
    if not re.fullmatch(r"\d{1,15}", word, re.ASCII):
        raise _wrong(f"{key} is not a number")
    return int(word)


def _wrong(message: str) -> Refused:
    return Refused(400, "invalid_query", message)

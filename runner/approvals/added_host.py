"""A host that a person allows a running plugin, beside what was allowed before."""

from __future__ import annotations

import time
from collections.abc import Mapping

from runner.approvals.files import require_safe_code, write_record
from runner.approvals.record import (
    ApprovalRecord,
    ApprovalsUnusable,
    asked_of,
    digest_of,
    key_of,
    with_program,
)
from runner.approvals.store import find_approval
from runner.plugin import Plugin
from sandbox.policy.approval import join_approvals
from sandbox.spec import Approval


def add_host(plugin: Plugin, host: str, environ: Mapping[str, str], places: Mapping[str, str]) -> None:
    """`places`: the environment that says where approvals are. Raises ApprovalsUnusable: also if nobody has
    looked yet at what the plugin asks for, because an approval says yes to that."""
    key = key_of(plugin)
    if key is None:
        raise ApprovalsUnusable("this plugin has no name to allow something by", "")
    key, code = with_program(key, plugin, environ)
    require_safe_code(code)
    old = find_approval(key, places, code)
    if old is None and not asked_of(plugin).is_empty:
        raise ApprovalsUnusable("nobody has looked yet at what this plugin asks for", "")
    record = old or ApprovalRecord(key, Approval(), digest=digest_of(plugin))
    added = join_approvals(record.added, Approval(network="allowlist", hosts=(host,)))
    write_record(record._replace(added=added, when=time.time()), places)

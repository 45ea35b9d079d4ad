"""`runner check` of a policy: whether a file is one, and all that is wrong with it."""

from __future__ import annotations

import os
import re

from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.read import read_bounded
from sandbox.policy.load import policy_names, untrustworthy
from sandbox.policy.parse import parse_policy
from sandbox.policy.schema import policy_schema

_FILE_NAME = "policy.toml"
_VERSION = re.compile(rb"^[ \t]*version[ \t]*=[ \t]*1[ \t]*(#.*)?\r?$", re.MULTILINE)
_TABLE = re.compile(rb"^[ \t]*\[[ \t]*([A-Za-z_]+)[ \t]*[.\]]", re.MULTILINE)


def is_policy(path: str) -> bool:
    """Whether a file is a policy: by its name, or by its version and tables. It may have faults, so only its
    lines are looked at."""
    if not path.endswith(".toml") or os.path.isdir(path):
        return False
    folder, name = os.path.split(os.path.realpath(path))
    if name == _FILE_NAME or (name.removesuffix(".toml") in policy_names() and folder.endswith("/policies")):
        return True
    from runner.manifest.load import contract_at

    try:
        raw = read_bounded(path)
    except DocumentError:
        return False  # reading it as a manifest reports why
    tables = {each.decode() for each in _TABLE.findall(raw)}
    # A table that no policy has is the sign of something else, or one that is spelt wrong among others.
    known = tables & set(policy_schema()["properties"])
    return bool(_VERSION.search(raw)) and len(known) * 2 > len(tables) and contract_at(path) is None


def policy_faults(path: str) -> tuple[Diagnostic, ...]:
    """All faults, and a warning if a launch would not trust the file."""
    absolute = os.path.abspath(path)
    try:
        parse_policy(absolute, read_bounded(absolute), name=absolute)
    except DocumentError as error:
        return error.diagnostics
    fault = untrustworthy(absolute)
    if fault is None:
        return ()
    reason, hint = fault
    return (Diagnostic(absolute, 0, 0, "policy_untrusted", reason, hint, "warning"),)

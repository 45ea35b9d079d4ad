"""A policy that `runner check` is given: whether a file is one, and what is wrong with it."""

from __future__ import annotations

import os
import re

from runner.manifest.load import contract_at
from sandbox.document.diagnostic import Diagnostic, DocumentError
from sandbox.document.read import read_bounded
from sandbox.policy.load import policy_names, read_policy, trust_fault

_FILE_NAME = "policy.toml"
# Tables that other files do not have: without a version, a policy is known by them, or by keys in the others.
_OWN_TABLES = ("approvals", "capabilities", "cgroups", "layers", "limits", "read", "seccomp", "write")
_VERSION = re.compile(rb"^[ \t]*version[ \t]*=[ \t]*1[ \t]*(#.*)?\r?$", re.MULTILINE)
_TABLE = re.compile(rb"^[ \t]*\[[ \t]*([A-Za-z_]+)[ \t]*[.\]]", re.MULTILINE)
_KEY = re.compile(rb"^[ \t]*([a-z_]+)[ \t]*=", re.MULTILINE)


def is_policy(path: str) -> bool:
    """Whether a file is a policy: by its name, by its version and most of its tables, or by all of them. It
    may have faults, so only its lines are looked at."""
    if not path.endswith(".toml") or os.path.isdir(path):
        return False
    folder, name = os.path.split(os.path.realpath(path))
    if name == _FILE_NAME or (name.removesuffix(".toml") in policy_names() and folder.endswith("/policies")):
        return True
    try:
        raw = read_bounded(path)
    except DocumentError:
        return False  # reading it as a manifest reports why
    if contract_at(path) is not None:
        return False
    # Imported here: the model of a policy takes as long as all else that `check` does.
    from sandbox.policy.tables import policy_schema

    tables = {each.decode() for each in _TABLE.findall(raw)}
    # A table that no policy has means another kind of file, unless other tables are those of a policy.
    schema = policy_schema()["properties"]
    known = tables & set(schema)
    if _VERSION.search(raw):
        likely = len(known) * 2 > len(tables)
    else:
        own = {*_OWN_TABLES, *(key for table in known for key in schema[table].get("properties", ()))}
        keys = {each.decode() for each in _KEY.findall(raw)}
        likely = known == tables and not own.isdisjoint(tables | keys)
    return likely


def policy_faults(path: str) -> tuple[Diagnostic, ...]:
    """All faults, and a warning if a launch would not trust the file."""
    absolute = os.path.abspath(path)
    try:
        read_policy(absolute, absolute)  # which stores it, so that the next launch need not read it
    except DocumentError as error:
        return error.diagnostics
    fault = trust_fault(absolute)
    if fault is None:
        return ()
    reason, hint = fault
    return (Diagnostic(absolute, 0, 0, "policy_untrusted", reason, hint, "warning"),)

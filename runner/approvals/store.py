"""Finds approvals: one file for each plugin, in the person's own configuration directory.

These files decide what plugins get. No plugin is given the folder, and a file that others than its owner
could have written stops the launch.
"""

from __future__ import annotations

import os

from runner.approvals.record import ENDING, NOTIFIED, ApprovalKey, ApprovalRecord, approvals_folder
from sandbox import look
from sandbox.speed.typed import Mapping, Sequence


def find_approval(
    key: ApprovalKey, environ: Mapping[str, str], code: Sequence[str] = ()
) -> ApprovalRecord | None:
    """The approval of this plugin, or None. `code`: the files that it runs. Raises ApprovalsUnusable."""
    folder = approvals_folder(environ)
    if folder is None or not look.lexists(os.path.join(folder, key.name + ENDING)):
        return None
    from runner.approvals.files import read_record, require_safe_code

    record = read_record(os.path.join(folder, key.name + ENDING), key)
    require_safe_code(code)
    return record


def was_notified(key: ApprovalKey, environ: Mapping[str, str]) -> bool:
    """Whether the person was told that an approval of version 1 is not valid any more. If not, write a mark,
    so that the next call returns True. Where nothing can be written, it is False each time."""
    folder = approvals_folder(environ)
    path = os.path.join(folder or "/", NOTIFIED + key.stem)
    if look.lexists(path):
        return True
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError:
        pass
    return False


def has_any_approval(key: ApprovalKey, environ: Mapping[str, str]) -> bool:
    """Whether there is an approval of this plugin with any program."""
    return bool(_all(key, environ))


def _all(key: ApprovalKey, environ: Mapping[str, str]) -> list[str]:
    folder = approvals_folder(environ)
    try:
        names = [] if folder is None else look.listdir(folder)
    except OSError:  # there is none, or nothing in it can be read
        return []
    return [name for name in names if name.endswith(key.stem + ENDING) and name[0] != "."]


def find_inapplicable(key: ApprovalKey, environ: Mapping[str, str]) -> ApprovalRecord | None:
    """An approval of the same plugin that does not apply: it is for another program, or of version 1, which
    named no program. Raises ApprovalsUnusable."""
    names = sorted(name for name in _all(key, environ) if name != key.name + ENDING)
    folder = approvals_folder(environ)
    if not names or folder is None:
        return None
    from runner.approvals.files import read_file

    return read_file(os.path.join(folder, names[0]))

"""Where approvals are kept: one file for each plugin, in the person's own configuration directory.

Only its owner may be able to change it: these files decide what plugins get. No plugin is given the folder,
and a file that others could have written stops the launch.
"""

from __future__ import annotations

import os

from runner.approvals.record import ENDING, TOLD, ApprovalKey, ApprovalRecord, approvals_folder
from sandbox import look
from sandbox.speed.typed import Mapping, Sequence


def find_approval(
    key: ApprovalKey, environ: Mapping[str, str], code: Sequence[str] = ()
) -> ApprovalRecord | None:
    """The person's yes to this plugin; None if there is none. `code`: the files that it runs. Raises
    ApprovalsUnusable."""
    folder = approvals_folder(environ)
    if folder is None or not look.lexists(os.path.join(folder, key.name + ENDING)):
        return None
    from runner.approvals.files import read_record, require_safe_code

    record = read_record(os.path.join(folder, key.name + ENDING), key)
    require_safe_code(code)
    return record


def is_told(key: ApprovalKey, environ: Mapping[str, str]) -> bool:
    """Whether a person was told that a yes of the first version does not count. If not, they are told now,
    and the next question is answered with True. Where nothing can be written they are told each time."""
    folder = approvals_folder(environ)
    path = os.path.join(folder or "/", TOLD + key.stem)
    if look.lexists(path):
        return True
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError:
        pass
    return False


def is_any(key: ApprovalKey, environ: Mapping[str, str]) -> bool:
    """Whether there is a yes to this plugin, for whichever program."""
    return bool(_all(key, environ))


def _all(key: ApprovalKey, environ: Mapping[str, str]) -> list[str]:
    folder = approvals_folder(environ)
    try:
        names = [] if folder is None else look.listdir(folder)
    except OSError:  # there is none, or nothing in it can be read
        return []
    return [name for name in names if name.endswith(key.stem + ENDING) and name[0] != "."]


def passed_over(key: ApprovalKey, environ: Mapping[str, str]) -> ApprovalRecord | None:
    """The person's yes to the same plugin with another program, or by the first version of these files, which
    named none. It does not count. Raises ApprovalsUnusable."""
    names = sorted(name for name in _all(key, environ) if name != key.name + ENDING)
    folder = approvals_folder(environ)
    if not names or folder is None:
        return None
    from runner.approvals.files import read_file

    return read_file(os.path.join(folder, names[0]))

"""The file of one approval: checked, read, written and removed.

Its content is validated as untrusted input. That is not enough: a user who can write to the file can approve
anything. So a file is refused if others than its owner and root could have changed it, or if it is about
another plugin than its name says.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager, suppress
from typing import Any

from runner.approvals.record import (
    ENDING,
    NOTIFIED,
    VERSION,
    ApprovalKey,
    ApprovalRecord,
    ApprovalsUnusable,
    approvals_folder,
)
from sandbox import look
from sandbox.files import replace_file
from sandbox.paths.denied_paths import lexical_fault, normal
from sandbox.policy.load import trust_fault
from sandbox.spec import NETWORK_ORDER, SECCOMP_ORDER, Approval, is_variable_name
from sandbox.speed.typed import Iterator, Mapping, Sequence
from sandbox.speed.value import NamedTuple

_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 4096  # of one list
_LONGEST = 8192  # of one text
_LOCK = ".lock"
_LOCK_SECONDS, _PAUSE_SECONDS = 30.0, 0.02
_DIGEST = frozenset("0123456789abcdef")
_WHAT = "the approval"
OUTDATED = "it does not count any more: it is from an earlier version, and does not name the program"


class ListedApproval(NamedTuple):
    """One file of the folder: its record, or the reason it cannot be used."""

    name: str  # of the file, without its ending
    record: ApprovalRecord | None = None
    fault: str = ""
    hint: str = ""


# --- reading ------------------------------------------------------------------------------------------------


def read_record(path: str, key: ApprovalKey) -> ApprovalRecord:
    """Raises ApprovalsUnusable if it cannot be trusted, or is not the record of `key`."""
    record = read_file(path)
    if record.key != key:
        message = f"{_WHAT} {path} is about another plugin than its name says"
        raise ApprovalsUnusable(message, _remedy(path))
    return record


def list_records(environ: Mapping[str, str]) -> tuple[ListedApproval, ...]:
    """Every file of the folder, by the names of the plugins. Raises ApprovalsUnusable if the folder itself
    cannot be read or trusted."""
    folder = approvals_folder(environ)
    if folder is None or not look.lexists(folder):
        return ()
    require_own(folder, "the folder of approvals")
    try:
        names = sorted(name for name in look.listdir(folder) if name.endswith(ENDING) and name[0] != ".")
    except OSError as error:
        message = f"the folder of approvals {folder} cannot be read: {error.strerror}"
        raise ApprovalsUnusable(message, f"chmod 700 {folder}") from None
    found = [_list_file(os.path.join(folder, name)) for name in names]
    return tuple(sorted(found, key=lambda each: (each.record is None, each.record and each.record.key)))


def find_former(key: ApprovalKey, environ: Mapping[str, str]) -> ApprovalRecord | None:
    """The newest approval of a plugin with this contract and id that does not apply to it, to compare with:
    of the same file if there is one, else of another. After an upgrade its command is another, or it is
    elsewhere. It may be another plugin with the same id. Raises ApprovalsUnusable."""
    found = [each.record for each in list_records(environ) if each.record is not None]
    alike = [each for each in found if each.key != key and (each.key.contract, each.key.id) == key[:2]]
    return max(alike, key=lambda each: (each.key.file == key.file, each.when), default=None)


def _list_file(path: str) -> ListedApproval:
    name = os.path.basename(path).removesuffix(ENDING)
    try:
        record = read_file(path)
        if name != (record.key.name if record.version == VERSION else record.key.stem):
            message = f"{_WHAT} {path} is about another plugin than its name says"
            raise ApprovalsUnusable(message, _remedy(path))
    except ApprovalsUnusable as unusable:
        return ListedApproval(name, fault=str(unusable), hint=unusable.hint)
    if record.version != VERSION:
        return ListedApproval(name, record, OUTDATED, "allow it again with runner allow, or revoke it")
    return ListedApproval(name, record)


def require_safe_code(code: Sequence[str]) -> None:
    """Raises ApprovalsUnusable if others than root and this user could replace a program, interpreter or
    script: the approval would then apply to their code."""
    for path in code:
        fault = trust_fault(path, "the file", private_groups=True)
        if fault is not None:
            reason, remedy = fault
            raise ApprovalsUnusable(f"nothing is allowed for {path}: {reason}", remedy)


def read_file(path: str) -> ApprovalRecord:
    """Raises ApprovalsUnusable if it cannot be trusted or read."""
    raw = read_bytes(path, _WHAT, _MOST_BYTES, _remedy(path))
    import json

    try:
        # Deep nesting is bounded by Python's own recursion limit, and the number of bytes by ours.
        data = json.loads(raw, object_pairs_hook=_once, parse_constant=_no_number)
        return _record(data)
    except (ValueError, RecursionError) as error:
        message = f"{_WHAT} {path} is damaged: {_short(error)}"
        raise ApprovalsUnusable(message, _remedy(path)) from None


def _short(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _remedy(path: str) -> str:
    return f"remove it (rm {path}), and allow the plugin again with runner allow"


def require_own(path: str, what: str) -> None:
    """Raises ApprovalsUnusable if others than root and this user could change the file or folder."""
    fault = trust_fault(path, what)
    if fault is not None:
        reason, remedy = fault
        if "belongs to uid" in reason:
            # Most often root with the HOME of a user, as after sudo. That user could then approve for root.
            remedy = "set HOME or XDG_CONFIG_HOME to a folder of the user who starts the runner; or " + remedy
        raise ApprovalsUnusable(f"{path} is not used: {reason}", remedy)


def _is_on_read_only_mount(path: str) -> bool:
    """Whether the file, with the links on the way to it, was trusted because nobody can change it."""
    try:
        if not look.statvfs(path).f_flag & os.ST_RDONLY:
            return False
    except OSError:  # opening it tells why
        return False
    from sandbox.policy.read_only import is_unchangeable

    return is_unchangeable(path) and is_unchangeable(look.realpath(path))


def read_bytes(path: str, what: str, most: int, remedy: str) -> bytes:
    """A file that only root and this user could have written. `what`: its name in messages. Raises
    ApprovalsUnusable, also if it has more than `most` bytes."""
    require_own(path, what)
    look.note_content(path)
    # A ConfigMap's files are links, on a read-only mount.
    fixed = _is_on_read_only_mount(path)
    path = look.realpath(path) if fixed else path
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if look.islink(path):
            message = f"{what} {path} is a link"
            raise ApprovalsUnusable(message, remedy) from None
        message = f"{what} {path} cannot be read: {error.strerror}"
        raise ApprovalsUnusable(message, remedy) from None
    try:
        # Check the opened file again: the path was checked a moment before.
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise ApprovalsUnusable(f"{what} {path} is not a regular file", remedy)
        if not fixed and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022):
            raise ApprovalsUnusable(f"{what} {path} can be written by others", remedy)
        raw = b""
        while len(raw) <= most and (part := os.read(opened, most + 1 - len(raw))):
            raw += part
    except OSError as error:
        message = f"{what} {path} cannot be read: {error.strerror}"
        raise ApprovalsUnusable(message, remedy) from None
    finally:
        os.close(opened)
    if len(raw) > most:
        message = f"{what} {path} is damaged: it has more than {most >> 20} MiB"
        raise ApprovalsUnusable(message, remedy)
    return raw


# --- what is in it ------------------------------------------------------------------------------------------
# Each function raises ValueError with a sentence about the first thing that is wrong.


def _record(data: object) -> ApprovalRecord:
    top = _object(data, ("version", "plugin", "asked", "added", "digest", "when"), "it")
    version = top["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version not in (1, VERSION):
        raise ValueError(f"its version is neither 1 nor {VERSION}, which this runner knows")
    texts = ApprovalKey._fields[:-1] if version == VERSION else ApprovalKey._fields[:-2]
    plugin = _object(top["plugin"], (*texts, "chosen") if version == VERSION else texts, "plugin")
    values: dict[str, Any] = {field: _text(plugin[field], f"plugin.{field}") for field in texts}
    if version == VERSION:
        values["chosen"] = _texts(plugin["chosen"], "plugin.chosen", lambda text: "")
    key = ApprovalKey(**values)
    if key.file and lexical_fault(key.file):
        raise ValueError("plugin.file is not an absolute path")
    when = top["when"]
    if not isinstance(when, int | float) or isinstance(when, bool) or not 0 <= when < 1 << 40:
        raise ValueError("when is not a number of seconds")
    return ApprovalRecord(
        key,
        _approval(top["asked"], "asked"),
        _approval(top["added"], "added"),
        _digest(top["digest"]),
        float(when),
        version,
    )


def _approval(data: object, name: str) -> Approval:
    # Earlier versions did not know the last four.
    known = {"staged": False, "hide": [], "ssh": [], "images": [], **data} if isinstance(data, dict) else data
    values = _object(known, Approval._fields, name)
    return Approval(
        read=_texts(values["read"], f"{name}.read", _path_fault),
        write=_texts(values["write"], f"{name}.write", _path_fault),
        network=_word(values["network"], NETWORK_ORDER, f"{name}.network"),
        hosts=_texts(values["hosts"], f"{name}.hosts", _host_fault),
        env=_texts(values["env"], f"{name}.env", _name_fault),
        steering=_texts(values["steering"], f"{name}.steering", _name_fault),
        seccomp=_word(values["seccomp"], SECCOMP_ORDER, f"{name}.seccomp"),
        project=_word(values["project"], ("none", "read"), f"{name}.project"),
        staged=_flag(values["staged"], f"{name}.staged"),
        hide=_texts(values["hide"], f"{name}.hide", _hiding_fault),
        ssh=_texts(values["ssh"], f"{name}.ssh", _ssh_fault),
        images=_texts(values["images"], f"{name}.images", _image_fault),
    )


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is neither true nor false")
    return value


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _object(data: object, keys: Sequence[str], name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{name} is not an object")
    if strays := sorted(set(data).difference(keys)):
        raise ValueError(f"{name} has the unknown key {strays[0][:60]!a}")
    if lacking := [key for key in keys if key not in data]:
        raise ValueError(f"{name} has no {lacking[0]}")
    return data


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST or "\0" in value:
        raise ValueError(f"{name} is not a text that can be used")
    os.fsencode(value)  # a lone surrogate that stands for no byte raises ValueError
    return value


def _texts(value: object, name: str, fault: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
        raise ValueError(f"{name} is not a list that can be used")
    found = tuple(_text(each, name) for each in value)
    for each in found:
        if why := fault(each):
            raise ValueError(f"{name}: {each[:60]!a} {why}")
    return found


def _word(value: object, words: Sequence[Any], name: str) -> Any:
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} is not one of {', '.join(words)}")
    return value


def _digest(value: object) -> str:
    text = _text(value, "digest")
    if len(text) != 32 or not _DIGEST.issuperset(text):
        raise ValueError("digest is not 32 hexadecimal digits")
    return text


def _path_fault(path: str) -> str:
    if fault := lexical_fault(path):
        return fault
    return "" if normal(path) == path else "is not written in its shortest form"


def _host_fault(host: str) -> str:
    from sandbox.network.rules import parse_rule

    try:
        parse_rule(host)
    except ValueError as error:
        return str(error)
    return ""


def _hiding_fault(text: str) -> str:
    from sandbox.network.credentials import parse_hiding

    try:
        parse_hiding(text)
    except ValueError as error:
        return str(error)
    return ""


def _image_fault(text: str) -> str:
    return "" if "/" in text and text.isprintable() else "is no reference of an image"


def _ssh_fault(text: str) -> str:
    from sandbox.network.ssh import parse_access

    try:
        parse_access(text)
    except ValueError as error:
        return str(error)
    return ""


def _name_fault(name: str) -> str:
    return "" if is_variable_name(name) else "cannot be the name of a variable"


# --- writing ------------------------------------------------------------------------------------------------


def write_record(record: ApprovalRecord, environ: Mapping[str, str]) -> str:
    """Store a record, in place of an older one of the same plugin, and return its path. Raises
    ApprovalsUnusable. The file is replaced atomically."""
    import json

    document = {
        "version": VERSION,
        "plugin": record.key._asdict(),
        "asked": record.asked._asdict(),
        "added": record.added._asdict(),
        "digest": record.digest,
        "when": record.when,
    }
    raw = json.dumps(document, indent=2).encode() + b"\n"
    try:
        _record(json.loads(raw))
    except ValueError as error:
        message = f"this cannot be kept as an approval: {error}"
        raise ApprovalsUnusable(message, "let the manifest ask for less, or in another way") from None
    if len(raw) > _MOST_BYTES:
        raise ApprovalsUnusable("it asks for too much to be kept", "let the manifest ask for less")
    folder = approvals_folder(environ)
    if folder is None:
        message = "there is no place for approvals: HOME is not the path of a folder"
        raise ApprovalsUnusable(message, "set HOME, or XDG_CONFIG_HOME")
    make_folder(folder, "the folder of approvals")
    path = os.path.join(folder, record.key.name + ENDING)
    with open_folder(folder) as directory:
        replace_file(directory, os.path.basename(path), raw, sync=True)
    return path


def remove_record(name: str, environ: Mapping[str, str]) -> bool:
    """Remove the file of this name without reading it. Returns False if there is none. Raises
    ApprovalsUnusable."""
    folder = approvals_folder(environ)
    if folder is None or not look.lexists(os.path.join(folder, name + ENDING)):
        return False
    require_own(folder, "the folder of approvals")
    with open_folder(folder) as directory:
        try:
            os.unlink(name + ENDING, dir_fd=directory)
        except FileNotFoundError:
            return False
        with suppress(FileNotFoundError):
            os.unlink(NOTIFIED + name, dir_fd=directory)
        os.fsync(directory)
    return True


def make_folder(folder: str, what: str) -> None:
    """Make a folder that only its owner can read. Raises ApprovalsUnusable."""
    # Check the existing folders before something is made in them.
    above = folder
    while not look.lexists(above):
        above = os.path.dirname(above)
    require_own(above, f"the folder {above}")
    with _explain_errors(folder):
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
    require_own(folder, what)


@contextmanager
def open_folder(folder: str) -> Iterator[int]:
    """A descriptor of a folder in which files are changed. Raises ApprovalsUnusable for every OSError."""
    with _explain_errors(folder):
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield directory
        finally:
            os.close(directory)


@contextmanager
def locked_folder(folder: str, what: str, *, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Make the folder if it is missing, and let nobody else who asks so write in it. Raises
    ApprovalsUnusable. `seconds`: how long to wait for another process."""
    import fcntl  # here: a launch only reads
    import time

    make_folder(folder, what)
    with open_folder(folder) as directory:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(_LOCK, flags, 0o600, dir_fd=directory)
    try:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    message = f"another process has held {folder}/{_LOCK} for {seconds:.0f} s"
                    raise ApprovalsUnusable(message, "end it: fuser shows its id") from None
            time.sleep(_PAUSE_SECONDS)
        yield
    finally:
        os.close(lock)


@contextmanager
def _explain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{path} cannot be changed: {error.strerror}"
        raise ApprovalsUnusable(message, "look at the folder's owner, mode and free space") from None

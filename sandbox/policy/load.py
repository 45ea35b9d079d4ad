"""Find and load the policy in force, and check that its file can be trusted."""

from __future__ import annotations

import os
import stat

from sandbox import CODE_ROOT, cache, look, surroundings
from sandbox.cache import fingerprint
from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted
from sandbox.document.read import parse, read_bounded
from sandbox.network.egress import EgressLimits
from sandbox.paths.executable import ProgramFault, follow
from sandbox.paths.mounts import ancestry
from sandbox.policy.policy import (
    SYSTEM_POLICY,
    ApprovalRule,
    CapabilityRule,
    CredentialRule,
    EnvRule,
    LimitRule,
    NetworkRule,
    PackageRule,
    PathRule,
    Policy,
    SeccompRule,
)
from sandbox.spec import KeyPath
from sandbox.speed import codec
from sandbox.speed.typed import Mapping

ENVIRONMENT_NAME = "RUNNER_POLICY"
DEFAULT_NAME = "default"

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")

_FORMAT = b"policy.8"
_CLASSES = (
    Policy,
    PathRule,
    NetworkRule,
    EgressLimits,
    EnvRule,
    SeccompRule,
    LimitRule,
    CapabilityRule,
    PackageRule,
    ApprovalRule,
    CredentialRule,
    cache.CodeMark,
)


def policy_names() -> tuple[str, ...]:
    """The policies that come with the runner."""
    found = look.listdir(_packaged_directory())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def _packaged_directory() -> str:
    return os.path.join(CODE_ROOT, "policies")


def policy_folders(name_or_path: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Folders in which a change may mean another policy. Packaged ones change with the code only."""
    named = name_or_path or environ.get(ENVIRONMENT_NAME) or ""
    own = (os.path.dirname(_full_path(named)),) if "/" in named or "." in named else ()
    return (*own, os.path.dirname(SYSTEM_POLICY))


def load_policy(name_or_path: str | None, environ: Mapping[str, str]) -> Policy:
    """The policy in force: as named, else $RUNNER_POLICY, else the system's, else "default".

    Raises DocumentError. A named policy that cannot be used is never replaced by another one.
    """
    named = name_or_path or environ.get(ENVIRONMENT_NAME) or None
    if named is None:
        named = SYSTEM_POLICY if look.lexists(SYSTEM_POLICY) else DEFAULT_NAME
    if named[0].islower() and _NAME_CHARACTERS.issuperset(named):
        path = os.path.join(_packaged_directory(), named + ".toml")
        if not look.exists(path):
            raise DocumentError(_unknown_name(named))
        # Not checked: these files are as trustworthy as the code beside them.
        return read_policy(path, named)
    path = _full_path(named)
    fault = trust_fault(path)
    if fault is not None:
        reason, hint = fault
        raise DocumentError(Diagnostic(path, 0, 0, "policy_untrusted", reason, hint))
    return read_policy(path, path)


def _full_path(named: str) -> str:
    return os.path.normpath(named if named.startswith("/") else f"{surroundings.working_folder()}/{named}")


def binding_policy(chosen: Policy) -> Policy | None:
    """The system's policy, if it belongs to root and an ordinary user has chosen another one. Its [approvals]
    bind that user too. Raises DocumentError."""
    if os.geteuid() == 0 or chosen.file == SYSTEM_POLICY:
        return None
    try:
        owner = look.lstat(SYSTEM_POLICY).st_uid
    except FileNotFoundError:
        return None
    except OSError as error:
        # Fail closed: there may be one.
        message = f"it cannot be looked at: {error.strerror}"
        raise DocumentError(Diagnostic(SYSTEM_POLICY, 0, 0, "policy_untrusted", message)) from None
    # Nor can this user change one of somebody else on a read-only mount, as a container gets it.
    bound = owner == 0 or (owner != os.geteuid() and trust_fault(SYSTEM_POLICY) is None)
    return load_policy(SYSTEM_POLICY, {}) if bound else None


def read_policy(path: str, name: str) -> Policy:
    """Read a policy as the file is now, or take it from the cache for the same bytes: the first reading
    imports pydantic. Raises DocumentError. It is not asked whether the file can be trusted."""
    raw = read_bounded(path)
    key = fingerprint(_FORMAT, os.fsencode(path), os.fsencode(name), raw)
    cached = _load_cached(key)
    if cached is not None and _account_exists(cached):
        return cached
    from sandbox.policy.parse import parse_policy

    policy = parse_policy(path, raw, name=name)
    cache.store(key, codec.pack((policy, cache.code_marks("sandbox.policy.parse"))))
    return policy


def _load_cached(key: str) -> Policy | None:
    raw = cache.load(key)
    if raw is None:
        return None
    try:
        policy, code = codec.unpack(raw, _CLASSES)
    except (ValueError, TypeError):
        return None
    return policy if isinstance(policy, Policy) and cache.is_current(code) else None


def _account_exists(policy: Policy) -> bool:
    """Whether the account of `run_as` can still be used. If not, parsing again reports the fault."""
    if not policy.run_as:
        return True
    from sandbox.identity.accounts import UnknownAccount, find_account

    try:
        return bool(find_account(policy.run_as))
    except UnknownAccount:
        return False


def position(policy: Policy, keys: KeyPath) -> tuple[int, int]:
    """Line and column of a key in a policy's file, or (0, 0). For messages only: it parses the file again."""
    try:
        return parse(policy.file, read_bounded(policy.file), "toml").where(keys)
    except DocumentError:
        return 0, 0


def _unknown_name(named: str) -> Diagnostic:
    names = policy_names()
    hint = f"there are {', '.join(names)}; {did_you_mean(named, names)}".removesuffix("; ")
    if look.exists(named):
        hint = f"for the file in this directory write ./{named}"
    return Diagnostic(named, 0, 0, "policy_unknown", f"no policy is called {quoted(named)}", hint)


def trust_fault(
    path: str, name: str = "the policy file", *, private_groups: bool = False
) -> tuple[str, str] | None:
    """Return (reason, remedy) if a user other than root and our own could change the file at `path`.

    `name`: what messages call the file. `private_groups`: a group may write if nobody else is in it, and if
    no access control list names others. Many systems make such a group for each user.

    Every directory above counts, because a user who may write to one can replace the tree below it. So does
    every link on the way, with the directories above it. In a sticky directory such as /tmp a user can
    replace only files of their own. On a read-only mount nobody can (sandbox/policy/read_only.py).
    """
    try:
        real, links = follow(path)
        for end in (*(link.path for link in links), real):
            for place in ancestry(end):
                status = look.lstat(place)
                fault = weak_spot(place, status, _part(place, end, real, name))
                if fault is not None and private_groups and _only_group_writes(status):
                    from sandbox.identity.accounts import only_private_group_writes

                    fault = None if only_private_group_writes(place, status.st_gid) else fault
                if fault is not None and not _is_unchangeable(place):
                    reason, *ways = fault
                    return reason, _remedy(place, *ways)
    except (OSError, ProgramFault):
        return None  # reading the file reports this error
    return None


def _part(place: str, end: str, real: str, name: str) -> str:
    if place != end:
        return f"its directory {place}"
    return name if end == real else f"the link {place} that leads to it"


def _only_group_writes(status: os.stat_result) -> bool:
    """Whether the only fault is that the group may write."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o002


def _is_unchangeable(place: str) -> bool:
    from sandbox.policy.read_only import is_unchangeable

    return is_unchangeable(place)


def weak_spot(place: str, status: os.stat_result, what: str) -> tuple[str, str, str] | None:
    """The fault of this place, the command that corrects it, and what else can be done ('': nothing)."""
    own = os.geteuid()
    if status.st_uid not in (0, own):
        reason = f"{what} belongs to uid {status.st_uid}, which is neither root nor the runner's user"
        return reason, f"chown -h {own} {place}", "copy it to a directory of your own"
    if stat.S_ISLNK(status.st_mode):
        return None  # the mode of a link means nothing
    if status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"{what} can be written by its group or by everybody", f"chmod go-w {place}", ""
    return None


def _remedy(place: str, change: str, otherwise: str) -> str:
    """`change`, or what else is possible: nothing can be changed on a read-only mount."""
    try:
        is_read_only = look.statvfs(place).f_flag & os.ST_RDONLY
    except OSError:
        is_read_only = 0
    if is_read_only:
        return (
            "the mount is read-only here, which does not say who can write the file elsewhere: copy it to a "
            f"directory that only root or uid {os.geteuid()} can write"
        )
    from sandbox.paths.mounts import read_mounts
    from sandbox.policy.read_only import is_in_container

    if os.geteuid() not in (0, look.lstat(place).st_uid):
        change = f"have root change it ({change})"
    if is_in_container(read_mounts()):
        otherwise = f"{otherwise}, or " if otherwise else ""
        otherwise += "mount it read-only (docker: -v …:ro; Kubernetes: readOnly: true)"
    return f"{change}, or {otherwise}" if otherwise else change

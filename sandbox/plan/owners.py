"""Decide who owns what a plugin writes to folders of the host, if the runner is root.

A leased uid is given to another plugin later, so no file of the host may belong to one. These methods are
tried in order, for all folders together, before anything is made or started:

    idmapped  the folder's owner appears as the plugin, and what it writes belongs to that owner (idmap.py)
    run_as    the plugin has the uid of the account that the policy names, instead of a leased one
    reserved  the plugin has a uid that is reserved for its manifest, and no other plugin ever gets (uids.py)

If none works, the launch is refused, with a hint. Everything is tried: the mount is made, and a process with
the uid in question opens the folder.
"""

from __future__ import annotations

import errno
import os

from sandbox import look
from sandbox.identity.accounts import Account, expected_refusal, find_account, primary_group
from sandbox.identity.idmap import FileOwner, IdmapUnavailable, idmapped_mount
from sandbox.identity.leases import UidsUnavailable
from sandbox.paths.mounts import ancestry
from sandbox.paths.source import OpenSource
from sandbox.spawn.order import FOLDERS_ROOT
from sandbox.spec import Denial, KeyPath
from sandbox.speed.typed import TYPE_CHECKING, Literal, Sequence
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.policy.policy import Policy

Method = Literal["idmapped", "run_as", "reserved"]

_RULE = "write_owner"


class Ownership(NamedTuple):
    """Who owns what the plugin writes to one folder or file."""

    path: str  # inside
    method: Method
    uid: int  # the owner, on the host, of what the plugin makes there
    gid: int
    why: str = ""  # reason why the folder's own owner is not mapped
    # Owners of other files in it, each with one path. In an idmapped folder the plugin cannot change those.
    strangers: tuple[tuple[int, str], ...] = ()
    is_file: bool = False

    def holds_for(self, source: OpenSource) -> bool:
        """Whether an owner that is mapped would be decided alike for a source as it is now."""
        return self == _mapped(source)._replace(path=self.path)

    def sentence(self) -> str:
        if self.method == "idmapped":
            what = "file" if self.is_file else "folder"
            return (
                f"what the plugin writes belongs to uid {self.uid}, the owner of the {what} (idmapped mount)"
            )
        means = "by run_as in the policy" if self.method == "run_as" else "reserved for this plugin"
        if self.is_file:
            return (
                f"the file keeps its owner, and the plugin writes it as uid {self.uid}, {means}: {self.why}"
            )
        return f"what the plugin writes belongs to uid {self.uid}, {means}: {self.why}"

    def note(self) -> str:
        named = ", ".join(f"uid {uid} ({self.path}/{path})" for uid, path in self.strangers)
        can = "cannot change" if self.method == "idmapped" else "can change only where their modes allow it"
        return f"{self.path} holds files of other owners, which the plugin {can}: {named}"


class Decision(NamedTuple):
    """Who owns what the plugin writes, for one launch."""

    paths: tuple[Ownership, ...] = ()
    account: Account | None = None  # the plugin runs as this account instead of a leased uid
    # Its state keeps its reserved uid, mapped to the account; else it is the account's.
    maps_state: bool = False
    left: tuple[str, ...] = ()  # where files of a reserved uid may be left
    denials: tuple[Denial, ...] = ()

    def notes(self) -> tuple[str, ...]:
        """Notes for people."""
        shared = (
            f"the plugin has the uid of {self.account}, and shares it with everything that runs as this "
            "account, "
            "including other plugins under the same run_as"
        )
        notes = [each.note() for each in self.paths if each.strangers]
        return (*notes, *([shared] if self.account is not None else []))

    def identity(self) -> str:
        """The plugin's identity in words, if it is not a leased uid."""
        if self.account is not None:
            return f"run_as {self.account}"
        reserved = {each.uid for each in self.paths if each.method == "reserved"}
        return f"reserved {reserved.pop()}" if reserved else ""

    def with_reserved_uid(self, asked: Sequence[WriteRequest], uid: int) -> Decision:
        """The decision with the uid that was actually reserved. It differs if another launch was faster."""
        if all(each.uid == uid for each in self.paths if each.method == "reserved"):
            return self
        by_path = {each.source.path: each for each in asked}
        found = [
            _by_reserved_uid(by_path[each.path], uid, each.why) if each.method == "reserved" else each
            for each in self.paths
        ]
        return self._replace(
            paths=tuple(each for each in found if isinstance(each, Ownership)),
            denials=tuple(each for each in found if isinstance(each, Denial)),
        )

    def of(self, path: str) -> Ownership | None:
        return next((each for each in self.paths if each.path == path), None)


class WriteRequest(NamedTuple):
    source: OpenSource
    where: KeyPath


def decide(
    asked: Sequence[WriteRequest],
    policy: Policy,
    uid_range: tuple[int, int],
    *,
    state_dir: str | None,
    reserved_for: str,
) -> Decision:
    """Decide for all sources that are opened for writing. `reserved_for`: the state directory that a plugin
    without one would have. Raises UidsUnavailable."""
    from sandbox.identity import uids  # here: a launch from a stored plan decides nothing

    denials = [refusal for each in asked if (refusal := _read_only(each))]
    if denials:
        return Decision(denials=tuple(denials))
    whys = {each.source.path: _why_not_mapped(each.source, uid_range) for each in asked}
    mappable = [each for each in asked if not whys[each.source.path]]
    mapped, closed = [_mapped(each.source) for each in mappable], _closed_to_owner(mappable)
    rest = [each for each in asked if whys[each.source.path]]
    if not rest:
        return Decision(tuple(mapped), denials=closed)
    if policy.run_as:
        account = find_account(policy.run_as)
        if uids.may_be_a_plugins(account.uid, *uid_range):
            reason = f"run_as in the policy names {account}, whose uid is in a range that plugins are given"
            hint = "make an account for plugins (useradd --system NAME), and name it in run_as"
            return Decision(
                denials=tuple(Denial(_RULE, e.source.path, reason, hint, where=e.where) for e in rest)
            )
        decided = [_by_account(each, account, whys[each.source.path]) for each in rest]
        denials = [each for each in decided if isinstance(each, Denial)]
        maps_state = state_dir is not None and _maps_state(state_dir, account, uid_range)
        if state_dir is not None and not maps_state and (why := expected_refusal(state_dir, account)):
            denials.append(Denial(_RULE, state_dir, *why))
        paths = (*mapped, *(each for each in decided if isinstance(each, Ownership)))
        return Decision(paths, account, maps_state, denials=(*closed, *denials))
    uid = uids.expected_uid(state_dir or reserved_for, *uid_range)
    if uid is None:
        raise UidsUnavailable(
            "all uids for plugins with state are reserved; remove states that nobody needs (runner state "
            "list, runner state remove), or widen the range with [user] uids in the policy"
        )
    decided = [_by_reserved_uid(each, uid, whys[each.source.path]) for each in rest]
    denials = [each for each in decided if isinstance(each, Denial)]
    paths = (*mapped, *(each for each in decided if isinstance(each, Ownership)))
    left = tuple(each.source.real for each in rest)
    return Decision(paths, left=left, denials=(*closed, *denials))


# --- the owner is mapped ------------------------------------------------------------------------------------


def owner_of(source: OpenSource) -> FileOwner:
    """The owner to map, with the group of their own files. Never root's group."""
    group = primary_group(source.uid) or source.gid or source.uid
    return FileOwner(source.uid, group)


def _mapped(source: OpenSource) -> Ownership:
    owner = owner_of(source)
    return Ownership(
        source.path, "idmapped", owner.uid, owner.gid, "", source.strangers, source.kind == "file"
    )


def _why_not_mapped(source: OpenSource, uid_range: tuple[int, int]) -> str:
    """Reason why the owner cannot be mapped, or ''. Found by trying."""
    from sandbox.identity import uids

    if source.uid == 0:
        return "it belongs to root, and root is never mapped"
    if uids.may_be_a_plugins(source.uid, *uid_range):
        return f"it belongs to uid {source.uid}, a uid that plugins are given"
    return _cannot_map(source.fd, owner_of(source), uid_range)


def _cannot_map(fd: int, owner: FileOwner, uid_range: tuple[int, int]) -> str:
    if not look.isdir(FOLDERS_ROOT):
        return f"there is no {FOLDERS_ROOT} here, below which it would be mounted"
    spare_uid = uid_range[1]
    try:
        os.close(idmapped_mount(fd, owner, FileOwner(spare_uid, spare_uid)))
    except IdmapUnavailable as refused:
        if refused.errno in _SHORTAGES:
            raise OSError(refused.errno, str(refused)) from None
        why = _REFUSALS.get(refused.errno or 0, "the kernel refuses it")
        return f"its owner cannot be mapped: {why} ({refused})"
    return ""


# Errors that are about the runner's own resources and not about the folder.
_SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
# What the errors of the kernel mean.
_REFUSALS = {
    errno.EINVAL: "its filesystem, or one mounted below it, does not support idmapped mounts",
    errno.EPERM: "its mount is idmapped already, or the runner lacks CAP_SYS_ADMIN over the "
    "filesystem, as root in a container does",
    errno.ENOSYS: "this kernel, or the filter of a container, has no mount_setattr",
}


def _maps_state(state_dir: str, account: Account, uid_range: tuple[int, int]) -> bool:
    """Whether the state keeps its reserved uid and is mapped to the account. Tried with the first folder
    above it that exists, because the filesystem is what matters. A directory that already belongs to the
    account stays so."""
    if look.isdir(state_dir) and look.lstat(state_dir).st_uid == account.uid:
        return False
    place = next(place for place in ancestry(state_dir) if look.isdir(place))
    fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not _cannot_map(fd, FileOwner(uid_range[0], uid_range[0]), uid_range)
    finally:
        os.close(fd)


def _closed_to_owner(asked: Sequence[WriteRequest]) -> tuple[Denial, ...]:
    """Denials for folders that their own owner may not write: the plugin has only the owner's rights."""
    return tuple(
        Denial(
            _RULE,
            each.source.path,
            f"{each.source.real} cannot be written by its own owner, uid {each.source.uid}",
            f"chmod {'u+rwx' if each.source.kind == 'dir' else 'u+rw'} {each.source.real}",
            where=each.where,
        )
        for each in asked
        if ~each.source.identity.mode & (0o700 if each.source.kind == "dir" else 0o600)
    )


# --- the plugin has a uid that may write there --------------------------------------------------------------


def _by_account(asked: WriteRequest, account: Account, why: str) -> Ownership | Denial:
    source = asked.source
    blocked = _keeps_out(source, account.uid, account.gid)
    if blocked is None:
        return Ownership(
            source.path,
            "run_as",
            account.uid,
            account.gid,
            why,
            source.strangers,
            source.kind == "file",
        )
    return Denial(
        _RULE,
        source.path,
        f"{blocked} keeps out {account}, the account that run_as in the policy names, and the owner of "
        f"{source.real} "
        f"is not mapped: {why}",
        f"chown {account.uid} {source.real}" if blocked == source.real else f"chmod o+x {blocked}",
        where=asked.where,
    )


def _by_reserved_uid(asked: WriteRequest, uid: int, why: str) -> Ownership | Denial:
    source = asked.source
    blocked = _keeps_out(source, uid, uid)
    if blocked is None:
        return Ownership(
            source.path, "reserved", uid, uid, why, source.strangers, is_file=source.kind == "file"
        )
    if blocked != source.real:
        hint = f"chmod o+x {blocked}, or move the folder to a place that everybody may enter"
    else:
        hint = (
            f"chown {uid} {source.real} (the uid of this plugin), or chown it to an ordinary user "
            "(on ext4, xfs, btrfs or tmpfs), or set run_as under [user] in the policy to an account that "
            "may write there"
        )
    reason = f"what the plugin writes to {source.real} would have no owner: {why}"
    return Denial(_RULE, source.path, f"{reason}, and {blocked} keeps out uid {uid}", hint, where=asked.where)


def _keeps_out(source: OpenSource, uid: int, gid: int) -> str | None:
    """The first path on the way that does not let the uid in, or None. Tried by a process with that uid."""
    from sandbox.paths.access import unreachable

    bits = 0o7 if source.kind == "dir" else 0o6
    if _opens(source.real, uid, gid, bits):
        return None
    return unreachable(source.real, uid, gid, bits) or source.real


def _opens(path: str, uid: int, gid: int, bits: int) -> bool:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            status = 0 if look.access(path, bits) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _read_only(asked: WriteRequest) -> Denial | None:
    if not os.fstatvfs(asked.source.fd).f_flag & os.ST_RDONLY:
        return None
    reason = f"{asked.source.real} cannot be written: {os.strerror(errno.EROFS)}"
    return Denial(_RULE, asked.source.path, reason, "mount it read-write", where=asked.where)

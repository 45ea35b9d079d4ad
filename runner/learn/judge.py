"""From what a plugin asked the kernel for to a proposal: what it missed, and what of that could be granted.

The kernel's answers are not observed. A call missed something if the cage does not show the path, or shows it
read-only, and the host has it. Nothing is opened, and paths are judged by the same denylist as at a launch:
the path itself and where its links lead.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from ipaddress import ip_address, ip_network
from shutil import which
from typing import Any, NamedTuple

from runner.launch.advice.advice import REFUSES_GIVEN, missing_names
from runner.launch.advice.clues import read_clues
from runner.launch.advice.places import WIDE_PATHS, CagePlaces
from runner.launch.advice.scene import Scene
from runner.launch.verdict import raise_hint
from runner.learn.grouping import MissedPath, PathGroup, group_paths, uncovered
from runner.learn.proposal import Proposal, ProposedItem, UnproposedItem, can_be_shown, shown
from sandbox.network.credentials import looks_secret
from sandbox.network.egress import (
    LOOPBACK,
    NO_NETWORK,
    NOT_LISTED,
    OWN_LOOPBACK,
    SYNTHETIC_IPV4,
    SYNTHETIC_IPV6,
)
from sandbox.network.rules import LOCALHOST, parse_rule
from sandbox.paths.denied_paths import HOST_WRITE_PATHS, lexical_fault, normal
from sandbox.paths.mounts import Mounts, contains, join
from sandbox.paths.walk import LinkRefused, TooManyLinks, resolve
from sandbox.policy.approval import limit_approval
from sandbox.policy.policy import loopback_remedy
from sandbox.spec import Access, Approval

_DEEPEST = 100  # folders above a path that is proposed
_MOST_NOTES = 10  # of each kind
_MOST_PROPOSED = 40  # paths and folders, and as many hosts
_WRITES = {"write", "make"}
_DNS_PORT = 53
_HTTPS_PORT = 443
_GIVEN = (ip_network(SYNTHETIC_IPV4), ip_network(SYNTHETIC_IPV6))
# Every home has these, and programs keep something of their own in them. One of them is a large part of it.
_SHARED_IN_HOMES = (".config", ".local", ".local/share", ".local/state", ".local/bin", ".cache", ".var")
# Many programs keep something of their own in these. A plugin that lists one itself may still get it.
_SHARED_FOLDERS = (
    *"/etc/default /etc/ssl /etc/systemd /usr/bin /usr/lib /usr/share".split(),
    *(f"/usr/local/{name}" for name in ("bin", "etc", "lib", "share")),
    *(f"/var/{name}" for name in ("backups", "cache", "log", "mail", "opt", "spool", "tmp")),
)
# Runtimes look for these at every start and do without them. Name service belongs to the cage's network.
_DISPENSABLE = frozenset(
    f"/etc/{name}"
    for name in (
        "resolv.conf hosts host.conf nsswitch.conf gai.conf locale.alias ld.so.preload localtime timezone"
        " ssl/openssl.cnf pip.conf"
    ).split()
)
_DISPENSABLE_NAMES = ("sitecustomize.py", "usercustomize.py")

STORED = "the packages of all servers are there, and the cage has the plugin's own already"

# A sentence that says why no option grants a path, or ''.
Denial = Callable[[str, Access], str]


class Lesson(NamedTuple):
    """What is known of one run under observation."""

    scene: Scene
    report: Mapping[str, Any]  # of the run, with "observed"
    home: str = ""  # the plugin's HOME in the cage
    search_path: str = ""  # PATH of the host
    output: str = ""  # the end of its stderr, and errors that it answered with
    stores: tuple[str, ...] = ()  # folders with the packages of all servers that were fetched


def propose_needs(lesson: Lesson, denial: Denial, mounts: Mounts | None = None) -> Proposal:
    """`denial`: by the denylist of a launch. `mounts`: of this machine."""
    judge = _Judge(lesson, denial, mounts)
    judge.judge_paths()
    judge.judge_hosts()
    judge.judge_variables()
    notes = (*judge.notes(), *_limit_notes(lesson.report))
    refused = sorted(judge.refused.values(), key=lambda each: -each.times)
    return Proposal(tuple(judge.needs), tuple(refused), notes, tuple(_incomplete(lesson.report["observed"])))


class _Judge(CagePlaces):
    def __init__(self, lesson: Lesson, denial: Denial, mounts: Mounts | None) -> None:
        super().__init__(lesson.scene, mounts)
        self.needs: list[ProposedItem] = []
        self.refused: dict[str, UnproposedItem] = {}
        self._lesson = lesson
        self._list_denial = denial
        self._to_make: dict[str, None] = {}  # folders that the host does not have either
        self._of_home: dict[str, None] = {}
        self._too_deep = self._left_out = 0
        self._programs: dict[str, bool] = {}  # by name: whether the cage has it

    # --- paths ----------------------------------------------------------------------------------------------

    def judge_paths(self) -> None:
        missed: dict[Access, list[MissedPath]] = {"read": [], "write": []}
        for seen in self._lesson.report["observed"]["paths"]:
            path, uses, times = seen["path"], set(seen["uses"]), seen["times"]
            self._note_program(path, uses)
            if lexical_fault(path) and ".." in path:
                path = os.path.normpath(path)  # for the plugin too, unless a link of its own is in it
            if lexical_fault(path):
                continue
            if path.count("/") > _DEEPEST:
                self._too_deep += 1
                continue
            if not self.is_local(path):
                why = "it is on a server or mounted on demand, or its links cannot be followed"
                self._refuse(path, times, f"{why}: nothing is looked at there")
                continue
            for access, found in self._missed(normal(path), uses, times):
                if found.path in _DISPENSABLE or os.path.basename(found.path) in _DISPENSABLE_NAMES:
                    continue
                if reason := self._reason(found, access):
                    store = self._store_with(found.leads_to or found.path) if reason == STORED else ""
                    self._refuse(store or found.asked or found.path, times, reason)
                else:
                    missed[access].append(found)
        written = group_paths(missed["write"], lambda folder: self._may_name(folder, "write"))
        read = group_paths(missed["read"], lambda folder: self._may_name(folder, "read"))
        groups: list[tuple[Access, PathGroup]] = [("write", group) for group in written]
        groups += [("read", group) for group in uncovered(read, (each.path for each in written))]
        often = sorted(groups, key=lambda each: -each[1].times)[:_MOST_PROPOSED]
        self._left_out = len(groups) - len(often)
        for access, group in groups:
            if (access, group) in often:
                self._add_group(access, group)

    def _missed(self, path: str, uses: set[str], times: int) -> Iterator[tuple[Access, MissedPath]]:
        """What the host has of a path that the plugin did not find, or found read-only."""
        writes = bool(uses & _WRITES)
        if uses == {"look"} and any(contains(path, place) for place in self.scene.shown):
            return  # the cage has a folder there, which holds what it shows
        if self.is_shown(path):
            if writes and not self.is_writable(path):
                yield from self._unwritable(path, times)
            elif (real := self._link_target(path)) is not None:
                yield "read", self._found(real, uses, times)._replace(asked=path)
        elif writes and any(contains(place, path) for place in ("/tmp", "/dev/shm")):
            return  # it has its own
        elif self.exists(path):
            above = [word for word in self._mentioned if word != path and contains(path, word)]
            if above and os.path.isdir(path):  # a step on the way to what its arguments name
                for word in above:
                    yield "read", self._found(word, uses, times)
                return
            yield "write" if writes else "read", self._found(path, uses, times)
        elif writes:
            yield from self._creatable(path, times)
        elif self._is_of_home(path):
            self._of_home[path] = None

    def _found(self, path: str, uses: set[str], times: int) -> MissedPath:
        is_folder, real = os.path.isdir(path), os.path.realpath(path)
        whole = is_folder and bool(uses & {"list", "read", "write", "make"})
        return MissedPath(path, times, whole, is_folder, leads_to=real if real != path else "")

    def _unwritable(self, path: str, times: int) -> Iterator[tuple[Access, MissedPath]]:
        """A path that the cage shows read-only. Interpreters try to cache code beside it: that is no need."""
        scene = self.scene
        if "__pycache__" in path.split("/") or any(contains(place, path) for place in HOST_WRITE_PATHS):
            return
        if any(contains(each, path) for each in scene.guarded):
            self._refuse(path, times, "it stays read-only in a folder that the plugin may write")
            return
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if any(contains(folder, own) for own in scene.own):
            self._refuse(
                path, times, "the folder holds the plugin's program or manifest, which it may not change"
            )
            return
        yield "write", self._found(folder, {"write"}, times)

    def _creatable(self, path: str, times: int) -> Iterator[tuple[Access, MissedPath]]:
        """A path that the host does not have either, and that the plugin wanted to make."""
        folder, missing = os.path.dirname(path), path
        while folder != "/" and not self.exists(folder):
            folder, missing = os.path.dirname(folder), folder
        if missing == path and self.is_folder(folder) and self._may_name(folder, "write"):
            yield "write", self._found(folder, {"write"}, times)
        elif folder != "/" and can_be_shown(missing) and not self._list_denial(missing, "write"):
            self._to_make[missing] = None

    def _link_target(self, path: str) -> str | None:
        """Where a link that the cage shows leads on the host, if the cage does not show that."""
        if path in self.scene.shown or not os.path.lexists(path):
            return None  # a file of the cage's own has this name
        real = os.path.realpath(path)
        return None if self.is_shown(real) or not self.exists(real) else real

    @cached_property
    def _mentioned(self) -> list[str]:
        words = (self.absolute(word.removeprefix("file://")) for _, word in self.scene.mentions)
        return [word for word in words if word is not None and not self.is_shown(word) and self.exists(word)]

    def _is_of_home(self, path: str) -> bool:
        """Whether the operator's home has what the plugin looked for in its own."""
        inside, home = self._lesson.home, self.scene.home
        if not inside.startswith("/") or not home.startswith("/") or not contains(inside, path):
            return False
        counterpart = join(home, path[len(inside.rstrip("/")) + 1 :])
        return counterpart != home and self.exists(counterpart) and not self._list_denial(counterpart, "read")

    def _reason(self, found: MissedPath, access: Access) -> str:
        """Why a path is not proposed, or ''."""
        for path in filter(None, (found.asked, found.path, found.leads_to)):
            if not can_be_shown(path):
                return "its name has characters that cannot be shown as they are"
            if path.count("/") > _DEEPEST:
                return f"it lies more than {_DEEPEST} folders deep"  # by its links
            if why := self._list_denial(path, access):
                return f"no option grants it: {why}"
            if clause := self.denial(path, access):
                return f"no option grants it: it {clause}"
        real = found.leads_to or found.path
        if any(contains(real, store) for store in self._lesson.stores) or self._is_others(real):
            return STORED
        if any(self._is_wide(path) for path in (found.path, found.leads_to)):
            return "it is too large a part of this machine to propose"
        try:
            mode = os.stat(found.path).st_mode
            resolve(found.path)
        except OSError as error:
            return f"it cannot be looked at: {error.strerror}"
        except (LinkRefused, TooManyLinks):
            where = shown(found.leads_to or found.path)
            return f"it leads to {where} by links that a cage does not follow: have the plugin use that path"
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return "it is neither a file nor a folder, and a cage shows no sockets, pipes or devices"
        asked = Approval(read=(found.path,)) if access == "read" else Approval(write=(found.path,))
        return self._policy_reason(asked)

    def _store_with(self, path: str) -> str:
        """The store that holds the path, or ''. `path`: without links."""
        return next((store for store in self._lesson.stores if contains(store, path)), "")

    def _is_others(self, path: str) -> bool:
        """Whether a path without links is in a store, and not in the set of packages that the plugin is
        from."""
        store = self._store_with(path)
        steps = path[len(store) + 1 :].split("/")  # sets/NAME/…
        own_set = join(store, "/".join(steps[:2]))
        return bool(store) and (len(steps) < 2 or not any(contains(own_set, own) for own in self.scene.own))

    def _policy_reason(self, asked: Approval) -> str:
        if limit_approval(asked, self.scene.approvals) == asked:
            return ""
        return f"policy {self.scene.policy} lets nobody allow it"

    def _is_wide(self, path: str) -> bool:
        shared = (join(home, rest) for home in self.scene.homes for rest in _SHARED_IN_HOMES)
        return path in WIDE_PATHS or path in self.scene.homes or path in shared

    def _may_name(self, folder: str, access: Access) -> bool:
        """Whether a folder may be proposed for what is below it. One directly below / never is, nor one that
        the programs of the whole machine share."""
        found = self._found(folder, set(), 1)
        real = found.leads_to or folder
        if folder.count("/") == 1 or any(contains(real, shared) for shared in _SHARED_FOLDERS):
            return False
        return not self._reason(found, access)

    def _add_group(self, kind: Access, group: PathGroup) -> None:
        count, times = len(group.members), _times(group.times)
        why = f"asked for {times}"
        if count > 1:
            why = f"asked for {count} paths below it, {times} in all"
        elif group.members[0].asked:
            why += f", as {shown(group.members[0].asked)}"
        elif group.members[0].leads_to:
            why += f"; it leads to {shown(group.members[0].leads_to)}"
        self.needs.append(ProposedItem(kind, group.path, why))

    def _refuse(self, what: str, times: int, why: str) -> None:
        known = self.refused.get(what)
        self.refused[what] = UnproposedItem(what, times + (known.times if known else 0), why)

    # --- programs -------------------------------------------------------------------------------------------

    def _note_program(self, path: str, uses: Iterable[str]) -> None:
        if "run" in uses:
            name = os.path.basename(path)
            has = self.is_shown(path) and self.is_local(path) and os.path.exists(path)
            self._programs[name] = self._programs.get(name, False) or has

    def _missing_programs(self) -> Iterator[str]:
        for name, has in self._programs.items():
            place = None if has or not can_be_shown(name) else which(name, path=self._lesson.search_path)
            if place is not None and not self.is_shown(os.path.realpath(place)):
                looked = f"it looked for the program {shown(name)}, which this machine has as {shown(place)}"
                yield f"{looked}: --read shows it, and the plugin's PATH decides whether it is found there"

    # --- hosts and variables --------------------------------------------------------------------------------

    def judge_hosts(self) -> None:
        network = self._lesson.report.get("network") or {}
        ports: dict[str, Counter[int]] = {}
        named = {line["name"]: line for line in network.get("questions", ()) if line["verdict"] == "refused"}
        for line in network.get("connections", ()):
            if line["verdict"] == "refused" and line["reason"] != OWN_LOOPBACK:  # the observer has seen those
                named.setdefault(line["name"], line)
                ports.setdefault(line["name"], Counter())[line["port"]] += line["times"]
        for seen in self._lesson.report["observed"]["connections"]:
            host, port, times = seen["host"], seen["port"], seen["times"]
            if host in named:
                ports.setdefault(host, Counter())[port] += times
            else:
                self._judge_address(host, port, times)
        for name, line in named.items():
            for port, times in (ports.get(name) or Counter({_HTTPS_PORT: line["times"]})).items():
                self._judge_host(name, port or _HTTPS_PORT, times, line["reason"])

    def _judge_host(self, name: str, port: int, times: int, reason: str) -> None:
        try:
            rule = str(parse_rule(f"{name}:{port}"))
        except ValueError:
            self._refuse(name, times, "no list of hosts can have this name")
            return
        if reason not in (NO_NETWORK, NOT_LISTED):
            self._refuse(rule, times, f"it {reason}")
        elif why := self._policy_reason(Approval(network="allowlist", hosts=(rule,))):
            self._refuse(rule, times, why)
        elif len([need for need in self.needs if need.kind == "host"]) >= _MOST_PROPOSED:
            self._refuse(rule, times, "it asked for too many hosts to propose all")
        elif rule not in (need.what for need in self.needs):
            self.needs.append(ProposedItem("host", rule, f"asked for {_times(times)}"))

    def _judge_address(self, address: str, port: int, times: int) -> None:
        """A connection to an address that no name stands for."""
        if port in (0, _DNS_PORT):
            return  # how libraries compare addresses, and ask for names
        if _is_given(address):
            return  # by the gate, for a name: its own record of connections says what became of it
        what = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        if address in LOOPBACK:
            rule = f"{LOCALHOST}:{port}"
            remedy = loopback_remedy(rule, self.scene.loopback, self.scene.policy_file)
            if not remedy and self.scene.network != "host":
                self._judge_host(LOCALHOST, port, times, NOT_LISTED)
                return
            why = f"this is the cage's own loopback; for this machine's {remedy}, and then allow {rule}"
        else:
            why = "it was asked for by its address, and only names can be allowed"
        if self.scene.network in ("none", "allowlist"):
            self._refuse(what, times, why)

    def _undialled(self) -> list[str]:
        """The names that it was given an address for, and did not dial. None if that is not known."""
        network = self._lesson.report.get("network") or {}
        listed = [rule.rpartition(":")[2].split(",") for rule in network.get("rules", ())]
        dialled = {line["name"] for line in network.get("connections", ())}
        for each in self._lesson.report["observed"]["connections"]:
            port = each["port"]
            if port in (0, _DNS_PORT):
                continue
            if not _is_given(each["host"]):
                dialled.add(each["host"])
            # On a port of the list every connection has a line of its own. Without one it is how libraries
            # compare addresses. On others the kernel may have refused it, and nobody knows the name.
            elif not any(str(port) in ports or "*" in ports for ports in listed):
                return []
        given = (
            line["name"]
            for line in network.get("questions", ())
            if line["verdict"] == "allowed" or line["reason"] == NO_NETWORK
        )
        return [name for name in dict.fromkeys(given) if name not in dialled and can_be_shown(name)]

    def judge_variables(self) -> None:
        for name in missing_names(self.scene, read_clues(self._lesson.output).names):
            if why := self._policy_reason(Approval(env=(name,))):
                self._refuse(name, 1, why)
            else:
                said = "it asks for it" if name in self.scene.denied_names else "its output names it"
                self.needs.append(ProposedItem("variable", name, f"{said}, and it is set here"))

    # --- notes ----------------------------------------------------------------------------------------------

    def notes(self) -> Iterator[str]:
        hosts = [need.what for need in self.needs if need.kind == "host"]
        for need in self.needs:
            if need.kind == "variable" and hosts and looks_secret(need.what):
                yield (
                    f"{need.what} looks like a secret: with --hide {need.what} in place of --env {need.what} "
                    f"it uses the value at {' and '.join(hosts[:_MOST_NOTES])}, and does not get it"
                )
        if self._left_out:
            most = f"only the {_MOST_PROPOSED} that it asked for most often are proposed"
            yield f"{self._left_out} more paths were missed; {most}"
        if self._too_deep:
            yield f"{self._too_deep} paths that lie more than {_DEEPEST} folders deep were not looked at"
        yield from _bounded(list(self._missing_programs()), "programs")
        made = [
            f"it wanted to make {shown(path)}: make the folder, run learn again, and --write can name it"
            for path in self._to_make
        ]
        yield from _bounded(made, "paths to make")
        if names := self._undialled():
            more = f" and {len(names) - _MOST_NOTES} more" if len(names) > _MOST_NOTES else ""
            yield f"it looked up {', '.join(names[:_MOST_NOTES])}{more} and did not connect: {REFUSES_GIVEN}"
        home = [
            f"it looked for {shown(path)} in its home in the cage, and your home has it: --read"
            " with --env HOME shows it under its own name"
            for path in self._of_home
            if can_be_shown(path)
        ]
        yield from _bounded(home, "paths of its home")


def _is_given(address: str) -> bool:
    try:
        return any(ip_address(address) in network for network in _GIVEN)
    except ValueError:  # a name that the log has no room for
        return False


def _bounded(lines: list[str], what: str) -> list[str]:
    more = len(lines) - _MOST_NOTES
    return lines if more <= 0 else [*lines[:_MOST_NOTES], f"{more} more {what} are not shown"]


def _limit_notes(report: Mapping[str, Any]) -> Iterator[str]:
    decided_by = (report.get("grant") or {}).get("decided_by", {})
    for name in report.get("limits_hit", ()):
        yield f"it reached its {name} limit: {raise_hint(name, decided_by.items())}"


def _incomplete(observed: Mapping[str, Any]) -> Iterator[str]:
    if not observed["complete"]:
        yield "the process that observes the plugin ended early: nothing that it saw is known"
    if observed["missed"]:
        yield (
            f"it asked for more different things than are noted: {observed['missed']} calls were only counted"
        )
    if observed["unread"]:
        forbids = "kernel.yama.ptrace_scope = 3 or a container may forbid it"
        yield f"the arguments of {observed['unread']} calls could not be read ({forbids})"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"

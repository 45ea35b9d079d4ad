"""Advice on how the cage may have caused a plugin's failure: at most five lines, each with the option to use.

Only for a plugin that failed by itself: it ended with a status other than 0, crashed, took too long, or broke
its contract. These hints are guesses: a line says what the plugin named and did not have. It may have failed
for another reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from runner.launch.advice.clues import Clues, PathClue, read_answer_clues, read_clues
from runner.launch.advice.places import WIDE_PATHS, CagePlaces
from runner.launch.advice.scene import Mention, RefusedHost, Scene
from runner.outcome import ITS_ANSWER, Advice, AdviceKind
from sandbox.network.egress import SYNTHETIC_IPV4
from sandbox.network.rules import LOCALHOST, parse_rule
from sandbox.paths.denied_paths import lexical_fault
from sandbox.paths.guarded import GUARDED
from sandbox.paths.mounts import Mounts, contains
from sandbox.policy.approval import limit_approval
from sandbox.policy.policy import is_loopback, loopback_remedy
from sandbox.spec import Access, Approval

MOST_SHOWN = 5
_MOST_OF_A_KIND = 3  # if there are other kinds
_ITS_STDERR = "its stderr"
# Files that well-known servers keep beside their code, and the variable that moves each.
_MOVED_BY = (("memory.jsonl", "MEMORY_FILE_PATH"), ("memory.json", "MEMORY_FILE_PATH"))

# Every login has these, so a message about one of them says nothing.
_COMMON_NAMES = frozenset(("PATH", "HOME", "PWD", "OLDPWD", "SHELL", "USER", "LOGNAME", "TERM", "LANG"))


# Of a plugin that refuses the addresses that names have in its cage.
REFUSES_GIVEN = (
    f"in the cage a name has an address of {SYNTHETIC_IPV4}, which some servers refuse themselves, as not"
    " public; docs/network.md says what helps"
)


def advise(
    scene: Scene, stderr: str = "", mounts: Mounts | None = None, answers: str = ""
) -> tuple[Advice, ...]:
    """The advice, most useful first. `stderr`: its last lines. `mounts`: of this machine. `answers`: the
    errors that it answered calls with."""
    clues = read_clues(stderr) if stderr.strip() else Clues()
    answered = read_answer_clues(answers) if answers.strip() else Clues()
    found: dict[str, Advice] = {}
    paths = _PathAdvice(scene, mounts)
    for each in (
        *(host_advice(scene, host) for host in scene.hosts),
        *_unresolved(scene, clues, _ITS_STDERR),
        *_unresolved(scene, answered, ITS_ANSWER),
        *_refuses_given(scene, clues, _ITS_STDERR),
        *_refuses_given(scene, answered, ITS_ANSWER),
        *_users(scene, clues),
        *_limits(scene, clues),
        *_closed_ports(scene, {_ITS_STDERR: clues, ITS_ANSWER: answered}),
        # Before those of stderr, which may name the same: these are shown for a call that failed, too.
        *_PathAdvice(scene, mounts).of_text(answered.paths, ITS_ANSWER),
        *paths.of_text(clues.paths, _ITS_STDERR),
        *paths.of_words(scene.mentions),
        *_variables(scene, clues.names),
    ):
        found.setdefault(each.option or each.what, each)
    return _select(tuple(found.values()))


def _select(found: tuple[Advice, ...]) -> tuple[Advice, ...]:
    """The first ones, but not all of one kind."""
    counts: dict[AdviceKind, int] = {}
    first: list[Advice] = []
    rest: list[Advice] = []
    for each in found:
        counts[each.kind] = counts.get(each.kind, 0) + 1
        (first if counts[each.kind] <= _MOST_OF_A_KIND else rest).append(each)
    taken = {*first[:MOST_SHOWN], *rest[: max(0, MOST_SHOWN - len(first))]}
    return tuple(each for each in found if each in taken)


def _users(scene: Scene, clues: Clues) -> Iterator[Advice]:
    if scene.image and clues.other_user:
        what = f"{_ITS_STDERR} says that it could not become another user, or give files to one"
        why = f"in its cage {scene.image} has one uid"
        helps = "start it as that user at once: --user USER, or docker run -u USER in an entry"
        yield Advice("user", f"{what}: {why}; {helps}")


# --- limits -------------------------------------------------------------------------------------------------


def _limits(scene: Scene, clues: Clues) -> Iterator[Advice]:
    for limit in scene.process_limits:
        if limit.name in clues.exhausted:
            what = {"memory": "memory ran out", "pids": "no process or thread could be made"}[limit.name]
            limited = f"the {limit.name} limit is {limit.amount}, counted without a cgroup"
            yield Advice("limit", f"{_ITS_STDERR} says that {what}; {limited}: {limit.remedy}")


# --- hosts --------------------------------------------------------------------------------------------------


def host_advice(scene: Scene, host: RefusedHost) -> Advice:
    return _host(scene, host.message, host.rule) if host.rule else Advice("host", host.message)


def _unresolved(scene: Scene, clues: Clues, who: str) -> Iterator[Advice]:
    if scene.network != "none":
        return  # the gate has seen each name
    if clues.offline and not clues.hosts and not scene.hosts:
        what = f"{who} says that a host was not found, and it has no network"
        yield _host(scene, what, "HOST:443")
    for name, port in clues.hosts:
        try:
            rule = str(parse_rule(f"{name}:{port}"))
        except ValueError:
            continue
        if "." in name and not name.startswith("127."):  # localhost is the cage's own
            yield _host(scene, f"{who} names the host {name}, and it has no network", rule)


def _refuses_given(scene: Scene, clues: Clues, who: str) -> Iterator[Advice]:
    if clues.given and scene.network in ("allowlist", "open"):
        yield Advice("host", f"{who} names the address {clues.given}: {REFUSES_GIVEN}")


def _closed_ports(scene: Scene, clues: Mapping[str, Clues]) -> Iterator[Advice]:
    """Databases and the like, which this machine may have and the cage has not."""
    ports = {port: who for who, each in clues.items() for port in each.closed}
    told = {host.rule for host in scene.hosts}
    for port, who in ports.items() if scene.network != "host" else ():
        if f"{LOCALHOST}:{port}" in told:
            continue
        what = f"{who} says that {LOCALHOST}:{port} refused a connection, and in the cage that is its own"
        yield _host(scene, what, f"{LOCALHOST}:{port}")


def _host(scene: Scene, what: str, rule: str) -> Advice:
    import shlex

    asked = Approval(network="allowlist", hosts=(rule,))
    if is_loopback(rule) and (remedy := loopback_remedy(rule, scene.loopback, scene.policy_file)):
        option = shlex.join((*scene.allow, "--net", rule)) if scene.allow else f"--net {rule}"
        what = f"{what}; policy {scene.policy} opens no such port of this machine"
        return Advice("host", f"{what}: {remedy}, and then: {option}")
    where = f'"{rule}" to hosts, with network = "allowlist", under [approvals]'
    return _option_advice(scene, "host", what, ("--net", rule), asked, where)


# --- variables ----------------------------------------------------------------------------------------------


def missing_names(scene: Scene, said: Iterable[str]) -> tuple[str, ...]:
    """The variables that the plugin asked for, or that its output names (`said`), and that it does not
    have."""
    named = [name for name in said if name in scene.withheld and name not in _COMMON_NAMES]
    return tuple(dict.fromkeys((*named, *scene.denied_names)))


def _variables(scene: Scene, names: Iterable[str]) -> Iterator[Advice]:
    for name in missing_names(scene, names):
        asked = Approval(env=(name,))
        what = f"the variable {name} of this environment was not passed on"
        if name in scene.denied_names:
            what = f"it asked for the variable {name}, which was withheld"
        where = f'"{name}" to env under [approvals]'
        yield _option_advice(scene, "variable", what, ("--env", name), asked, where)


# --- paths --------------------------------------------------------------------------------------------------


class _PathAdvice(CagePlaces):
    """Advice about paths. Only looks whether they exist: it opens nothing and follows no link at their
    end."""

    def __init__(self, scene: Scene, mounts: Mounts | None) -> None:
        super().__init__(scene, mounts)
        self._told: list[tuple[str, Access]] = []

    def of_text(self, clues: Iterable[PathClue], text: str) -> Iterator[Advice]:
        """`text`: what the plugin wrote them in."""
        scene = self.scene
        wanted, inside = "it wanted to write", "it wanted to write in"
        if text == ITS_ANSWER:
            wanted, inside = f"{text} names", f"{text} names a file in"
        for clue in clues:
            path = self._existing_path(clue)
            if path is None or path in scene.own:
                continue  # many programs start messages with their own name
            if self.is_shown(path):
                guard = next((each for each in scene.guarded if contains(each, path)), None)
                if guard is not None and (clue.read_only or clue.mounted):
                    yield from self._guarded(guard, wanted)
                elif clue.read_only and not self.is_writable(path):
                    yield from self._read_only(path, wanted, inside)
            elif self._is_above_a_mention(path) and self.denial(path, "read"):
                continue  # `mkdir -p` begins with a folder that no option grants: the word says what it wants
            elif self.exists(path):
                yield from self._advice(path, "write" if clue.written else "read", f"{text} names")
            elif clue.read_only and self.is_folder(folder := os.path.dirname(path)):
                held = any(contains(folder, own) for own in scene.own)
                if text != ITS_ANSWER and (held or self.denial(folder, "write")):
                    yield from self._missing(path, wanted.replace("write", "make"))
                else:
                    yield from self._advice(folder, "write", inside)
            elif text == ITS_ANSWER and self._is_hidden(folder := os.path.dirname(path)):
                # It may have wanted to make the file, or it was given a wrong name: the least that helps.
                yield from self._advice(folder, "read", inside)

    def of_words(self, mentions: Iterable[Mention]) -> Iterator[Advice]:
        for who, word in mentions:
            path = self.absolute(word.removeprefix("file://"))
            if path is None:
                yield from self._relative(who, word)
            elif self.is_shown(path):
                continue
            elif self.exists(path):
                yield from self._advice(path, "read", f"{who} names")
            elif _is_plain(word) and self.is_folder(folder := os.path.dirname(path)):
                # No advice about files that do not exist and cannot be written: a note says so.
                found = self._advice(folder, "write", f"{who} names a file in")
                yield from (advice for advice in found if advice.option)
            elif _is_plain(word) and self.is_folder(os.path.dirname(folder)):
                yield from self._missing(folder, f"{who} names a file in")

    def _is_hidden(self, folder: str) -> bool:
        """Whether this folder exists, is not in the cage, and is narrow enough to be proposed."""
        return self.is_folder(folder) and not self.is_shown(folder) and folder not in WIDE_PATHS

    def _is_above_a_mention(self, path: str) -> bool:
        """Whether a word that the plugin was given is a path below this one, in a folder that can be
        granted."""
        named = filter(None, (self.absolute(word.removeprefix("file://")) for _, word in self.scene.mentions))
        below = (os.path.dirname(each) for each in named if each != path and contains(path, each))
        return any(not self.denial(folder, "write") for folder in below)

    def _existing_path(self, clue: PathClue) -> str | None:
        """The first reading that exists, else the last."""
        readings = [path for word in clue.paths if (path := self.absolute(word)) is not None]
        return next(filter(self.exists, readings), readings[-1] if readings else None)

    def _relative(self, who: str, word: str) -> Iterator[Advice]:
        """A word that is a path relative to the operator's directory, if the program starts elsewhere."""
        scene = self.scene
        if scene.inside == scene.directory or word.startswith(("-", "~")) or word in (".", ".."):
            return
        path = os.path.normpath(os.path.join(scene.directory, word))
        if lexical_fault(path) or not self.exists(path):
            return
        told = f"{who} names {path} by a relative path, and it did not start in"
        yield from self._advice(scene.directory, "read", told)

    def _guarded(self, guard: str, wanted: str) -> Iterator[Advice]:
        remedy = "no option lets it write there: make or change it outside of the cage"
        yield Advice("write", f"{wanted} {guard}, which stays read-only: {GUARDED}; {remedy}")

    def _missing(self, folder: str, who: str) -> Iterator[Advice]:
        """A folder that does not exist on the host either, and has to before it can be granted."""
        import shlex

        if self.denial(folder, "write"):
            return
        what = f"{who} {folder}, which does not exist: make it first (mkdir {shlex.quote(folder)})"
        self._told.append((folder, "write"))
        where = f'"{folder}" to write under [approvals]'
        yield _option_advice(self.scene, "write", what, ("--write", folder), Approval(write=(folder,)), where)

    def _read_only(self, path: str, wanted: str, inside: str) -> Iterator[Advice]:
        file = os.path.basename(path)
        named = next((each for each in _MOVED_BY if file.startswith(each[0])), None)
        mover = "an option or a variable of its own may move it to a path in ${state_dir}"
        if named is not None:
            mover = f"set {named[1]}=${{state_dir}}/{named[0]} for it, which moves the file to its state"
        if self.exists(path):
            yield from self._advice(path, "write", wanted, mover)
        elif self.is_folder(folder := os.path.dirname(path)):
            yield from self._advice(folder, "write", inside, mover)

    def _advice(self, path: str, access: Access, who: str, mover: str = "") -> Iterator[Advice]:
        """`mover`: of a path that is shown read-only, what helps where no option does."""
        scene = self.scene
        if any(contains(told, path) and (access == "read" or kind == "write") for told, kind in self._told):
            return
        self._told.append((path, access))
        state = "which is read-only in the cage" if mover else "which is not in the cage"
        what = f"{who} {path}, {state}"
        if clause := self.denial(path, access):
            told = f"{what}, and no option grants it: it {clause}"
            yield Advice(access, f"{told}; {mover}" if mover else told)
            return
        if access == "write" and any(contains(path, own) for own in scene.own):
            remedy = "no option lets it write there: have it write to another folder, which --write can name"
            remedy += f"; {mover}" if mover else ""
            yield Advice("write", f"{what}, and which holds the program; {remedy}")
            return
        asked = Approval(read=(path,)) if access == "read" else Approval(write=(path,))
        where = f'"{path}" to {access} under [approvals]'
        yield _option_advice(scene, access, what, (f"--{access}", path), asked, where)


def _is_plain(word: str) -> bool:
    """Whether a word that does not exist may be a path to create. A line of shell is not."""
    return not any(character.isspace() or character in "$;&|<>*?(){}'\"`" for character in word)


# --- who may grant it ---------------------------------------------------------------------------------------


def _option_advice(
    scene: Scene, kind: AdviceKind, what: str, option: tuple[str, str], asked: Approval, where: str
) -> Advice:
    """Advice with the option that grants it, if the policy lets a person use it. `where`: what the operator
    can add to the policy otherwise."""
    import shlex

    words = shlex.join(option)
    if limit_approval(asked, scene.approvals) == asked:
        return Advice(kind, what, words, shlex.join((*scene.allow, *option)) if scene.allow else "")
    if limit_approval(asked, scene.ceilings) == asked:
        if not scene.allow:
            return Advice(kind, what, words)
        return Advice(kind, f"{what}; policy {scene.policy} gives it to a manifest that asks for it")
    return Advice(
        kind,
        f"{what}; policy {scene.policy} lets nobody allow it: the operator can add {where} in the policy",
    )

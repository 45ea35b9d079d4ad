"""runner doctor --attack: the attacks of sandbox/attacks/, in the cage of a policy or in another sandbox."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from runner import __version__
from runner.cli.attacking.page import html_page
from runner.cli.shared.text import say
from runner.launch.command import Command
from runner.launch.rehearse import rehearse
from runner.launch.stages import Invocation, Planned, limits_of
from runner.outcome import EXIT
from sandbox.attacks.attacks import ATTACKS, LAYERS, OUT_OF_MEMORY, SMALL, Attack, Control
from sandbox.attacks.bounded import BoundedRun, memory_file, run_bounded
from sandbox.attacks.controls import run_control
from sandbox.attacks.decoy import Decoys, make_decoys
from sandbox.attacks.judge import Row, all_held, judge, judge_foreign, program, read_answers
from sandbox.doctor.bwrap_version import read_version
from sandbox.document.diagnostic import printable
from sandbox.document.read import read_bounded
from sandbox.policy.policy import Policy
from sandbox.seccomp import syscalls
from sandbox.spec import Limits, Overrides

SCHEMA = "runner.attack.v1"
PROBE_FILE = "{probe}"  # in a command line of --against: the path of the probe
_VARIABLE = "RUNNER_ATTACK_SECRET"
_LEAVE = "leave_a_process"
_SAY = "say"
_PYTHON_PLACES = "/usr/bin:/usr/local/bin"
# The attacks that any sandbox can be tried with, in one launch.
_PLAIN = [each for each in ATTACKS if not each.limit and each.act[0] != _SAY]

Observed = dict[str, str]  # by the attack's id


class CannotAttack(Exception):
    """The sandbox did not run the probe. The text says why."""


def attack_own(policy: Policy) -> dict[str, Any]:
    """Attack the cage of a policy. Returns the document. Raises Failure or CannotAttack."""
    facts = _policy_facts(policy)
    command = Command((_python(), "-I", "-S", "-"), "/")
    invocation = Invocation("", policy=policy.name, command=command)
    planned = rehearse(invocation, os.environ)
    unmet = _unenforced(rehearse(invocation._replace(overrides=Overrides(limits=SMALL)), os.environ))
    with _ended_by_signals(), make_decoys() as decoys:
        scene = _Scene(decoys, policy.name)
        own = {**scene.in_cage(), **scene.in_small_cage(), **scene.read_by_runner()}
        without = scene.without(planned)
        rows = [
            judge(
                each, own.get(each.id), without.get(each.id), scene.excuse(each) or unmet.get(each.limit, "")
            )
            for each in ATTACKS
        ]
    if _policy_facts(policy) != facts:
        raise CannotAttack(f"{printable(policy.file)} was changed meanwhile; start again")
    return _document(rows, {"policy": facts, "bwrap": _bwrap(planned.bwrap)})


def attack_other(words: Sequence[str]) -> dict[str, Any]:
    """Attack another sandbox, by its command line. Returns the document. Raises CannotAttack."""
    with _ended_by_signals(), make_decoys() as decoys:
        scene = _Scene(decoys)
        theirs = scene.in_other(words)
        bare = scene.in_other(())
        rows = [
            judge_foreign(each, theirs.get(each.id), bare.get(each.id), _foreign(each, scene))
            for each in ATTACKS
        ]
    return _document(rows, {"against": [printable(word) for word in words]})


def _foreign(attack: Attack, scene: _Scene) -> str:
    if attack.limit:
        return "the limits of another sandbox are not known"
    if attack.act[0] == _SAY:
        return "it is about this runner's own reading"
    return scene.excuse(attack)


def _unenforced(planned: Planned) -> dict[str, str]:
    """The limits that this machine does not enforce and the policy does not require, with the reason."""
    return {
        limit.name: f"the policy prefers this limit, and here {limit.enforced_by or 'nothing'} enforces it"
        for limit in limits_of(planned).all
        if limit.degraded
    }


class _Scene:
    """The decoys, and the sandboxes in which they are attacked."""

    def __init__(self, decoys: Decoys, policy: str = "") -> None:
        """`policy`: of our own cages, by its name or absolute path."""
        self._decoys, self._policy, self._python = decoys, policy, _python()
        self._calls = syscalls.load(os.uname().machine)

    def excuse(self, attack: Attack) -> str:
        """Why an attack cannot be tried on this machine, or ''."""
        if attack.act[0] == "int_0x80" and os.uname().machine != "x86_64":
            return "only x86_64 has it"
        return "" if self._words(attack) is not None else "this machine has nothing of the kind"

    def _words(self, attack: Attack) -> list[str] | None:
        if attack.act[0] == _SAY:
            return [*attack.act]
        words: list[str] = []
        for word in attack.act:
            if word.startswith("call:"):
                number = self._calls.get(word[5:])
                filled = None if number is None else str(number)
            else:
                filled = self._decoys.fill(word)
            if filled is None:
                return None
            words.append(filled)
        return words

    # --- our own cage ---

    def _runner(self, verb: str) -> list[str]:
        return [sys.executable, "-P", "-m", "runner", verb, "--policy", self._policy]

    def in_cage(self) -> Observed:
        """The attacks that leave the cage alive, in one launch."""
        return self._launch(_PLAIN, Limits())

    def in_small_cage(self) -> Observed:
        """The attacks on limits, in one launch. The last one ends it."""
        return self._launch([each for each in ATTACKS if each.limit], SMALL)

    def _launch(self, attacks: Sequence[Attack], limits: Limits) -> Observed:
        options = [
            word
            for name, value in limits._asdict().items()
            if value is not None
            for word in ("--limit", f"{name}={value}")
        ]
        with _report_file() as report:
            line = [*self._runner("run"), *options, "--report", str(report), "--", self._python]
            observed, run = self._attack(attacks, [*line, "-I", "-S", "-"], (report,))
            outcome = _outcome(report)
        if not observed:
            raise CannotAttack(
                _why(run, f"the cage did not run the probe ({outcome.get('code', 'no report')})")
            )
        unanswered = [name for name in self._attempts(attacks) if name not in observed]
        if outcome.get("cause") == "oom" and unanswered == [attacks[-1].id]:
            observed[attacks[-1].id] = OUT_OF_MEMORY
        return observed

    def read_by_runner(self) -> Observed:
        """Plugins whose messages the runner reads, and must end."""
        return {each.id: self._read(each) for each in ATTACKS if each.act[0] == _SAY}

    def _read(self, attack: Attack) -> str:
        code = f"import sys; sys.stdin.readline()\n{attack.act[1]}\nsys.stdout.flush(); sys.stdin.read()"
        with _report_file() as report:
            line = [*self._runner("tools"), "--report", str(report), "--", self._python, "-I", "-S", "-c"]
            run = run_bounded([*line, code], env=os.environ, pass_fds=[report])
            outcome = _outcome(report)
        return f"ended by the runner ({outcome['cause']})" if run.status and outcome else f"done: {run.fault}"

    # --- controls ---

    def without(self, planned: Planned) -> Observed:
        """Each attack with its layer removed, one launch for each layer."""
        found: Observed = {}
        groups: dict[Control, list[Attack]] = {}
        for attack in ATTACKS:
            groups.setdefault(LAYERS[attack.layer].control, []).append(attack)
        for control, attacks in groups.items():
            if control == "bare":
                found |= self._in_other((), attacks)[0]
            elif control == "unread":
                found |= self._unread(attacks, planned)
            elif control != "uid" or os.geteuid() == 0:
                wanted = self._attempts(attacks)
                made = program(self._decoys.nonce, list(wanted.values()))
                run = run_control(planned.plan, planned.bwrap, control, made)
                found |= self._answers(wanted, run)
        return found

    def _unread(self, attacks: Sequence[Attack], planned: Planned) -> Observed:
        """What the same plugins print if nobody reads it: all of it arrives."""
        said = b"".join(f"{each.act[1]}\n".encode() for each in attacks)
        run = run_control(planned.plan, planned.bwrap, "unread", said, most_output=32 << 20)
        arrived = f"done: {len(run.output)} bytes"
        return {each.id: arrived for each in attacks if run.status == 0 and run.output}

    # --- other sandboxes ---

    def in_other(self, words: Sequence[str]) -> Observed:
        """The attacks in another sandbox, or in none. Raises CannotAttack."""
        observed, run = self._in_other(words, _PLAIN)
        if not observed:
            raise CannotAttack(_why(run, "the command did not run the probe"))
        return observed

    def _in_other(self, words: Sequence[str], attacks: Sequence[Attack]) -> tuple[Observed, BoundedRun]:
        if any(PROBE_FILE in word for word in words):
            if "folder" not in self._decoys.made:
                raise CannotAttack(f"{PROBE_FILE} needs a folder in /var/tmp, and none could be made")
            path = f"{self._decoys.made['folder']}/probe.py"
            wanted = self._attempts(attacks)
            with open(path, "wb") as file:
                file.write(program(self._decoys.nonce, list(wanted.values())))
            os.chmod(path, 0o644)
            line = [word.replace(PROBE_FILE, path) for word in words]
        else:
            line = [*words, "python3" if words else self._python, "-I", "-S", "-"]
        return self._attack(attacks, line)

    # --- all of them ---

    def _attempts(self, attacks: Iterable[Attack]) -> dict[str, list[str]]:
        return {each.id: words for each in attacks if not self.excuse(each) and (words := self._words(each))}

    def _attack(
        self, attacks: Sequence[Attack], line: Sequence[str], more: Sequence[int] = ()
    ) -> tuple[Observed, BoundedRun]:
        """Run the probe by a command line, with a secret in its environment and a folder left open."""
        wanted = self._attempts(attacks)
        env = {**os.environ, _VARIABLE: self._decoys.variable}
        folder = self._decoys.made.get("folder", "/")
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            made = program(self._decoys.nonce, list(wanted.values()))
            run = run_bounded(
                line, stdin=made, env=env, pass_fds=(opened, *more), leftovers=self._decoys.made["left"]
            )
        finally:
            os.close(opened)
        return self._answers(wanted, run), run

    def _answers(self, wanted: Mapping[str, list[str]], run: BoundedRun) -> Observed:
        answers = read_answers(run.output, self._decoys.nonce, len(wanted))
        ids = list(wanted)
        found = {ids[number]: words for number, words in answers.items()}
        for name, words in wanted.items():
            if words[0] == _LEAVE and found.get(name) == "done" and not run.left_processes:
                found[name] = "gone"
        return found


# --- command lines ------------------------------------------------------------------------------------------


def _python() -> str:
    return shutil.which("python3", path=_PYTHON_PLACES) or os.path.realpath(sys.executable)


def _why(run: BoundedRun, what: str) -> str:
    last = run.complaint.strip().splitlines()[-1:] or [""]
    said = printable(last[0][:300])
    return "; ".join(filter(None, (what, run.fault, f"it said: {said}" if said else "")))


@contextlib.contextmanager
def _report_file() -> Iterator[int]:
    made = memory_file(b"")
    try:
        yield made
    finally:
        os.close(made)


def _outcome(report: int) -> dict[str, str]:
    """The outcome in a report; empty if there is none."""
    os.lseek(report, 0, os.SEEK_SET)
    try:
        found: dict[str, str] = json.loads(os.read(report, 1 << 20))["outcome"]
    except (ValueError, KeyError):
        return {}
    return found


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as Ctrl-C does, so that everything is cleaned up."""

    def end(number: int, _: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- the document -------------------------------------------------------------------------------------------


def _document(rows: Sequence[Row], subject: dict[str, Any]) -> dict[str, Any]:
    count = {
        verdict: sum(row.verdict == verdict for row in rows)
        for verdict in ("held", "not_held", "not_counted")
    }
    return {
        "schema": SCHEMA,
        "ok": all_held(rows),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": {
            "name": platform.node(),
            "kernel": f"{platform.system()} {platform.release()}",
            "processor": platform.machine(),
            "python": platform.python_version(),
            "uid": os.geteuid(),
        },
        **subject,
        "count": count,
        "rows": [
            {
                "id": row.attack.id,
                "class": row.attack.group,
                "tries": row.attack.tries,
                "cves": list(row.attack.cves),
                "layer": LAYERS[row.attack.layer].title,
                "observed": row.observed,
                "control": row.control,
                "verdict": row.verdict,
                "note": row.note,
                "remedy": LAYERS[row.attack.layer].remedy if row.verdict == "not_held" else "",
            }
            for row in rows
        ],
    }


def _policy_facts(policy: Policy) -> dict[str, str]:
    digest = hashlib.sha256(read_bounded(policy.file)).hexdigest()
    return {"name": policy.name, "file": policy.file, "digest": f"sha256:{digest}"}


def _bwrap(path: str) -> dict[str, str]:
    return {"file": path, "version": printable(read_version(path))}


def text(document: Mapping[str, Any]) -> str:
    """The table for people. The remedy of an attack that was not held stands below it."""
    words = {"held": "held", "not_held": "NOT HELD", "not_counted": "not counted"}
    cells = [
        (" ".join((row["tries"], *row["cves"])), row["layer"], row["observed"], words[row["verdict"]])
        for row in document["rows"]
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines, group = [], ""
    for row, cell in zip(document["rows"], cells, strict=True):
        if row["class"] != group:
            group = row["class"]
            lines += ["", group]
        line = "  ".join(word.ljust(width) for word, width in zip(cell, widths, strict=True))
        lines.append(f"  {line}".rstrip() + (f": {row['note']}" if row["note"] else ""))
        if row["remedy"]:
            lines.append(f"    -> {row['remedy']}")
    count = document["count"]
    total = count["held"] + count["not_held"]
    verdict = (
        f"{count['held']} of {total} attacks that count were held. {count['not_counted']} do not count here."
    )
    return "\n".join([*lines[1:], "", verdict])


def print_document(document: Mapping[str, Any], form: str) -> int:
    """Print it, and return the exit status."""
    if form == "json":
        print(json.dumps(document, indent=2))
    elif form == "html":
        print(html_page(document), end="")
    else:
        say(text(document), sys.stdout)
    return EXIT["ok" if document["ok"] else "sandbox_unavailable"]

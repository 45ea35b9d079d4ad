"""What a host is judged by: the stand-in plugin that it starts, and the checks that rules are made of.

A check reads the logs of the stand-in's processes. What the host never did, such as a call, makes a check not
applicable: only what it did can be wrong. A message is meant by its kind: its method, its type, or "answer".
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec

from runner.conformance.report import ContractRule, Result, Transcript, TranscriptLine
from runner.conformance.rules import find, mismatch
from sandbox.speed.value import NamedTuple

# What the stand-in does in each run. Each is one start of the host's command.
RUNS: Mapping[str, str] = {
    "plain": "answers at once",
    "pieces": "answers late, and writes each answer in pieces",
    "extra": "adds an unknown key to its answers, and sends what a host may ignore",
    "large": "gives the call a large answer",
    "stderr": "writes 1 MiB to stderr before it answers the handshake",
    "error": "answers the call with an error",
    "asks": "asks the host for something before it answers the call",
    "silent": "does not answer the call, and the host's command gets SIGINT",
    "stubborn": "does not end when it should, nor by SIGTERM",
    "impostor": "answers the handshake with an identity or a version that a host has to refuse",
    "modern": "speaks a newer version of the protocol that has no handshake",
}
NEED_CALL = ("extra", "large", "error", "asks", "silent")
NO_MANIFEST = "the host was given the program, and not the manifest"
NOTHING_SENT, NO_START = "the host sent nothing", "the host started nothing"


class StandInReply(NamedTuple):
    """What the stand-in sends when a message of some kind comes."""

    send: Any = None  # "$id" in it is the value of that key of the message, "$large" a text. None: nothing
    opening: bool = False  # it answers the handshake
    call: bool = False  # it answers what a host wants of a plugin
    exits: bool = False  # the stand-in ends after it
    other: Mapping[str, Any] = {}  # what is sent instead, in runs of these names


class StandIn(NamedTuple):
    """The stand-in plugin of one contract, and the rules for its hosts."""

    framing: Literal["lines", "length"]
    files: Mapping[str, str]  # of its folder, the manifest first
    program: str  # the file of its program, in that folder
    about: str  # what a host can call, for people
    replies: Mapping[str, StandInReply]  # by kind; "*" is any other request
    rules: tuple[NumberedHostRule, ...]
    large: int = 1_000_000  # characters of the large answer
    ask: Any = None  # the request in the run "asks"
    extra: tuple[Any, ...] = ()  # messages in the run "extra"

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of RUNS that this stand-in can do."""
        special = {name for reply in self.replies.values() for name in reply.other}
        special |= {"asks"} if self.ask is not None else set()
        return tuple(name for name in RUNS if name in special or name not in ("asks", "impostor", "modern"))


def result_of(result: Any) -> Any:
    return {"jsonrpc": "2.0", "id": "$id", "result": result}


def error_of(code: int, message: str = "the stand-in refuses", **more: Any) -> Any:
    return {"jsonrpc": "2.0", "id": "$id", "error": {"code": code, "message": message, **more}}


class ToldEntry(NamedTuple):
    """Something that a process of the stand-in told."""

    what: str
    time: float
    facts: Mapping[str, Any]

    @property
    def message(self) -> Mapping[str, Any]:
        """The message of a frame; empty if it is none, or is too long to be told whole."""
        try:
            found = json.loads(self.facts["text"])
        except (KeyError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) and not self.facts.get("fault") else {}


class PluginLog(NamedTuple):
    """What one process of the stand-in told."""

    entries: tuple[ToldEntry, ...]
    closed: float | None  # when the process had ended; None: it was still there after its host

    def of(self, what: str) -> list[ToldEntry]:
        return [each for each in self.entries if each.what == what]

    @property
    def start(self) -> Mapping[str, Any]:
        return self.entries[0].facts

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Of the host."""
        return [message for each in self.of("frame") if (message := each.message)]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [each for each in self.messages if kind in (kind_of(each), "*")]

    @property
    def exchange(self) -> tuple[TranscriptLine, ...]:
        transcript = Transcript()
        for each in self.entries:
            if each.what == "sent":
                transcript.sent(each.facts["text"].encode())
            elif each.what == "frame":
                transcript.received(each.facts["text"].encode(), each.facts["size"])
            else:
                shown = ("argv", "cwd", "descriptors", "number", "code")
                facts = " ".join(f"{key} {each.facts[key]}" for key in shown if key in each.facts)
                transcript.seen(f"{each.what} {facts}".strip())
        transcript.seen(f"the process {'was still there' if self.closed is None else 'had ended'}")
        return transcript.lines


class HostRun(NamedTuple):
    """One start of the host's command."""

    status: int | None  # as of subprocess; None: it was ended at the deadline
    logs: tuple[PluginLog, ...]


Trial = Mapping[str, HostRun]  # by the names of runs


class HostFinding(NamedTuple):
    result: Result
    reason: str = ""
    log: PluginLog | None = None  # the one that shows it


Check = Callable[[Trial], HostFinding]
Row = tuple[str, str, Check]  # the rule's text, its place in the contract's text, and how it is checked


class NumberedHostRule(NamedTuple):
    rule: ContractRule
    check: Check


def number_rules(contract: str, source: str, rows: Sequence[Row]) -> tuple[NumberedHostRule, ...]:
    """The rules of a contract, whose text is called `source`. Numbers stay: a new row is added at the end."""
    return tuple(
        NumberedHostRule(ContractRule(f"{contract}-H{number:02}", text, f"{source}, {place}"), check)
        for number, (text, place, check) in enumerate(rows, 1)
    )


def kind_of(message: Mapping[str, Any]) -> str:
    return str(message.get("method") or message.get("type") or "answer")[:80]


def each_log(judge: Callable[[PluginLog], str | None], nothing: str, *runs: str) -> Check:
    """A check of every log, or of those of these runs. `judge` returns what is wrong, '' if nothing is, or
    None if it does not apply; `nothing` says why it applied nowhere."""

    def check(trial: Trial) -> HostFinding:
        seen = None
        for name, run in trial.items():
            for log in run.logs if not runs or name in runs else ():
                if fault := judge(log):
                    return HostFinding("fail", f"run {name}: {fault}", log)
                seen = log if seen is None and fault is not None else seen
        return HostFinding("n/a", nothing) if seen is None else HostFinding("pass", "", seen)

    return check


P = ParamSpec("P")


def _check_each(
    nothing: str, *runs: str
) -> Callable[[Callable[Concatenate[PluginLog, P], str | None]], Callable[P, Check]]:
    """For functions that judge a log: what they make of their other arguments is a check."""

    def decorate(judge: Callable[Concatenate[PluginLog, P], str | None]) -> Callable[P, Check]:
        def make(*args: P.args, **kwargs: P.kwargs) -> Check:
            return each_log(lambda log: judge(log, *args, **kwargs), nothing, *runs)

        return make

    return decorate


# --- what the host sends ------------------------------------------------------------------------------------


@_check_each(NOTHING_SENT)
def framed(log: PluginLog) -> str | None:
    faults = [each.facts["fault"] for each in log.of("frame")]
    return next(filter(None, faults), "") if faults else None


@_check_each(NOTHING_SENT)
def first(log: PluginLog, kind: str) -> str | None:
    opening = kind_of(log.messages[0]) if log.messages else None
    return opening and ("" if opening == kind else f"the first message is {opening}")


@_check_each(NOTHING_SENT)
def only(log: PluginLog, *kinds: str) -> str | None:
    strange = [kind for each in log.messages if (kind := kind_of(each)) not in kinds]
    return f"it got {strange[0]}" if strange else "" if log.messages else None


@_check_each("there was no handshake", "pieces")
def waits(log: PluginLog) -> str | None:
    told = [each.facts["more"] for each in log.of("early")]
    return "the host did not wait for the answer" if any(told) else "" if told else None


@_check_each("the host sent nothing that has to wait")
def precedes(log: PluginLog, earlier: str, *later: str, given: str) -> str | None:
    """A message of one kind stands before those of others, in conversations that have one of kind `given`."""
    kinds = list(map(kind_of, log.messages))
    places = [place for place, kind in enumerate(kinds) if kind in later]
    if not places or given not in kinds:
        return None
    return "" if earlier in kinds[: places[0]] else f"{kinds[places[0]]} came before {earlier}"


@_check_each("the host sent no request")
def at_most_one(log: PluginLog, kind: str) -> str | None:
    found = len(log.of_kind(kind))
    return f"one process got {found} of them" if found > 1 else "" if found else None


@_check_each("the host sent no request")
def unique_ids(log: PluginLog) -> str | None:
    ids = [each["id"] for each in log.messages if "id" in each and kind_of(each) != "answer"]
    again = [value for place, value in enumerate(ids) if value in ids[:place]]
    return f"the id {again[0]!r} was used before" if again else "" if ids else None


def fields(kind: str, pattern: Any, *runs: str) -> Check:
    """Messages of that kind match the pattern: runner/conformance/rules.py says how it is written."""

    def judge(log: PluginLog) -> str | None:
        found = log.of_kind(kind)
        faults = (f"{kind_of(each)}: {fault}" for each in found if (fault := mismatch(pattern, each)))
        return next(faults, "") if found else None

    return each_log(judge, f"the host sent no {kind}", *runs)


def absent(value: Any) -> str:
    """A pattern for a key that may not be there: {"id?": absent}."""
    return "it may not be there"


REQUEST: Any = {"id": (int, str)}  # patterns
NOTIFICATION: Any = {"id?": absent}
JSON_RPC: Any = {"jsonrpc": "2.0"}


@_check_each("the host sent no call, so the stand-in did not ask", "asks")
def answers(log: PluginLog, *codes: int) -> str | None:
    """What the stand-in asks gets one answer: an error with one of these codes or, without any, a result."""
    asked = next((each.message for each in log.of("sent") if "method" in each.message), None)
    if asked is None:
        return None
    found = [each for each in log.of_kind("answer") if each.get("id") == asked["id"]]
    wanted = {"error": {"code": codes}} if codes else {"result": object, "error?": absent}
    fault = mismatch(wanted, found[0]) if len(found) == 1 else f"it got {len(found)} answers"
    return f"{asked['method']}: {fault}" if fault else ""


@_check_each("the host cancelled nothing")
def cancels(log: PluginLog, kind: str, path: str, *, never: str = "") -> str | None:
    """A cancellation names a request that is not answered."""
    running: list[Any] = []
    for each in log.entries:
        if each.what == "sent" and each.facts.get("id") in running:
            running.remove(each.facts["id"])
        message = each.message if each.what == "frame" else {}
        if message and kind_of(message) == kind:
            named = find(message, path)
            return "" if named in running else f"it names {named!r}, which is no running request"
        if "id" in message and kind_of(message) not in ("answer", never):
            running.append(message["id"])
    return None


# --- what the host puts up with -----------------------------------------------------------------------------


def carries_on(run: str) -> Check:
    """The host does the same in this run as in the plain one."""

    def check(trial: Trial) -> HostFinding:
        plain, other = trial["plain"], trial.get(run)
        needed = "called" if run in NEED_CALL else "frame"
        if other is None or not any(log.of(needed) for log in plain.logs):
            return HostFinding("n/a", "the host sent no call" if needed == "called" else NOTHING_SENT)
        did, usual = _did(other), _did(plain)
        log = other.logs[0] if other.logs else None
        if did != usual:
            return HostFinding("fail", f"run {run}: the host {did}; in the plain run it {usual}", log)
        return HostFinding("pass", "", log)

    return check


def _did(run: HostRun) -> str:
    kinds = sorted({kind_of(each) for log in run.logs for each in log.messages})
    ended = "did not end before --deadline" if run.status is None else f"ended with {run.status}"
    return f"sent {', '.join(kinds) or 'nothing'} and {ended}"


@_check_each("there was no handshake", "impostor")
def refuses(log: PluginLog, *kinds: str) -> str | None:
    """An impostor gets no message of these kinds."""
    found = [kind for kind in kinds if log.of_kind(kind)]
    return f"it got {found[0]}" if found else "" if log.of("sent") else None


# --- how the host starts and ends a plugin ------------------------------------------------------------------


@_check_each(NO_MANIFEST, "plain")
def started(log: PluginLog, *arguments: str, up: int | None = None) -> str | None:
    """The arguments are these, and the working directory is `up` folders above the program."""
    folder, here = log.start["folder"], log.start["cwd"]
    if not log.start.get("manifest"):
        return None
    if log.start["argv"] != list(arguments):
        return f"its arguments are {log.start['argv']}"
    wanted = folder if up == 0 else folder.rpartition("/")[0]
    return "" if up is None or here == wanted else f"its working directory is {here}, not {wanted}"


@_check_each(NO_MANIFEST, "plain")
def has_variables(log: PluginLog, *, others: bool = True) -> str | None:
    """The process has STAND_IN=1, as the manifest says. `others`: it may have other variables too."""
    if not log.start.get("manifest"):
        return None
    if log.start["variable"] != "1":
        return "it has no STAND_IN=1"
    # PWD says nothing but the working directory: bubblewrap and shells set it.
    more = [name for name in log.start["environ"] if name not in ("STAND_IN", "PWD")]
    return f"it also has {', '.join(more)[:200]}" if more and not others else ""


@_check_each(NO_START)
def no_descriptors(log: PluginLog) -> str | None:
    more = [number for number in log.start["descriptors"] if number > 2]
    return f"it inherited {', '.join(map(str, more))}" if more else ""


def nothing_left() -> Check:
    """Says nothing about a run in which the host was ended at its deadline: its plugin may be there."""
    check = each_log(
        lambda log: "the process was still there" if log.closed is None else "",
        "the host started nothing, or did not end before --deadline",
    )
    return lambda trial: check({name: run for name, run in trial.items() if run.status is not None})


def says_goodbye(kind: str, *runs: str) -> Check:
    """A message of that kind is the last one but for answers."""

    def judge(log: PluginLog) -> str | None:
        kinds = [kind_of(each) for each in log.messages if kind_of(each) != "answer"]
        if kind not in kinds:
            return f"it got no {kind}" if kinds else None
        return f"it got {kinds[-1]} after {kind}" if kinds[-1] != kind else ""

    return each_log(judge, NOTHING_SENT, *(runs or ("plain", "stubborn")))


@_check_each(NO_START, "stubborn")
def closes_stdin(log: PluginLog) -> str | None:
    told = [each.what for each in log.entries if each.what in ("eof", "signal")]
    return "" if told[:1] == ["eof"] else "it was ended without that"


@_check_each("the host did not get so far", "stubborn")
def grace(log: PluginLog, seconds: float, after: str = "") -> str | None:
    """A process that does not end is not ended sooner than so long after a message of that kind or, without
    one, after its last answer. Half of the time is enough: the machine may be busy."""
    told = log.of("frame" if after else "sent")
    begun = [each.time for each in told if not after or kind_of(each.message) == after]
    ended = [*(each.time for each in log.of("signal")), *([] if log.closed is None else [log.closed])]
    if not begun or not ended:
        return None
    waited = min(ended) - begun[-1]
    return "" if waited >= seconds / 2 else f"it was ended after {waited:.2f} s"


@_check_each(NO_START, "stubborn")
def ends_it(log: PluginLog, *, term: bool = False) -> str | None:
    """A process that does not end is ended by force; with `term` it gets SIGTERM first."""
    if log.closed is None:
        return "nobody ended it"
    numbers = [each.facts["number"] for each in log.of("signal")]
    return "it was killed without SIGTERM" if term and signal.SIGTERM not in numbers else ""


def common_rules(*, wire: str, large: str, unknown: str, start: str, end: str) -> tuple[Row, ...]:
    """The first rows of every contract, with their places in its text."""
    return (
        ("Each message is one JSON object in UTF-8, framed as the contract says.", wire, framed()),
        ("An answer that comes late and in pieces is read.", wire, carries_on("pieces")),
        ("A large answer is read.", large, carries_on("large")),
        ("What a host may ignore changes nothing.", unknown, carries_on("extra")),
        ("A plugin that writes much to stderr is not blocked by it.", wire, carries_on("stderr")),
        ("The plugin has its three streams, and no other descriptor of its host.", start, no_descriptors()),
        ("No process of the plugin is left when the host has ended.", end, nothing_left()),
        ("Nothing is sent before the handshake is answered.", start, waits()),
    )

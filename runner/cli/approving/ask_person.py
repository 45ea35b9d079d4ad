"""What `runner allow` shows a person, and what it records of the answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Set
from shlex import join
from typing import NamedTuple

from runner.approvals.files import find_former, remove_record, require_safe_code, write_record
from runner.approvals.record import (
    VERSION,
    ApprovalKey,
    ApprovalRecord,
    asked_of,
    digest_of,
    key_of,
    with_program,
)
from runner.approvals.store import find_approval, find_inapplicable
from runner.approvals.tools import identity_of
from runner.cli.approving.items import AskedItem, item_lines, items_of, limit_items
from runner.cli.approving.subject import AllowSubject, command_for, own_words
from runner.cli.approving.tool_changes import ask_about_tools, withheld_tools
from runner.cli.shared.reachable_hosts import never_dialled
from runner.cli.shared.text import ask_person, day, say
from runner.launch.denylist import make_denylist
from runner.launch.plan import plan
from runner.launch.prepare import hold_against_policy
from runner.launch.sources import Sources
from runner.launch.stages import Decided, Loaded, Stopwatch
from runner.outcome import EXIT, Code, Failure, Outcome
from sandbox.document.diagnostic import printable, quoted
from sandbox.paths.denied_paths import lexical_hit
from sandbox.paths.homes import homes
from sandbox.paths.in_tree import find_in_tree
from sandbox.paths.mounts import contains, read_mounts
from sandbox.paths.program import script_of
from sandbox.plan.mentions import words_of
from sandbox.policy.approval import join_approvals
from sandbox.policy.policy import RUNTIME_PATHS, steers
from sandbox.spec import Access, Approval

_DECLINED = _DIFFERENT = _NOT_FOUND = 1


class _Proposal(NamedTuple):
    """What is shown to the person and then recorded. Both come from one reading of the manifest."""

    subject: AllowSubject
    record: ApprovalRecord
    old: ApprovalRecord | None
    before: Decided  # without an approval
    after: Decided  # with it

    @property
    def loaded(self) -> Loaded:
        return self.subject.loaded


class _Hindrance(NamedTuple):
    """Why the plugin could not start with an approval, or would not get what it is about."""

    told: str
    hint: str = ""
    path: str = ""  # what cannot be given; empty: it is not about a path


def propose(subject: AllowSubject, added: Approval, *, sure: bool, partly: bool = False) -> int:
    """Show what the plugin asks for and what is added, ask, and record a yes. `sure`: without a question.
    `partly`: leave out paths of `added` that cannot be given, and say which; otherwise nothing is recorded.
    Returns the exit status. Raises ValueError, Failure and ApprovalsUnusable."""
    loaded, given = subject.loaded, added
    key = key_of(loaded.plugin)
    if key is None:
        raise ValueError("this plugin has no name to allow something by")
    key, code = with_program(key, loaded.plugin, os.environ)
    require_safe_code(code)
    old = find_approval(key, os.environ)
    other = find_inapplicable(key, os.environ) if old is None else None
    outdated = other if other is not None and other.version != VERSION else None
    for former in (old, outdated):
        added = added if former is None else join_approvals(former.added, added)
    is_command = loaded.invocation.command is not None
    asked = _asked_of(loaded)
    record = ApprovalRecord(key, asked, added, digest_of(loaded.plugin), time.time())
    none = ApprovalRecord(key, Approval())
    before = hold_against_policy(loaded, os.environ, none)
    after = hold_against_policy(loaded, os.environ, record)
    shown = _Proposal(subject, record, old, before, after)
    hindrances, worst = _hindrances(added, given.hosts, after)
    rest = _without(given, {each.path for each in hindrances})
    goes_on = partly and rest != given
    if not goes_on:
        say("\n".join(map(printable, _lines(shown))), sys.stdout)
    for each in hindrances:
        say("\n  ".join(filter(None, (f"runner allow: {printable(each.told)}", printable(each.hint)))))
    if goes_on and not rest.is_empty:
        say("  left out; all else is below")
        return propose(subject, rest, sure=sure, partly=True)
    if hindrances:
        say("  nothing is recorded: the plugin could not start with it")
        return EXIT[worst]
    refused = {(denial.rule, denial.asked, denial.where) for denial in after.grant.denials}
    needed = [each for each in before.grant.denials if (each.rule, each.asked, each.where) not in refused]
    # The project folder is judged when the cage is planned, so it is not among the denials.
    gives_project = (before.policy.project, after.policy.project) == ("none", "read")
    if not needed and not gives_project and added.is_empty and old is None:
        return _say_needless(after, is_command=is_command)
    if not needed and not gives_project and (added.is_empty or _all_refused(added, after)):
        say("runner allow: nothing of this would count, so nothing is recorded")
        return EXIT["policy_denied"]
    if old is not None and (old.asked, old.added, old.digest) == (asked, added, record.digest):
        say(f"\nYou allowed exactly this on {day(old.when)}.", sys.stdout)
        return EXIT["ok"]
    if not sure and not sys.stdin.isatty():
        raise ValueError("there is no terminal to ask on; --yes allows what is shown without asking")
    if not sure and not ask_person("Allow this?"):
        say("runner allow: nothing is recorded")
        return _DECLINED
    write_record(record, os.environ)
    if outdated is not None:
        remove_record(key.stem, os.environ)
    say(f"Allowed. To take it back: runner allow --revoke {key.name[:12]}", sys.stdout)
    return EXIT["ok"]


def _hindrances(added: Approval, hosts: tuple[str, ...], after: Decided) -> tuple[list[_Hindrance], Code]:
    """With the code of the failure that they would be at a launch. `hosts`: those that are added now."""
    if impossible := [*_impossible(added, after), *_impossible_hosts(hosts, after)]:
        return impossible, "policy_denied"
    failure = _launch_failure(after)
    return ([], "ok") if failure is None else (_lasting(failure.outcome, added), failure.outcome.code)


def _without(approval: Approval, paths: Set[str]) -> Approval:
    return approval._replace(
        read=tuple(path for path in approval.read if path not in paths),
        write=tuple(path for path in approval.write if path not in paths),
    )


def _impossible(added: Approval, after: Decided) -> Iterator[_Hindrance]:
    """The paths that no approval can grant, judged by name. A launch also checks the files."""
    if not added.read and not added.write:
        return

    denylist = make_denylist(after, "", read_mounts(), os.environ)
    paths: tuple[tuple[Access, tuple[str, ...]], ...] = (("read", added.read), ("write", added.write))
    for access, asked in paths:
        for path in asked:
            # The real name too: make_denylist knows both, and the path may be a link.
            for name in dict.fromkeys((path, os.path.realpath(path))):
                if hit := denylist.name_hit(name, access):
                    yield _Hindrance(f"--{access} {path}: {hit.sentence()}", path=path)
                    break


def _impossible_hosts(hosts: tuple[str, ...], after: Decided) -> Iterator[_Hindrance]:
    """Ports of this machine that the policy does not open, and hosts that are never dialled."""
    for denial in after.grant.refused:
        if denial.rule == "network_loopback":
            yield _Hindrance(f"{denial.asked}: {denial.reason}", denial.hint)
    for host in hosts:
        if fault := never_dialled(host):
            port = host.rpartition(":")[2]
            remedy = f"a port of it is named so: --net localhost:{port}" if "(loopback)" in fault else ""
            yield _Hindrance(f"--net {host}: it {fault}, which is never dialled", remedy)


def _launch_failure(after: Decided) -> Failure | None:
    """Why the plugin could not start with the approval, by its plan; None: it could. Nothing is started."""
    if after.grant.refused:
        return None  # told already
    try:
        with Sources() as sources:
            plan(after, os.environ, Stopwatch(), sources)
    except Failure as failure:
        return failure
    return None


def _lasting(outcome: Outcome, added: Approval) -> list[_Hindrance]:
    """Why an approval would not help: there is no program to record it for, or what is added cannot be given.
    Otherwise the machine may be at fault, and others may mend that."""
    if (outcome.code, outcome.cause) in (("launch_failed", "not_found"), ("policy_denied", "program")):
        return [_Hindrance(outcome.message, outcome.hint)]
    paths = (*added.read, *added.write)
    return [
        _Hindrance(f"{each.asked}: {each.reason}", each.hint, each.asked)
        for each in outcome.denials
        if each.asked in paths
    ]


def _all_refused(added: Approval, after: Decided) -> bool:
    # A variable that is not set now may be set at a launch.
    refused = {denial.asked for denial in after.grant.denials if denial.rule != "env_missing"}
    return all(item.what in refused or f"network {item.what}" in refused for item in items_of(added))


def _say_needless(after: Decided, *, is_command: bool) -> int:
    if after.grant.refused:
        say("runner allow: nothing of this can be allowed by you, so nothing is recorded")
        return EXIT["policy_denied"]
    told = f"Policy {printable(after.policy.name)} gives it all that it asks for: nothing has to be allowed."
    if is_command:
        told = "There is nothing to allow besides: add --read, --write, --net or --env."
    say(f"\n{told}", sys.stdout)
    return EXIT["ok"]


def _lines(shown: _Proposal) -> Iterator[str]:
    plugin, record = shown.loaded.plugin, shown.record
    entrypoint = plugin.entrypoint
    version = f" {plugin.version}" if plugin.version else ""
    yield f"{plugin.id}{version} ({plugin.contract}) from {plugin.manifest}"
    if entrypoint is not None:
        entry = shown.subject.entry
        written = None if entry is None else entry.plugin.entrypoint  # without values, which may be secrets
        words = written or entrypoint
        yield f"runs    {join((words.command, *words.args))}"
    if record.key.program not in ("", "" if entrypoint is None else entrypoint.command):
        yield f"program {record.key.program}"
    for path in record.key.chosen:
        yield f"   with {path}"
    if record.key.scope:
        yield f"project {record.key.scope}"
    if record.key.folder:
        yield f"folder  {record.key.folder}"
    yield f"policy  {shown.after.policy.name}"
    own = homes(os.environ)
    project = "" if plugin.project is None else plugin.project.path
    items = items_of(record.asked, own, project)
    yield ""
    if not plugin.spec.enabled:
        yield "  ! it asks to run without a cage; a yes does not give it that"
    limits = limit_items(plugin.spec.limits)
    if shown.loaded.invocation.command is None:
        yield "It asks for:" if items or limits else "It asks for nothing beyond what every plugin gets."
        yield from item_lines((*items, *limits), _notes(shown, (*items, *limits)))
    elif words_of_its_own := own_words(shown.subject):
        yield "Its own options give it:"
        yield from words_of_its_own
    for path, dest in () if plugin.spec.image is None else plugin.spec.image.places:
        yield f"In the image {path} is {dest}"
    for each in plugin.spec.env:
        if each.value and steers(each.name):
            yield f"{each.name} is set to {quoted(each.value, 400)}; this yes is for that value"
    if shown.subject.folder_unknown:
        yield (
            f"This yes holds for {record.key.folder}, because its words are relative: if its host starts it"
            " in another folder, run runner allow there"
        )
    elif shown.subject.project:
        yield (
            f"This yes holds where its host fills in {shown.subject.project} for the project that is open: in"
            " the folder of another project, run runner allow there"
        )
    if not record.added.is_empty:
        yield "You allow besides:"
        more = items_of(record.added, own)
        yield from item_lines(more, _notes(shown, more))
    for denial in shown.after.grant.refused:
        yield f"It would still be refused now: {denial.asked}: {denial.reason}"
        if denial.hint:
            yield f"    {denial.hint}"
    yield from _unasked_paths(shown)


def _notes(shown: _Proposal, items: tuple[AskedItem, ...]) -> dict[AskedItem, str]:
    """A note about each item: what an approval changes about it."""
    before = {denial.asked for denial in shown.before.grant.denials}
    lacking = {denial.asked for denial in shown.after.grant.denials if denial.rule == "env_missing"}
    refused = {denial.asked for denial in shown.after.grant.denials} - lacking
    old = None if shown.old is None else items_of(shown.old.whole, homes(os.environ))
    asked = items_of(shown.record.asked, homes(os.environ))
    notes: dict[AskedItem, str] = {}
    for item in items:
        words = {item.what, f"{item.kind} {item.what}"}
        if item.kind == "limit":
            notes[item] = "a limit; the policy's ceiling holds"
        elif words & refused:
            notes[item] = "CANNOT BE ALLOWED by you"
        elif words & lacking:
            notes[item] = "not set here now"
        elif item.kind in ("read", "write") and item.what.startswith("/") and not os.path.lexists(item.what):
            notes[item] = "does not exist now"
        elif old is not None and item not in old and item.kind != "project":
            notes[item] = "NEW since your last yes"
        elif item in asked and not words & before:
            notes[item] = "" if item.kind == "host" else "the policy gives it without a yes"
    return notes


def _unasked_paths(shown: _Proposal) -> Iterator[str]:
    """Advice about host paths in the arguments and variables that the cage does not show: most servers name
    their folders there."""
    plugin, record = shown.loaded.plugin, shown.record
    image = plugin.spec.image
    if plugin.entrypoint is None:
        return
    given = {*record.whole.read, *record.whole.write, *RUNTIME_PATHS, *asked_of(plugin).read}
    given |= set(asked_of(plugin).write)
    given |= set() if image is None else {dest for _, dest in image.places}
    if script := script_of((plugin.entrypoint.command, *plugin.entrypoint.args)):
        given.add(os.path.expanduser(script))  # the cage shows it as the program
    own_homes = homes(os.environ)
    named: dict[str, str] = {}
    env = ((each.name, each.value) for each in plugin.spec.env if each.value is not None)
    for _, variable, word in words_of(plugin.entrypoint.args, env):
        path = os.path.expanduser(word.removeprefix("file://"))
        if not path.startswith("/") or "\0" in path or len(path) > 4095:
            continue
        path = "/" + os.path.normpath(path).lstrip("/")
        if path == "/" or lexical_hit(path, own_homes) is not None:  # which no yes could allow
            continue
        if image is not None and find_in_tree(image.tree, path) is not None:
            continue
        if os.path.exists(path) and not any(contains(each, path) for each in given):
            named.setdefault(path, f"The variable {variable} names" if variable else "Its arguments name")
    for path, who in named.items():
        yield f"{who} {path}, which it does not ask for: add --read {path} or --write {path}"


# --- what has changed ---------------------------------------------------------------------------------------


def print_diff(subject: AllowSubject, environ: Mapping[str, str], *, sure: bool) -> int:
    """Show what the plugin asks for that it did not ask for when it was allowed, or the reverse. Then show
    the tools that a gateway withholds, and ask about them; `sure`: without a question. `environ`: of the
    caller, which the gateway has too."""
    identity = identity_of(subject.loaded.plugin)
    withheld = withheld_tools(identity, environ)
    status = _print_asked(subject, tools_seen=withheld is not None)
    if not withheld:
        if withheld is not None:
            say("  none of its tools is withheld", sys.stdout)
        return status
    return ask_about_tools(identity, withheld, environ, sure=sure) or status


def _print_asked(subject: AllowSubject, *, tools_seen: bool) -> int:
    loaded = subject.loaded
    key = key_of(loaded.plugin)
    key = None if key is None else with_program(key, loaded.plugin, os.environ)[0]
    old = None if key is None else find_approval(key, os.environ)
    former = find_former(key, os.environ) if old is None and key is not None else None
    if key is not None and former is not None:
        return _print_former(subject, key, former)
    if old is None and tools_seen:
        say(
            printable(f"{loaded.plugin.id} ({loaded.plugin.contract}); nothing is allowed for it"), sys.stdout
        )
        return EXIT["ok"]
    if old is None:
        say("runner allow: you have allowed nothing for this plugin, and no gateway has listed its tools")
        say(f"  {printable(command_for(subject))} shows what it asks for")
        return _NOT_FOUND
    then, now = _items(loaded, old)
    lines = [f"+ {line[2:]}" for line in item_lines(item for item in now if item not in then)]
    lines += [f"- {line[2:]}" for line in item_lines(item for item in then if item not in now)]
    if not lines and old.digest != digest_of(loaded.plugin) and loaded.invocation.command is None:
        lines.append("  only the limits that it asks for have changed")
    say(printable(f"{loaded.plugin.id} ({loaded.plugin.contract}), allowed on {day(old.when)}"), sys.stdout)
    if not lines:
        say("  it asks for the same as then", sys.stdout)
        return EXIT["ok"]
    say("\n".join(map(printable, lines)), sys.stdout)
    if any(line.startswith("+") for line in lines):
        say(f"\nTo allow what is new: {printable(command_for(subject))}", sys.stdout)
    return _DIFFERENT


def _asked_of(loaded: Loaded) -> Approval:
    """What a yes would be for. The options of a command are one already, but for what is the entry's: the
    volumes of an image, and the image of `x-sandbox`."""
    if loaded.invocation.command is None:
        return asked_of(loaded.plugin)
    image, asked = loaded.plugin.spec.image, asked_of(loaded.plugin)
    volumes = {} if image is None else dict(image.places)
    return Approval(
        read=tuple(path for path in asked.read if path in volumes),
        write=tuple(path for path in asked.write if path in volumes),
        images=() if image is None or image.starts_own else asked.images,
    )


def _items(loaded: Loaded, old: ApprovalRecord) -> tuple[tuple[AskedItem, ...], tuple[AskedItem, ...]]:
    """What it asked for when it was allowed, and what it asks for now."""
    own = homes(os.environ)
    asked = _asked_of(loaded)
    project = "" if loaded.plugin.project is None else loaded.plugin.project.path
    return items_of(old.asked, own, project), items_of(asked, own, project)


def _print_former(subject: AllowSubject, key: ApprovalKey, former: ApprovalRecord) -> int:
    """Compare with an approval that does not count. All that is asked for is shown: nothing is allowed."""
    loaded = subject.loaded
    if former.version != VERSION:
        why = "an earlier version recorded it, and approvals now name the program that they are for"
    elif former.key.file != key.file:
        why = f"it is for {former.key.file or 'a command'}"
    elif former.key.arguments != key.arguments:
        why = "its command or arguments are others now"
    elif former.key.programs != key.programs:
        then, now = (" with ".join(each.programs) for each in (former.key, key))
        why = f"it is for {then or 'no program'}, and this is {now or 'none'}"
    else:
        why = "it is for another project or folder"
    before, asked = _items(loaded, former)
    name = f"{loaded.plugin.id} ({loaded.plugin.contract})"
    head = f"{name}; your yes of {day(former.when)} does not count: {why}"
    marks = ("  " if item in before else "+ " for item in asked)
    lines = [mark + line[2:] for mark, line in zip(marks, item_lines(asked), strict=True)]
    lines += [f"- {line[2:]}" for line in item_lines(item for item in before if item not in asked)]
    if added := item_lines(items_of(former.added, homes(os.environ))):
        lines += [f"- {line[2:]}  (added by you)" for line in added]
    say("\n".join(map(printable, (head, *lines))), sys.stdout)
    say(f"\nTo allow it: {printable(command_for(subject))}", sys.stdout)
    return _DIFFERENT

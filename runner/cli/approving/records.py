"""The approvals that a person has given: list them, and revoke some."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from runner.approvals.files import ListedApproval, list_records, remove_record
from runner.approvals.record import ApprovalKey, approvals_folder
from runner.cli.approving.items import item_lines, items_of
from runner.cli.shared.text import ask_person, day, say
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable
from sandbox.paths.homes import homes, own_home

_DECLINED = 1

SCHEMA = "runner.allow.v1"
_SHORTEST_KEY = 6


def _all() -> list[tuple[ListedApproval, Mapping[str, str]]]:
    """All approvals, each with the environment that finds it: this one, and that of entries which `runner
    wrap` wrote, where HOME comes from the password database. Raises ApprovalsUnusable."""
    own = {"HOME": own_home()}
    places: list[Mapping[str, str]] = [os.environ]
    folders = [os.path.realpath(approvals_folder(each) or "/") for each in (os.environ, own)]
    if own["HOME"] and folders[0] != folders[1]:
        places.append(own)
    return [(each, place) for place in places for each in list_records(place)]


def print_list(*, as_json: bool) -> int:
    """Raises ApprovalsUnusable."""
    found = [each for each, _ in _all()]
    if as_json:
        document = {"schema": SCHEMA, "approvals": [_document(each) for each in found]}
        print(json.dumps(document, indent=2))
        return EXIT["ok"]
    if not found:
        say("nothing is allowed", sys.stdout)
    for each in found:
        _print_record(each)
    return EXIT["ok"]


def _print_record(each: ListedApproval) -> None:
    record = each.record
    if record is None:
        unusable = f"{printable(each.name[:12])}  UNUSABLE  {printable(each.fault)}"
        say(f"{unusable}\n    {printable(each.hint)}", sys.stdout)
        return
    key = record.key
    gone = "" if not key.file or os.path.exists(key.file) else "  (the file is gone)"
    head = f"{each.name[:12]}  {day(record.when)}  {key.id} ({key.contract})  {key.file}{gone}"
    head += f"  project {key.scope}" if key.scope else ""
    head += f"  in {key.folder}" if key.folder else ""
    head += f"  program {' with '.join(key.programs)}" if key.program else ""
    head += f"  ({each.fault}; {each.hint})" if each.fault else ""
    lines = item_lines(items_of(record.asked, homes(os.environ)))
    lines += [f"{line}  (added by you)" for line in item_lines(items_of(record.added, homes(os.environ)))]
    say("\n".join(map(printable, (head, *lines))), sys.stdout)


def _document(each: ListedApproval) -> dict[str, object]:
    record = each.record
    if record is None:
        return {"key": each.name, "usable": False, "fault": each.fault, "hint": each.hint}
    return {
        "key": each.name,
        "usable": not each.fault,
        **({"fault": each.fault, "hint": each.hint} if each.fault else {}),
        **record.key._asdict(),
        "asked": record.asked._asdict(),
        "added": record.added._asdict(),
        "digest": record.digest,
        "when": record.when,
    }


def revoke(word: str, server: str | None, *, sure: bool = False) -> int:
    """Revoke the approval with this key, or all approvals for a manifest, which may be deleted or have a
    fault: if there are several, the person is asked, unless `sure`. `server`: only for this server. Raises
    ValueError and ApprovalsUnusable."""
    found = _all()
    meant = [(each, at) for each, at in found if len(word) >= _SHORTEST_KEY and each.name.startswith(word)]
    if len({each.name for each, _ in meant}) > 1:
        raise ValueError(f"--revoke {word}: several keys begin with this; write more of the one you mean")
    if not meant:
        path = os.path.realpath(word)
        meant = [
            (each, at)
            for each, at in found
            if each.record is not None and _is_of(each.record.key, path, server)
        ]
    if not meant:
        raise ValueError(f"--revoke {word}: nothing is allowed for it; runner allow --list shows what is")
    if len(meant) > 1 and not sure:
        for each, _ in meant:
            _print_record(each)
        if not sys.stdin.isatty():
            told = f"these {len(meant)} would be revoked, and there is no terminal to ask on"
            raise ValueError(f"--revoke {word}: {told}; --yes revokes them all, --server NAME or a key one")
        if not ask_person(f"Revoke these {len(meant)}?"):
            say("runner allow: nothing is revoked")
            return _DECLINED
    return _remove(meant)


def revoke_key(key: ApprovalKey | None) -> int:
    """Revoke the approval of one plugin. Raises ValueError and ApprovalsUnusable."""
    meant = [(each, at) for each, at in _all() if key is not None and each.name.endswith(key.stem)]
    if not meant:
        raise ValueError("nothing is allowed for this command; runner allow --list shows what is")
    return _remove(meant)


def _remove(meant: list[tuple[ListedApproval, Mapping[str, str]]]) -> int:
    for each, place in meant:
        remove_record(each.name, place)
    say(f"revoked: {', '.join(dict.fromkeys(each.name[:12] for each, _ in meant))}", sys.stdout)
    return EXIT["ok"]


def _is_of(key: ApprovalKey, path: str, server: str | None) -> bool:
    if path not in (key.file, os.path.dirname(key.file)):
        return False
    # With the label that --server takes elsewhere. An id has no slashes.
    labels = (key.id, f"{key.scope}:{key.id}") if key.scope else (key.id,)
    own = server if server is None else server.removeprefix(f"{key.scope}:" if key.scope else "")
    return own is None or server in labels or own in labels or own.replace("/", "%2F") == key.id

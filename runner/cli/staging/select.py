"""Which changeset the words of a command line mean, and which of its changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from runner.contracts.registry import all_host_places
from sandbox.document.diagnostic import DocumentError
from sandbox.paths.denied_paths import lexical_hit
from sandbox.paths.guarded import guarded_table
from sandbox.paths.homes import homes, own_home
from sandbox.paths.mounts import contains
from sandbox.policy.load import load_policy
from sandbox.staged.layer import Change, Judge, changes_of
from sandbox.staged.store import Changeset, StagingRefused, find_changeset, list_changesets, store_path

_SHORTEST = 4  # characters of an id


def waiting_changesets(environ: Mapping[str, str]) -> list[Changeset]:
    """All of this user, the oldest first. For entries that a host starts XDG_STATE_HOME does not count."""
    own = own_home() if environ.get("XDG_STATE_HOME") else ""
    stores = dict.fromkeys((store_path(environ), *([store_path({"HOME": own})] if own else [])))
    return sorted((each for store in stores for each in list_changesets(store)), key=lambda each: each.began)


def choose(words: Sequence[str], environ: Mapping[str, str]) -> tuple[Changeset, list[str]]:
    """The changeset, and the paths among the words. Without an id it is the only one. Raises
    StagingRefused."""
    if "" in words:
        raise StagingRefused("an id or a path is empty", "is a variable unset?")
    known = waiting_changesets(environ)
    if words and len(words[0]) >= _SHORTEST and "/" not in words[0]:
        found = find_changeset(known, words[0])
        if found is not None and found.id != words[0] and os.path.lexists(words[0]):
            told = f"{words[0]} could be the changes {found.id} or the file here"
            raise StagingRefused(told, f"write the whole id, or ./{words[0]}")
        if found is not None:
            return found, [*words[1:]]
    if not known:
        raise StagingRefused(
            "no changes wait", "runner run --write DIR --staged -- COMMAND keeps some for you"
        )
    if len(known) > 1:
        told = f"changes of {len(known)} runs wait"
        raise StagingRefused(told, "`runner changes` lists them: name one by its id, which comes first")
    return known[0], [*words]


def judge_of(changeset: Changeset, environ: Mapping[str, str]) -> Judge:
    """What may not be applied on this machine: the denylist's paths by name, and the guards' table. Raises
    StagingRefused for a policy that cannot be read."""
    own_homes = homes(environ)
    try:
        deny = load_policy(None, environ).deny
    except DocumentError as error:
        first = error.diagnostics[0]
        raise StagingRefused(f"the policy cannot be read: {first.text()}", first.hint) from None

    # Most folders have nothing denied in them or above them, and hundreds of paths are.
    near = any(lexical_hit(each.real, own_homes, deny) for each in changeset.folders)

    def denied(path: str) -> str:
        if not near:
            return ""
        hit = lexical_hit(path, own_homes, deny)
        return "" if hit is None else f"it {hit.clause()}"

    return Judge(guarded_table(all_host_places().project), denied)


def changes(changeset: Changeset, paths: Sequence[str], environ: Mapping[str, str]) -> list[Change]:
    """The changes at or below these paths; all without any. Raises StagingRefused, also for a path without a
    change."""
    found = list(changes_of(changeset, judge_of(changeset, environ)))
    if not paths:
        return found
    wanted = [absolute(changeset, path) for path in paths]
    kept = []
    for each in found:
        place = place_of(changeset, each)
        # With what is new in a new folder goes the folder.
        is_way = each.kind == "folder" and each.act == "A" and any(contains(place, path) for path in wanted)
        if is_way or any(contains(path, place) for path in wanted):
            kept.append(each)
    require_changes(changeset, paths, kept)
    return kept


def require_changes(changeset: Changeset, words: Sequence[str], found: Sequence[Change]) -> None:
    """Raises StagingRefused if nothing was changed at or below one of these paths."""
    for word in words:
        path = absolute(changeset, word)
        if not any(contains(path, place_of(changeset, each)) for each in found):
            raise StagingRefused(f"{word}: nothing was changed there", f"runner diff {changeset.id} --stat")


def absolute(changeset: Changeset, path: str) -> str:
    """A path as a person writes it: absolute, below the working directory if the folder is there, or below
    the folder."""
    here = os.path.abspath(path)
    above, name = os.path.split(here)
    here = os.path.join(os.path.realpath(above), name)
    if path.startswith(("/", "./", "../")) or len(changeset.folders) > 1:
        return here
    real = changeset.folders[0].real
    return here if contains(real, here) else os.path.normpath(os.path.join(real, path))


def place_of(changeset: Changeset, change: Change) -> str:
    return f"{changeset.folders[change.folder].real.rstrip('/')}/{change.path}"

"""Make the denylist of one launch: paths of the runner and its host, and those of the policy."""

from __future__ import annotations

import os
import sys

from runner.approvals.record import approvals_folder
from runner.contracts.configurations import HostPlaces
from runner.contracts.registry import all_host_places
from runner.install.roots import store_root
from runner.launch.command import environ_of_host
from runner.launch.stages import Decided
from runner.plugin import Plugin
from sandbox import CODE_ROOT, cache, look
from sandbox.identity.host_side import host_sides
from sandbox.identity.state import IMPORTED, UNPACKED, state_root, users_state
from sandbox.paths.denied_paths import lexical_fault, normal
from sandbox.paths.denied_places import DeniedPlaces
from sandbox.paths.denylist import Denylist
from sandbox.paths.executable import follow
from sandbox.paths.mounts import Mounts, contains
from sandbox.policy.policy import Policy
from sandbox.speed.late_site import complete_search_path
from sandbox.speed.typed import Iterator, Mapping, Sequence

# In every home, whatever XDG_STATE_HOME says.
_SITE_FOLDERS = ("site-packages", "dist-packages")  # of which `site` reads the .pth files
_USERS_STATE = ".local/state/runner"


def make_denylist(
    decided: Decided, bwrap: str, mounts: Mounts, environ: Mapping[str, str], *, writes: bool = False
) -> Denylist:
    """`writes`: the plugin may be given more to write than was decided."""
    return Denylist(mounts, **denied_places(decided, bwrap, environ, writes=writes)._asdict())


def denied_places(
    decided: Decided, bwrap: str, environ: Mapping[str, str], *, writes: bool = False
) -> DeniedPlaces:
    state_dir = decided.state_dir
    chosen = state_dir is not None and decided.loaded.invocation.state_dir is not None
    hosts = writes or chosen or writes_outside(decided)
    if hosts:
        _complete_search_path()  # .pth files add to our own code: see _own_code
    # The runner's own environment and, for a wrapped entry, the environment of its host.
    environs = (environ, environ_of_host(decided.loaded.invocation.command, environ))
    stores = tuple(dict.fromkeys(look.realpath(store_root(each)) for each in environs))
    places = all_host_places()
    return DeniedPlaces(
        homes=tuple(decided.homes),
        tokens=tuple(place for each in environs for place in _in_homes(decided, places.tokens, each)),
        policy=(*decided.policy.deny, *_values(decided.policy)),
        runner=tuple(dict.fromkeys(p for each in environs for p in _own_places(each, decided.homes))),
        states=(
            *(look.realpath(state_root(each)) for each in environs),
            *(look.realpath(f"{home}/{_USERS_STATE}/plugins") for home in decided.homes),
        ),
        # Sets of packages are code that every other server of the person starts from.
        protected=(*_own_code(bwrap), *stores),
        deciding=(
            *_deciding_files(decided.loaded.plugin, decided.policy),
            *(place for each in environs if hosts for place in _host_places(decided, places, each)),
        ),
        storage=() if state_dir is None else (host_sides(state_dir),),
        copies=_copies(decided, stores, environ),
        runtime_dir=environs[1].get("XDG_RUNTIME_DIR"),
        guarded=tuple(places.project) if hosts else (),
    )


def _own_places(environ: Mapping[str, str], homes: Sequence[str]) -> tuple[str, ...]:
    """The runner's own folders, with those of state directories."""
    root = state_root(environ)
    # Beside the state directories are copies of packages, the daemon's ledger, and backups of configurations.
    places = [root, os.path.dirname(root), users_state(environ), *cache.every_directory(homes)]
    if (approvals := approvals_folder(environ)) is not None:
        places.append(os.path.dirname(approvals))
    # Entries that `runner wrap` wrote have theirs there, whatever XDG_CONFIG_HOME and XDG_STATE_HOME say.
    always = (".config/runner", _USERS_STATE)
    places += [os.path.join(home, name) for home in homes for name in always]
    return tuple(dict.fromkeys(look.realpath(place) for place in places))


def _unpacked(root: str | None, environ: Mapping[str, str]) -> str:
    """The plugin's folder, if it was unpacked from a tar, or a control plane has imported it. It may be shown
    to the plugin, and no other may."""
    for name in (UNPACKED, IMPORTED):
        place = look.realpath(os.path.join(os.path.dirname(state_root(environ)), name))
        if root is not None and root != place and contains(place, root):
            return root
    return ""


def _copies(decided: Decided, stores: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    own = decided.copy or _unpacked(decided.loaded.plugin.root, environ)
    return (*((own,) if own else ()), *_own_sets(decided, stores))


def _own_sets(decided: Decided, stores: Sequence[str]) -> Iterator[str]:
    """The stored packages and the image that the plugin starts from. Root's are among the runner's own
    folders."""
    plugin = decided.loaded.plugin
    folder = plugin.root or os.path.dirname(plugin.manifest)
    words = [folder]  # it is in the store if it came from an OCI registry
    if plugin.spec.image is not None:
        words.append(plugin.spec.image.tree)
    if (entrypoint := plugin.entrypoint) is not None and entrypoint.launcher:
        words += [entrypoint.command, *entrypoint.args[: entrypoint.stored_args]]
    for store in stores:
        for word in words:
            if word.startswith(store + "/sets/"):
                yield "/".join((store, "sets", word.removeprefix(store + "/sets/").partition("/")[0]))


def _complete_search_path() -> None:
    complete_search_path()
    if not sys.flags.no_site:
        return  # what `site` has read then is in sys.path, and so in the name of a stored plan
    # Also if something else was the first to need it.
    look.note(os.path.join(sys.prefix, "pyvenv.cfg"))
    for place in sys.path:
        if os.path.basename(place) in _SITE_FOLDERS and look.isdir(place):
            for name in look.listdir(place):
                if name.endswith(".pth"):
                    look.note(os.path.join(place, name))


def _own_code(bwrap: str) -> tuple[str, ...]:
    """The programs that the runner executes and the folders it imports from. A plugin that can write to one
    of them can run code outside of its cage."""
    imported = [place for place in sys.path if place.startswith("/") and place != "/" and look.exists(place)]
    places = [CODE_ROOT, bwrap, sys.prefix, sys.base_prefix, look.realpath(sys.executable), *imported]
    return tuple(dict.fromkeys(place for place in places if place))


def writes_outside(decided: Decided) -> bool:
    """Whether the plugin may write anything but its own state."""
    return any(path.access == "write" and path.origin != "state" for path in decided.grant.paths)


def _in_homes(decided: Decided, names: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """These names in each home, and those below .config also below $XDG_CONFIG_HOME."""
    found = [os.path.join(home, name) for home in decided.homes for name in names]
    base = environ.get("XDG_CONFIG_HOME", "")
    if base.startswith("/") and lexical_fault(base) is None:
        found += [
            os.path.join(base, name.removeprefix(".config/")) for name in names if name.startswith(".config/")
        ]
    return found


def _host_places(decided: Decided, places: HostPlaces, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where hosts have the programs they run, under every name."""
    found = [*_in_homes(decided, places.home, environ), *places.system]
    found += [named for name in places.variables if (named := environ.get(name, "")).startswith("/")]
    usable = [normal(place) for place in found if lexical_fault(place) is None]
    return tuple(dict.fromkeys(place for place in usable if place != "/"))


def _values(policy: Policy) -> Iterator[str]:
    """The files that have the values of the policy's credentials: a plugin that uses one must not read it
    there, and another has no business with it."""
    for kind, *words in (each.source for each in policy.credentials):
        if kind == "file":
            yield words[0]


def _trusted_files(policy: Policy) -> Iterator[str]:
    """What the policy has run outside of any cage, and by what it knows servers."""
    for each in policy.credentials:
        yield from each.authorities
        kind, *words = each.source
        if kind == "command":
            # Its program, and scripts behind it.
            yield from (
                word
                for number, word in enumerate(words)
                if word.startswith("/") and "\0" not in word and (not number or look.isfile(word))
            )


def _deciding_files(plugin: Plugin, policy: Policy) -> tuple[str, ...]:
    """Manifest and policy, and what the policy trusts, under every name they have. A plugin that can write to
    one of them decides what it gets at the next launch, or runs code outside of its cage."""
    found: list[str] = []
    for path in dict.fromkeys((plugin.manifest, policy.file, *_trusted_files(policy))):
        real, links = follow(path)
        found += [path, real, *(link.path for link in links)]
    return tuple(dict.fromkeys(found))

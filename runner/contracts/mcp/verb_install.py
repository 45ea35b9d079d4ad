"""runner install: fetch the packages of npx and uvx commands, or a package of an OCI registry, once, so that
they start from a store."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from runner.cli.shared.install_image import fetch_and_tell, is_image, registry_of, update_image
from runner.cli.shared.install_reference import install_reference, is_reference, update_reference
from runner.cli.shared.install_terminal import ProgressBar, confirm, has_terminal
from runner.cli.shared.registry import (
    access_of,
    add_registry,
    given_options,
    say_fault,
    status_of,
)
from runner.cli.shared.text import print_diagnostics, say
from runner.contracts.mcp.hosts.wrapping import split_wrapped
from runner.contracts.mcp.launchers import launch_of
from runner.contracts.mcp.wrap.config_file import FileRefused, open_config
from runner.contracts.mcp.wrap.configuration import read_configuration
from runner.contracts.mcp.wrap.steps import chosen, requests_of
from runner.install.content import BadContent
from runner.install.fetch import (
    USUAL_LIMITS,
    FetchLimits,
    InstallFailed,
    fetch_place,
    fetching,
    registries_of,
)
from runner.install.image_reference import image_request
from runner.install.registry import Registries, RegistryFault
from runner.install.request import REFERENCES, Request, UnusableSpec
from runner.install.roots import main_store_root, store_roots
from runner.install.store import Installed, Locked, Store, StoreRefused
from runner.outcome import EXIT, USAGE_ERROR
from runner.package.fault import PackageFault
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.units import parse_limit

if TYPE_CHECKING:
    from runner.oci.client import RegistryAccess

NAME = "install"
EXAMPLE = "runner install ~/.cursor/mcp.json"
PASSES_ARGUMENTS = True
SCHEMA = "runner.install.v1"

_FAILED = 1
_ABOUT = """\
{help}

npm or pip fetches the packages in a cage that reaches only the registries of your own npm or pip
configuration. Install scripts do not run. exec, run, call, tools and wrapped entries then start the stored
program, without the network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT.format(help=parser.description)
    parser.usage = f"{parser.prog} [options] FILE | docker://IMAGE | oci://HOST/NAME:TAG | -- COMMAND [ARGS]"
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a host's configuration, docker://IMAGE as docker and podman name it, or oci://HOST/NAME:TAG",
    )
    parser.add_argument(
        "--server",
        metavar="NAME",
        action="append",
        default=[],
        help="only this server; may be given several times",
    )
    parser.add_argument(
        "--scripts",
        action="store_true",
        help="run install scripts of npm packages, in the same cage without tokens",
    )
    parser.add_argument("--list", action="store_true", help="show what is installed")
    parser.add_argument(
        "--update",
        metavar="NAME",
        nargs="?",
        const="",
        help="fetch again what is not pinned, show which versions change, and ask; all, or one package",
    )
    parser.add_argument("--remove", metavar="NAME", help="remove a package")
    parser.add_argument("--verify", action="store_true", help="compare all files with what was fetched")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed without a terminal")
    parser.add_argument("--json", action="store_true", help="with --list: print one JSON document")
    parser.add_argument("--deadline", metavar="TIME", default="30m", help="for each fetch (default: 30m)")
    parser.add_argument(
        "--disk",
        metavar="SIZE",
        default="4G",
        help="that a fetch may use, with the cache of earlier ones (default: 4G)",
    )
    add_registry(parser)
    parser.add_argument(
        "--downgrade",
        action="store_true",
        help="with --update: a tag may give an older version, or another plugin",
    )


class Wanted(NamedTuple):
    """What a server needs: the packages or the image of its launcher, or the image of its `x-sandbox`."""

    server: str  # its name; empty: the command line is the person's own
    request: Request


def run(args: argparse.Namespace) -> int:
    args.arguments = getattr(args, "arguments", [])  # without a `--` there are none
    if fault := _usage_fault(args):
        say(f"runner install: {fault}")
        return USAGE_ERROR
    return _say_faults(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    stores = [Store(root) for root in store_roots(os.environ)]
    if args.list:
        return _list(stores, as_json=args.json)
    if args.verify:
        return max([_verify(store) for store in stores])
    if args.remove is not None:
        return _remove(_named(stores, args.remove))
    if args.update is not None:
        return _update(_named(stores, args.update), args)
    if is_reference(args.file):
        return install_reference(args, Store(main_store_root(os.environ)), args.file)
    if is_image(args.file):
        return _install(Store(main_store_root(os.environ)), [Wanted("", image_request(args.file))], args)
    return _install(Store(main_store_root(os.environ)), _wanted(args), args)


def _say_faults(act: Callable[[], int]) -> int:
    """Do something, and say what is wrong if it fails."""
    try:
        return act()
    except PackageFault as fault:
        say_fault("install", fault)
        return status_of(fault)
    except DocumentError as error:
        print_diagnostics(error.diagnostics)
        return EXIT["manifest_invalid"]
    except UnusableSpec as fault:
        say(f"runner install: this command cannot be installed: it {printable(str(fault))}")
        return USAGE_ERROR
    except ValueError as error:
        say(f"runner install: {printable(str(error))}")
        return USAGE_ERROR
    except FileRefused as refused:
        say(f"runner install: the configuration is not used: {printable(str(refused))}")
        return EXIT["manifest_invalid"]
    except StoreRefused as error:
        _fail(f"{error}{error.hint and '; ' + error.hint}")
    except (InstallFailed, BadContent, RegistryFault) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'the store'}: {error.strerror}; nothing was installed")
    return _FAILED


def _usage_fault(args: argparse.Namespace) -> str:
    actions = [args.list, args.verify, args.remove is not None, args.update is not None]
    subjects = bool(args.file) + bool(args.arguments)
    if sum(actions) > 1:
        return "--list, --update, --remove and --verify exclude each other"
    if any(actions) and (subjects or args.server):
        return "--list, --update, --remove and --verify take no configuration and no command"
    if not any(actions) and subjects != 1:
        return "name a configuration, or write a command behind --, as in runner install -- npx -y PACKAGE"
    is_named = is_reference(args.file) or is_image(args.file)
    if args.server and (not args.file or is_named):
        return "--server goes with a configuration"
    if args.scripts and args.update is None and any(actions):
        return "--scripts goes with an installation or --update"
    if args.downgrade and args.update is None:
        return "--downgrade goes with --update"
    if any(given for _, given in given_options(args)) and args.update is None and not is_named:
        return "--ca, --plain-http and --allow-host go with docker://…, oci://… and --update"
    for limit in ("deadline", "disk"):
        try:
            parse_limit(limit, getattr(args, limit))
        except ValueError as error:
            return f"--{limit}: {error}"
    return "--json goes with --list" if args.json and not args.list else ""


def _wanted(args: argparse.Namespace) -> list[Wanted]:
    """What is to be installed. Raises ValueError and DocumentError."""
    if args.arguments:
        launch = launch_of(args.arguments)
        if launch is None:
            raise ValueError(
                f"{args.arguments[0]} is no launcher that fetches packages: npx, npm exec, pnpm dlx, bunx,"
                " uvx, uv tool run, uv run --with, pipx run, docker run and podman run are known"
            )
        return [Wanted("", launch.request)]
    return _wanted_of(args.file, args.server)


def _wanted_of(file: str, names: Sequence[str]) -> list[Wanted]:
    """What the servers of a configuration need: packages and images. Says which cannot be installed. Raises
    ValueError for one of `names`, and DocumentError."""
    try:
        with open_config(file) as opened:
            raw, _ = opened.read()
            config = read_configuration(opened.path, raw, opened.given)
    except FileRefused as refused:
        if os.path.lexists(file):
            raise
        raise FileRefused(f"{refused}; an image is written docker://IMAGE") from None
    found: list[Wanted] = []
    for server in chosen(config, names):
        inner = split_wrapped(server.argv)
        argv = server.argv if inner is None else inner.argv
        try:
            requests = requests_of(config, server, argv)
        except UnusableSpec as fault:
            if names:
                raise ValueError(f"{server.label} {fault}") from None
            say(f"  {printable(server.label)}: is left out: it {printable(str(fault))}", sys.stdout)
            continue
        found += [Wanted(server.label, request) for request in requests]
        if names and not requests:
            told = "is started by no launcher that fetches packages, and names no image"
            raise ValueError(f"{server.label} {told}: there is nothing to install")
    return found


def offer(wanted: Sequence[Wanted], *, yes: bool, required: bool) -> int | None:
    """For `runner wrap`: say what would be fetched, ask, and fetch it. Returns the exit status, or None if a
    question that has to be answered was not answered with yes. `required`: the person said --install."""
    refused = False

    def act() -> int:
        nonlocal refused
        sources = _tell_sources(wanted)
        if not sources:
            return _FAILED
        if not yes and not required and not has_terminal():
            say("Without a terminal they are not fetched: add --install --yes to do that first.", sys.stdout)
            return EXIT["ok"]
        if not yes and confirm("Fetch and install?") is not None:
            refused = required
            return EXIT["ok"]
        return _install_all(Store(main_store_root(os.environ)), wanted, sources)

    status = _say_faults(act)
    return None if refused else status


def _install(store: Store, wanted: Sequence[Wanted], args: argparse.Namespace) -> int:
    todo = {each.request: each for each in wanted if not _has(store, each.request, scripts=args.scripts)}
    for each in wanted:
        if each.request not in todo:
            say(f"{_label(each)} is installed already; --update fetches newer versions", sys.stdout)
    if not wanted:
        say(
            "There is nothing to install: no launcher that fetches packages starts a server here, and none"
            " names an image.",
            sys.stdout,
        )
    if not todo:
        return EXIT["ok"]
    access = access_of(args) if any(each.registry == "image" for each in todo) else None
    sources = _tell_sources(tuple(todo.values()))
    if not sources:
        return _FAILED
    if not args.yes and (refusal := confirm("Fetch and install?")) is not None:
        return refusal
    limits = FetchLimits(args.deadline, args.disk)
    return _install_all(
        store, tuple(todo.values()), sources, scripts=args.scripts, limits=limits, access=access
    )


def _has(store: Store, request: Request, *, scripts: bool) -> bool:
    """Whether there is nothing to do. `scripts`: install scripts of npm packages are to have run."""
    found = store.find(request)
    if found is None or not scripts or request.registry != "npm":
        return found is not None
    lock = store.lock_of(found.set_name)
    return lock is not None and lock.ran_scripts


def _tell_sources(wanted: Sequence[Wanted]) -> Mapping[Request, Registries | None]:
    """Where the packages come from, told to the person; of an image it says so itself. One whose registries
    are not known is left out, and does not keep the others from being installed."""
    sources: dict[Request, Registries | None] = {}
    for each in wanted:
        if each.request.registry == "image":
            say(f"{_label(each)} will be fetched from {registry_of(each.request)}", sys.stdout)
            sources[each.request] = None
            continue
        try:
            found = _sources([each.request], sources)
        except (InstallFailed, RegistryFault) as fault:
            _fail(f"{_label(each)}: {fault}")
            continue
        sources |= found
        places = (*found[each.request].hosts, *found[each.request].folders)
        say(f"{_label(each)} will be fetched from {', '.join(places)}", sys.stdout)
    return sources


def _install_all(
    store: Store,
    wanted: Sequence[Wanted],
    sources: Mapping[Request, Registries | None],
    *,
    scripts: bool = False,
    limits: FetchLimits | None = None,
    access: RegistryAccess | None = None,
) -> int:
    """Install each. One that fails does not keep the others from being installed."""
    status = EXIT["ok"] if all(each.request in sources for each in wanted) else _FAILED
    for each in wanted:
        if each.request in sources and each.request.registry == "image":
            disk = (limits or USUAL_LIMITS).disk
            status = max(status, _say_faults(partial(_install_image, store, each, access, disk)))
    wanted = [each for each in wanted if sources.get(each.request) is not None]
    if not wanted:
        return status
    with store.changing(lambda text: say(text, sys.stdout)), fetch_place(store, os.environ) as place:
        for number, each in enumerate(wanted, 1):
            if _has(store, each.request, scripts=scripts):  # by another installation, meanwhile
                say(f"{_label(each)} is installed", sys.stdout)
                continue
            progress = ProgressBar(number, len(wanted), _label(each))
            try:
                with fetching(
                    store,
                    place,
                    each.request,
                    _require(sources[each.request]),
                    os.environ,
                    scripts=scripts,
                    limits=limits or USUAL_LIMITS,
                    tick=progress.tick,
                ) as fetched:
                    store.add(fetched.installed, fetched.lock, fetched.folder)
            except (InstallFailed, BadContent) as fault:
                progress.end()
                _fail(f"{_label(each)}: {fault}")
                ran = "its scripts ran only in the cage" if scripts else "nothing of it was run"
                say(f"  nothing of it was installed, and {ran}")
                status = _FAILED
                continue
            except BaseException:
                progress.end()
                raise
            progress.end()
            say(f"  installed {_versions(fetched.installed)}", sys.stdout)
            if fetched.note:
                say(f"  {fetched.note}", sys.stdout)
            if each.request.unpinned:
                names = ", ".join(map(printable, each.request.unpinned))
                say(f"  {names}: not pinned; it stays as it is until runner install --update", sys.stdout)
    return status


def _install_image(store: Store, wanted: Wanted, access: RegistryAccess | None, disk: str) -> int:
    """Raises PackageFault."""
    if store.find(wanted.request) is None:
        fetch_and_tell(store, wanted.request, access, disk)
    return EXIT["ok"]


def _require(found: Registries | None) -> Registries:
    assert found is not None  # of a package, which these are
    return found


def _sources(
    requests: Sequence[Request], before: Mapping[Request, Registries | None] | None = None
) -> dict[Request, Registries]:
    """`before`: what is known already. Raises InstallFailed and RegistryFault."""
    known = {
        (request.registry, request.python): found
        for request, found in (before or {}).items()
        if found is not None
    }
    found: dict[Request, Registries] = {}
    for request in requests:
        key = request.registry, request.python
        found[request] = known[key] = known.get(key) or registries_of(request, os.environ)
    return found


# --- what is installed --------------------------------------------------------------------------------------


def _list(stores: Sequence[Store], *, as_json: bool) -> int:
    found = [(store, each) for store in stores for each in store.all()]
    if as_json:
        rows = [
            {
                "store": store.root,
                "request": each.request._asdict(),
                "versions": dict(each.versions),
                "program": store.words(each),
                "complete": store.has(each.set_name),
            }
            for store, each in found
        ]
        sys.stdout.write(json.dumps({"schema": SCHEMA, "installed": rows}, indent=2) + "\n")
        return EXIT["ok"]
    for store, each in found:
        marks = () if each.request.registry in ("oci", "image") else ("--",)
        mend = shlex.join(("runner", "install", *marks, *each.request.command))
        gone = "" if store.has(each.set_name) else f"; its files are gone: {mend}"
        say(f"{printable(str(each.request))}: {_versions(each)}{gone}", sys.stdout)
    if not found:
        say("Nothing is installed.", sys.stdout)
    return EXIT["ok"]


def _verify(store: Store) -> int:
    status = EXIT["ok"]
    found = store.all()
    for name in sorted({each.set_name for each in found}):
        users = ", ".join(printable(str(each.request)) for each in found if each.set_name == name)
        changed = store.changed(name) if store.has(name) else ["all of them"]
        if changed:
            status = _FAILED
            shown = ", ".join(map(printable, changed[:5]))
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            say(
                f"{users}: files are not as they were fetched: {shown}{more}; remove it and install it again",
                sys.stdout,
            )
        else:
            say(f"{users}: as it was fetched", sys.stdout)
    return status


def _named(stores: Sequence[Store], name: str) -> dict[Store, list[Installed]]:
    """What is installed under a name; all without one. Raises ValueError."""
    installed = {store: store.all() for store in stores}
    if not name:
        return {store: each for store, each in installed.items() if each}
    for names in ({name}, _as_image(name)):  # a package may have the short name of an image
        found = {
            store: [each for each in all_of if names & {each.request.name, str(each.request)}]
            for store, all_of in installed.items()
        }
        if any(found.values()):
            return {store: each for store, each in found.items() if each}
    raise ValueError(f"{name} is not installed; runner install --list shows what is")


def _as_image(name: str) -> set[str]:
    """The names in full of an image that is written as docker takes it. Without a tag: with every one."""
    from runner.install.request import LATEST, UnusableSpec

    try:
        request = image_request(name)
    except UnusableSpec:
        return set()
    has_tag = str(request) != f"{request.name}:{LATEST}" or name.endswith(f":{LATEST}")
    return {str(request)} if has_tag else {request.name}


def _remove(named: Mapping[Store, Sequence[Installed]]) -> int:
    for store, installed in named.items():
        with store.changing(lambda text: say(text, sys.stdout)):
            for each in installed:
                store.remove(each.request)
                say(f"Removed {printable(str(each.request))}", sys.stdout)
    return EXIT["ok"]


def _update(named: Mapping[Store, Sequence[Installed]], args: argparse.Namespace) -> int:
    """Fetch again, show which versions change, and ask before the new ones count."""
    status = EXIT["ok"]
    limits = FetchLimits(args.deadline, args.disk)
    for store, installed in named.items():
        chosen = [each for each in installed if each.request.unpinned or args.update]
        for each in chosen:
            update = {"oci": update_reference, "image": update_image}.get(each.request.registry)
            if update is not None:
                status = max(status, _say_faults(partial(update, args, store, each.request)))
        old = [each for each in chosen if each.request.registry not in REFERENCES]
        if not old:
            continue
        sources = _sources([each.request for each in old])
        with store.changing(lambda text: say(text, sys.stdout)), fetch_place(store, os.environ) as place:
            for number, each in enumerate(old, 1):
                label = printable(str(each.request))
                lock = store.lock_of(each.set_name)
                if lock is not None and lock.ran_scripts and not args.scripts:
                    say(f"{label}: its install scripts have run; add --scripts to update it", sys.stdout)
                    continue
                progress = ProgressBar(number, len(old), label)
                try:
                    with fetching(
                        store,
                        place,
                        each.request,
                        sources[each.request],
                        os.environ,
                        scripts=args.scripts,
                        limits=limits,
                        tick=progress.tick,
                    ) as fetched:
                        progress.end()
                        if fetched.lock.name == each.set_name and store.has(each.set_name):
                            say(f"{label}: nothing newer", sys.stdout)
                            continue
                        say(f"{label}:", sys.stdout)
                        for line in _differences(store, each, fetched.lock.packages):
                            say(f"  {line}", sys.stdout)
                        if fetched.note:
                            say(f"  {fetched.note}", sys.stdout)
                        if not args.yes and (refusal := confirm("Update?")) is not None:
                            status = refusal
                            continue
                        store.add(fetched.installed, fetched.lock, fetched.folder)
                        say("  updated; what was allowed for it will be asked again", sys.stdout)
                except (InstallFailed, BadContent) as fault:
                    progress.end()
                    _fail(f"{label}: {fault}")
                    say("  it stays as it was")
                    status = _FAILED
            store.remove_unused()
    return status


def _differences(store: Store, old: Installed, new: Sequence[Locked]) -> list[str]:
    """A line for each package that changes. A version that is another archive now is told too: at npm's own
    registry no publisher can do that, so somebody else may have."""
    known = store.lock_of(old.set_name)
    before = {} if known is None else {each.name: each for each in known.packages}
    after = {each.name: each for each in new}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        was, now = (found.get(name, Locked(name, "none", "")) for found in (before, after))
        if was.version != now.version:
            lines.append(printable(f"{name}: {was.version} -> {now.version}"))
        elif was.integrity != now.integrity:
            lines.append(printable(f"{name}: still {now.version}, but the registry gives another archive"))
    return lines or ["the same packages"]


def _versions(installed: Installed) -> str:
    return ", ".join(f"{printable(name)} {printable(version)}" for name, version in installed.versions)


def _label(wanted: Wanted) -> str:
    packages = printable(str(wanted.request))
    return f"{printable(wanted.server)} ({packages})" if wanted.server else packages


def _fail(text: str) -> None:
    sys.stdout.flush()
    first, _, rest = text.partition("\n")
    say(f"runner install: {printable(first)}")
    for line in rest.splitlines():
        sys.stderr.write(f"  {line}\n")

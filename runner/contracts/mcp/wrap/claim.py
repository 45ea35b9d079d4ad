"""Checks what a wrapped command line claims about its entry against the configuration.

An entry's state, its approvals and the rules for its file of variables are those of the configuration that it
is in. An entry that came with a project must not pass for one of another configuration.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping

from runner.contracts.configurations import PLUGIN_PREFIX, EntryFound, WrappedEntry
from runner.contracts.mcp.hosts.expand import expand_home, with_folders
from runner.contracts.mcp.hosts.find import MOST_BYTES, known_files
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.site import directory_of, site_of
from runner.contracts.mcp.hosts.wrapping import (
    acting_names,
    acts_at_start,
    env_names,
    options_fault,
    plugin_env,
    run_name,
)
from runner.contracts.mcp.wrap.configuration import (
    Configuration,
    configuration,
    image_of,
    table_names,
    value_at,
)
from runner.install.image_reference import normal_reference
from runner.install.request import UnusableSpec
from sandbox import look
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.document.read import read_bounded
from sandbox.facts import search_path_of
from sandbox.policy.policy import steers
from sandbox.spec import is_variable_name

# Placeholders of any host. Their values are not known here.
_FILLED = re.compile(r"\$\{\{[^}]*+\}\}|\$\{[^}]*+\}|\{[A-Za-z]++:[^}]*+\}|\$[A-Za-z0-9_]++|^~")

_REWRITING_SECONDS, _PAUSE_SECONDS = 1.0, 0.05


def find_entry(wrapped: WrappedEntry, environ: Mapping[str, str]) -> EntryFound:
    """See Contract.find_entry."""
    if fault := options_fault(wrapped.options):
        allow = "runner allow FILE --server NAME, with --read, --write, --net or --env"
        raise ValueError(f"--wrapped: {fault}; run runner wrap again, and to give it more: {allow}")
    if look.realpath(wrapped.manifest) != wrapped.manifest:
        # A link on the way leads elsewhere than the words of the path say.
        told = f"{printable(wrapped.manifest)} is not the real path of a configuration"
        raise ValueError(f"--wrapped: {told}; run runner wrap again")
    home = os.path.expanduser("~")
    config = _read(wrapped.manifest, home)
    told = f"{wrapped.manifest} has no entry {wrapped.id} with this command line"
    words = ("run", *wrapped.options, "--", *wrapped.argv)
    for server in config.servers:
        if (run_name(server.name), server.scope) != (wrapped.id, wrapped.scope):
            continue
        if len(server.argv) != len(words) + 1 or not all(map(_may_be, server.argv[1:], words)):
            continue
        names = table_names(config, server)
        told = _wrong_variable(config, server.env_keys or (), names, wrapped, environ)
        if not told:
            return _entry_found(config, server, wrapped, environ, home)
    raise ValueError(f"--wrapped: {printable(told)}; restart the host, or run runner wrap again")


def _entry_found(
    config: Configuration, server: HostServer, wrapped: WrappedEntry, environ: Mapping[str, str], home: str
) -> EntryFound:
    is_own = config.place is not None and config.place.own
    if not is_own and any(word.startswith("--env") for word in wrapped.options):
        is_own = _is_linked_to(wrapped.manifest, home)
    written = table_names(config, server)
    names = written if wrapped.outdated else ()
    site = site_of(config.path, server, config.host, home)
    rules = "" if config.host is None else config.host.rules
    pairs = list(zip(server.argv[-len(wrapped.argv) :], wrapped.argv, strict=True))
    pairs += [(text, environ.get(key, text)) for key, name, text in plugin_env(server) if steers(name)]
    image = _image(config, server)
    return EntryFound(
        folder=config.place.project if config.place is not None else "",
        variables=None if is_own else frozenset(names),
        # Only the file can be trusted: any start that `_may_be` of the entry could have filled in anything.
        filled=any(
            given not in (written, expand_home(with_folders(written, rules, site.project, home), home))
            for written, given in pairs
        ),
        directory=directory_of(server, site, rules, home),
        program="" if image else _foreign_program(wrapped, environ),  # its program is the image's
        dropped=() if wrapped.outdated else _dropped(server, written, wrapped.options),
        image=image,
    )


def _image(config: Configuration, server: HostServer) -> str:
    """Raises ValueError."""
    asked = image_of(config, server)
    try:
        return normal_reference(asked) if asked else ""
    except UnusableSpec as fault:
        raise ValueError(f"--wrapped: the entry {printable(str(fault))}") from None


def _dropped(server: HostServer, written: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    """See EntryFound.dropped. Only what `runner wrap` can mend."""
    passed = env_names(options)
    added = (each for each in server.passed if each not in passed and not acts_at_start(each))
    return tuple(filter(is_variable_name, (*acting_names(server, written), *added)))


def _foreign_program(wrapped: WrappedEntry, environ: Mapping[str, str]) -> str:
    """See EntryFound.program. An entry that `runner wrap` wrote sets no PATH for the runner, so its program
    is found by that of the host. One that repeats another's command line may set one. '' also if the host's
    own PATH has no such program, or cannot be read."""
    name, given = wrapped.argv[0], environ.get("PATH", "")
    if "/" in name or f"{PLUGIN_PREFIX}PATH" in environ:
        return ""
    hosts = search_path_of(os.getppid())
    if not hosts or hosts == given:  # a launch from a stored plan asks that too
        return ""
    look.doubt("its PATH is another one than that of the process that started the runner")
    found, expected = shutil.which(name, path=given), shutil.which(name, path=hosts)
    if found is None or expected is None:
        return ""
    real = look.realpath(found)
    return "" if real == look.realpath(expected) else real


def _read(path: str, home: str) -> Configuration:
    """Read a configuration. Retries for a while, because a host may be rewriting it."""
    until = time.monotonic() + _REWRITING_SECONDS
    look.note_content(path)
    while True:
        try:
            return configuration(path, read_bounded(path, limit=MOST_BYTES), home, {})
        except DocumentError as error:
            if time.monotonic() >= until:
                raise ValueError(f"--wrapped: {error.diagnostics[0].text()}") from None
            time.sleep(_PAUSE_SECONDS)


def _is_linked_to(path: str, home: str) -> bool:
    """Whether a file of the person's own in a host's place is a link to this one."""
    return any(each.own and look.realpath(each.path) == path for each in known_files({}, home, home))


def _wrong_variable(
    config: Configuration,
    keys: tuple[str | int, ...],
    names: tuple[str, ...],
    wrapped: WrappedEntry,
    environ: Mapping[str, str],
) -> str:
    """Returns a message about a variable that differs from the entry, or ''."""
    if not wrapped.outdated:
        for name in environ:
            if name.startswith(PLUGIN_PREFIX) and name not in names:
                return f"{wrapped.manifest} has no variable {name} for {wrapped.id}"
    for name in names:
        written, given = value_at(config.document.data, (*keys, name)), environ.get(name)
        if isinstance(written, str) and given is not None and not _may_be(written, given):
            return f"{wrapped.manifest} has another value of {name} for {wrapped.id}"
    return ""


def _may_be(written: str, given: str) -> bool:
    """Whether a host can have expanded `written` to `given`."""
    first, *parts = _FILLED.split(written)
    if not parts:
        return written == given
    if not given.startswith(first):
        return False
    at = len(first)
    *between, last = parts
    for part in between:
        at = given.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return len(given) - at >= len(last) and given.endswith(last)

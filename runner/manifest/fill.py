"""Fills the host's variables and files into the placeholders of a manifest, as far as the policy allows.

A manifest may have come with a project that somebody else wrote. So a variable is filled in only if the
plugin could have it passed on, and a file is read only if the manifest is below the same folder, is the
user's own, or the plugin could read the file itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence

from runner.contracts.registry import find_contract
from runner.manifest.load import position
from runner.plugin import Plugin
from sandbox import look
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable
from sandbox.document.read import read_bounded
from sandbox.paths.beneath import Escapes, open_beneath
from sandbox.paths.denied_paths import lexical_hit
from sandbox.paths.mounts import contains
from sandbox.policy.policy import Policy, matches, steers
from sandbox.spec import Denial, KeyPath, Note, Overrides
from sandbox.speed.value import NamedTuple

FILE_LIMIT = 64 << 10  # bytes of a file that is filled in
_OUTSIDE_HINT = "move it into the project, or allow it: runner allow --read FILE MANIFEST"


class FilledPlugin(NamedTuple):
    plugin: Plugin
    withheld: tuple[str, ...] = ()  # names of variables that are set, and that the plugin may not have
    questions: tuple[str, ...] = ()  # values that only its host can ask its user for


class FillRefused(Exception):
    """A file that the manifest names is not read, so the plugin is not started."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.text())
        self.diagnostic = diagnostic


def fill(
    plugin: Plugin,
    policy: Policy,
    overrides: Overrides,
    environ: Mapping[str, str],
    homes: Sequence[str],
) -> FilledPlugin:
    """Fill in all placeholders. Raises FillRefused."""
    given = dict(overrides.env)
    hosts = find_contract(plugin.contract).configurations
    assert hosts is not None  # other contracts have no placeholders
    withheld: dict[str, None] = {}

    def variable(name: str) -> str | None:
        if name in given:
            return given[name]
        if name not in environ:
            return None
        rule = policy.env
        if name in overrides.pass_env or name in rule.passed or matches(rule.ceiling, name):
            return environ[name]
        withheld[name] = None
        return None

    def read_file(path: str, where: KeyPath) -> str:
        own = hosts.is_users_own(plugin.manifest, environ)
        base = (plugin.template and plugin.template.folder) or os.path.dirname(plugin.manifest)
        try:
            return read_named(path, base, homes, own=own, may_read=policy.may_read, denied=policy.deny)
        except NamedFileRefused as refused:
            reason, hint = str(refused), refused.hint
        except OSError as error:
            reason, hint = error.strerror or str(error), "create the file, or take it out of the entry"
        message = f"{printable(path)} cannot be used: {reason}"
        raise FillRefused(
            Diagnostic(plugin.manifest, *position(plugin, where), "file_unusable", message, hint)
        )

    filled, questions = hosts.fill(plugin, variable, read_file)
    for request in plugin.spec.env:
        if request.value is None and not request.required and not request.fills:
            variable(request.name)
    return FilledPlugin(filled, tuple(name for name in withheld if name not in given), questions)


def file_variable_denials(
    written: Plugin, filled: Plugin, policy: Policy, *, approved: bool
) -> tuple[Denial, ...]:
    """Denials of variables that decide which code runs and come from a file. The file may change after an
    approval, so no approval covers them. If there is an approval, PATH is one of them."""
    known = {each.name for each in written.spec.env}
    return tuple(
        Denial(
            "env_steering",
            each.name,
            "it decides which code the loader or interpreter runs, so a file of variables may not set it",
            f"set {each.name} in the env of the entry, where runner allow shows its value",
            where=each.where,
        )
        for each in filled.spec.env
        if each.name not in known
        and (steers(each.name) or (approved and each.name == "PATH"))
        and not matches(policy.env.steering, each.name)
    )


def text_of(path: str) -> str:
    """Returns the text of a file that is filled in, or '' if it cannot be read. Used to notice changes."""
    try:
        return os.fsdecode(read_bounded(path, limit=FILE_LIMIT))
    except DocumentError:
        return ""


def notes(filled: FilledPlugin, policy: str, command: str) -> tuple[Note, ...]:
    """One note about values that were not filled in. `command`: allows them."""
    said: list[str] = []
    hint = ""
    if filled.withheld:
        names = ", ".join(map(printable, filled.withheld))
        said.append(f"withheld, because policy {policy} does not pass them on from the host: {names}")
        hint = f"to allow them: {command}; for one launch: --env {printable(filled.withheld[0])}"
    if filled.questions:
        names = ", ".join(map(printable, filled.questions))
        said.append(f"left empty, because only its host can ask for them: {names}")
        hint = hint or "set the variable itself with --env NAME=VALUE, or use runner wrap"
    return (Note("withheld", "; ".join(said), hint),) if said else ()


class NamedFileRefused(Exception):
    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def read_named(
    path: str,
    base: str,
    homes: Sequence[str],
    *,
    own: bool,
    may_read: Callable[[str], bool] = lambda path: False,
    denied: Sequence[str] = (),
) -> str:
    """The text of a file that a manifest names. `base`: the folder that the manifest came with. `own`: the
    manifest is the user's own. `may_read`, `denied`: what the policy says. Raises NamedFileRefused, OSError.
    """
    look.doubt(f"{path} may hold secrets")
    _require_allowed(path, denied, homes)
    base = look.realpath(base)
    opened = _open_file(path, base, own or may_read(look.realpath(path)))
    try:
        # The path of the opened file: the name may lead to another one by now.
        real = os.readlink(f"/proc/self/fd/{opened}")
        _require_allowed(real, denied, homes)
        if not own and not contains(base, real) and not may_read(real):
            # A link on the path was changed after the check.
            raise _leads_out(base)
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise NamedFileRefused("it is not a regular file", "name a file of text")
        if status.st_nlink > 1 and not own and not may_read(real):
            # Another name of it may be in a denied place.
            raise NamedFileRefused("the file has several names (hard links)", "make it a file of its own")
        return _text(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


def _require_allowed(path: str, denied: Sequence[str], homes: Sequence[str]) -> None:
    hit = lexical_hit(path, homes, denied)
    if hit is not None:
        raise NamedFileRefused(f"it {hit.clause()}", hit.hint())


def _open_file(path: str, base: str, anywhere: bool) -> int:
    """An O_PATH descriptor of the file."""
    flags = os.O_PATH | os.O_CLOEXEC
    if anywhere:
        return os.open(look.realpath(path), flags | os.O_NOFOLLOW)
    if not contains(base, path):
        raise NamedFileRefused(
            f"it is outside of {base}, the folder that the configuration came with", _OUTSIDE_HINT
        )
    directory = os.open(base, flags | os.O_DIRECTORY)
    try:
        return open_beneath(directory, os.path.relpath(path, base), (base,))
    except Escapes:
        raise _leads_out(base) from None
    finally:
        os.close(directory)


def _leads_out(base: str) -> NamedFileRefused:
    message = f"a link leads out of {base}, the folder that the configuration came with"
    return NamedFileRefused(message, _OUTSIDE_HINT)


def _text(name: str) -> str:
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with open(descriptor, "rb") as file:
        raw = file.read(FILE_LIMIT + 1)
    if len(raw) > FILE_LIMIT:
        raise NamedFileRefused(f"it has more than {FILE_LIMIT} bytes", "use a smaller file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise NamedFileRefused("it is not UTF-8", "save it as UTF-8") from None
    if "\0" in text:
        raise NamedFileRefused("it contains a NUL character", "name a file of text")
    return text

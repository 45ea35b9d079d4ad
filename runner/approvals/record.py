"""The record of one approval, its key, and the folder of approvals."""

from __future__ import annotations

import os

from runner.approvals.marks import arguments_digest, starts_below
from runner.plugin import Plugin
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.paths.program import locate
from sandbox.policy.approval import join_approvals, requested_approval
from sandbox.policy.policy import RUNTIME_PATHS
from sandbox.spec import Approval
from sandbox.speed.typed import Mapping
from sandbox.speed.value import NamedTuple

VERSION = 2  # of the file of an approval; files of version 1 name no program, and are not valid any more

ENDING = ".json"  # of the name of each file
NOTIFIED = ".told-"  # before the stem: the mark of was_notified


class ApprovalKey(NamedTuple):
    """The plugin that an approval is for. An approval does not apply to a plugin that differs in any
    field."""

    contract: str
    id: str
    file: str  # the real path of the manifest or configuration; of the program, if it came from neither
    arguments: str  # digest of the command, its arguments, and the variables that decide which code runs
    scope: str = ""  # the project that it is for, where the file has plugins of several
    folder: str = ""  # where it starts, if what runs depends on that
    # The program that starts, by its name in its real folder: PATH decides what a bare name means. Empty:
    # there is none. Inode and content are not part of the key, so an approval survives an upgrade.
    program: str = ""
    # What else decides which program that is: its real path, if the name is a link outside of the system's
    # folders; the same for the interpreter of its #! line; and PATH=VALUE, if the plugin sets it, because a
    # #! line, a launcher or a shell searches it in the cage.
    chosen: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """A digest of all but the program. It was the whole file name in version 1."""
        parts = (self.contract, self.id, self.file, self.arguments, self.scope, self.folder)
        return fingerprint(*map(os.fsencode, parts))[:32]

    @property
    def name(self) -> str:
        """The name of its file among the approvals. It ends with the stem."""
        return fingerprint(*map(os.fsencode, (self.program, *self.chosen)))[:8] + self.stem

    @property
    def programs(self) -> tuple[str, ...]:
        return (self.program, *self.chosen)


class ApprovalRecord(NamedTuple):
    key: ApprovalKey
    asked: Approval  # what the plugin asked for; all of it was allowed
    added: Approval = Approval()  # what the person allowed in addition
    digest: str = ""  # of what was asked, as it was shown
    when: float = 0.0  # seconds since 1970
    version: int = VERSION

    @property
    def whole(self) -> Approval:
        return join_approvals(self.asked, self.added)


def key_of(plugin: Plugin) -> ApprovalKey | None:
    """The key without the program. None: nothing can be approved for the plugin, because it starts nothing or
    has no name of its own."""
    entrypoint = plugin.entrypoint
    if entrypoint is None or not plugin.approvable:
        return None
    words = (entrypoint.command, *entrypoint.args)
    folder, image = plugin.folder, plugin.spec.image
    in_image = image is not None and image.starts_own
    if in_image:  # its options decide which code runs, too: where a folder is shown, as whom, from where
        words += entrypoint.launcher
    if not (folder or in_image) and plugin.root is None and starts_below(words, entrypoint.directory):
        folder = look.realpath(entrypoint.directory)  # as for a command: an entry may become one
    if plugin.template is not None and plugin.template.files:
        from runner.manifest.fill import text_of  # most launches do not need it

        words += tuple(map(text_of, plugin.template.files))
    arguments = arguments_digest(words, plugin.spec.env)
    file = look.realpath(plugin.manifest)
    return ApprovalKey(plugin.contract, plugin.id, file, arguments, plugin.scope, folder)


def with_program(
    key: ApprovalKey, plugin: Plugin, environ: Mapping[str, str]
) -> tuple[ApprovalKey, tuple[str, ...]]:
    """The whole key, and all files that are code of the program. `environ`: of the runner, whose PATH finds
    the program. Slow, so it is called only if there is an approval."""
    entrypoint, image = plugin.entrypoint, plugin.spec.image
    assert entrypoint is not None  # key_of has found one
    if image is not None:  # its folder is named by its digest: another image is another program
        return key._replace(program=image.tree, chosen=(image.package,) if image.package else ()), ()
    found = locate(
        entrypoint.command,
        entrypoint.args,
        directory=entrypoint.directory,
        search_path=entrypoint.search_path or environ.get("PATH") or "",
        trusted=plugin.root is None,  # the command line is the operator's own
        environ=environ,
        roots=[look.realpath(path) for path in RUNTIME_PATHS if look.isdir(path)],
    )
    paths = [f"PATH={each.value}" for each in plugin.spec.env if each.name == "PATH" and each.value]
    return key._replace(program=found.program, chosen=(*found.chosen, *paths)), found.code


def asked_of(plugin: Plugin) -> Approval:
    """The approval that would grant all that the plugin asks for."""
    return requested_approval(plugin.spec, project=plugin.project is not None)


def digest_of(plugin: Plugin) -> str:
    """Digest of what the plugin asks for, limits included. The order does not matter."""
    asked = asked_of(plugin)
    parts = [
        f"{field}={sorted(value) if isinstance(value, tuple) else value}"
        for field, value in asked._asdict().items()
        if field not in ("staged", "hide", "ssh", "images")
        or value  # digests of earlier versions stay the same
    ]
    parts += [f"{name}={value}" for name, value in plugin.spec.limits._asdict().items() if value is not None]
    return fingerprint(*(os.fsencode(part) for part in parts))[:32]


# --- where records are --------------------------------------------------------------------------------------


class ApprovalsUnusable(Exception):
    """An approval cannot be trusted or read. The message says why, and the hint what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def approvals_folder(environ: Mapping[str, str]) -> str | None:
    """The path of the folder, which may not exist. None: HOME is not set."""
    # A relative XDG_CONFIG_HOME is invalid by its specification and ignored.
    base = environ.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return os.path.join(base, "runner/approvals") if base.startswith("/") else None

"""The folders of a plugin's own: its state directory, and what ${state_dir} and ${plugin_dir} stand for."""

from __future__ import annotations

import os

from runner.launch.command import environ_of_places
from runner.launch.stages import Invocation
from runner.outcome import EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.identity.host_side import FOLDER, is_host_side
from sandbox.identity.reservations import name_file
from sandbox.identity.state import StateRefused, StateUnwritable, last_used, real_state_dir, state_root
from sandbox.identity.uid_range import RESERVATIONS
from sandbox.policy.policy import Policy
from sandbox.spec import ARGUMENT_LIMIT, PLUGIN_DIR_TOKEN, STATE_DIR_TOKEN, EnvRequest, Note
from sandbox.speed.typed import Mapping


def state_dir(
    plugin: Plugin, policy: Policy, invocation: Invocation, environ: Mapping[str, str]
) -> tuple[str | None, tuple[Note, ...]]:
    """The plugin's state directory, if the plugin or the policy asks for one, and a note about each directory
    of the same plugin that is not used."""
    asked = [request.path for request in plugin.spec.paths]
    if not any(
        path.startswith(STATE_DIR_TOKEN) for path in (*asked, *policy.read.default, *policy.write.default)
    ):
        return None, ()
    if invocation.state_dir is not None:
        chosen = real_state_dir(invocation.state_dir)
        if is_host_side(chosen):
            message = f"state directory {chosen} is in a folder {FOLDER}, where hosts keep what plugins store"
            raise StateRefused(message, "choose another directory with --state-dir")
        return chosen, ()
    used, *unused = _managed_state_dirs(plugin, environ)
    # For the others there is only a uid.
    return used, tuple(_unused_note(used, path) for path in unused if look.isdir(path))


def _unused_note(used: str, unused: str) -> Note:
    message = f"earlier versions made two state directories of this plugin: {used} was used last and is used"
    hint = f"take what you need out of it, then: runner state remove {os.path.basename(unused)}"
    return Note("state", f"{message}, {unused} is left alone", hint)


def managed_state_dir(plugin: Plugin, environ: Mapping[str, str]) -> str:
    """The plugin's directory in the runner's own folder of state directories. Raises StateRefused."""
    return _managed_state_dirs(plugin, environ)[0]


def _managed_state_dirs(plugin: Plugin, environ: Mapping[str, str]) -> list[str]:
    """That directory, and then others that earlier versions made for the same plugin. If there are several,
    the last used comes first. Raises StateRefused."""
    root = state_root(environ_of_places(plugin, environ))
    if not root.startswith("/"):  # a relative one would be below the working directory
        message = "there is no place for the plugin's state: HOME is not the path of a folder"
        hint = (
            "set HOME, or choose a directory with --state-dir; what runner wrap wrote needs an account with"
        )
        raise StateUnwritable(message, f"{hint} a home in the password database")
    folder = real_state_dir(root, follow="own")
    own, *former = (
        os.path.join(folder, state_name(plugin._replace(mark=mark)))
        for mark in (plugin.mark, *plugin.former_marks)
    )
    found = [path for path in former if _is_known_state(path)]
    if not found or not _is_known_state(own):
        return found or [own]
    look.doubt(f"{own} and {found[0]} are state of one plugin")
    return sorted((own, *found), key=last_used, reverse=True)


def _is_known_state(path: str) -> bool:
    """Whether there is such a state directory, or for root a uid that is reserved for it."""
    return look.lexists(path) or (os.geteuid() == 0 and look.lexists(name_file(RESERVATIONS, path)))


def state_name(plugin: Plugin) -> str:
    """The name of that directory, made from the id and the path of the manifest.

    The id alone is not enough: a manifest that claims another plugin's id must not get that plugin's state.
    """
    label = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in plugin.id)[:64]
    marks = (plugin.mark,) if plugin.mark else ()
    place = (plugin.contract, plugin.id, look.realpath(plugin.manifest), *marks)
    return f"{label}.{fingerprint(*(os.fsencode(part) for part in place))[:12]}"


# --- ${state_dir} and ${plugin_dir} -------------------------------------------------------------------------


class Placeholders:
    """${state_dir} and ${plugin_dir} in a plugin's arguments and variables, replaced by the folders."""

    def __init__(self, plugin: Plugin, state_dir: str | None, *, caged: bool) -> None:
        folder = plugin.root or os.path.dirname(plugin.manifest)
        self._folders = {PLUGIN_DIR_TOKEN: plugin.root_inside if caged and plugin.root_inside else folder}
        if state_dir is not None:
            self._folders[STATE_DIR_TOKEN] = state_dir

    def text(self, text: str) -> str:
        for token, folder in self._folders.items():
            if token in text:
                text = text.replace(token, folder)
        # The manifest was checked with the placeholder, and the folder's path may be longer.
        if len(os.fsencode(text)) > ARGUMENT_LIMIT:
            outcome = Outcome(
                "manifest_invalid",
                "manifest",
                f"an argument or variable is longer than {ARGUMENT_LIMIT} bytes, the kernel's limit, once "
                f"{STATE_DIR_TOKEN} and {PLUGIN_DIR_TOKEN} are filled in",
                "argument_too_long",
                "shorten it in the manifest, or use the two placeholders less often in it",
            )
            raise Failure(outcome, EXEC_REFUSED)
        return text

    def request(self, request: EnvRequest) -> EnvRequest:
        return request if request.value is None else request._replace(value=self.text(request.value))

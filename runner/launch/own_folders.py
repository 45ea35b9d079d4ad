"""The folders of a plugin's own: its state directory, and what ${state_dir} and ${plugin_dir} stand for."""

from __future__ import annotations

import os

from runner.launch.stages import Invocation
from runner.outcome import EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.identity.host_side import FOLDER, is_host_side
from sandbox.identity.state import StateRefused, real_state_dir, state_root
from sandbox.policy.policy import Policy
from sandbox.spec import ARGUMENT_LIMIT, PLUGIN_DIR_TOKEN, STATE_DIR_TOKEN, EnvRequest
from sandbox.speed.typed import Mapping


def state_dir(
    plugin: Plugin, policy: Policy, invocation: Invocation, environ: Mapping[str, str]
) -> str | None:
    """The plugin's state directory, if the plugin or the policy asks for one."""
    asked = [request.path for request in plugin.spec.paths]
    if not any(
        path.startswith(STATE_DIR_TOKEN) for path in (*asked, *policy.read.default, *policy.write.default)
    ):
        return None
    if invocation.state_dir is not None:
        chosen = real_state_dir(invocation.state_dir)
        if is_host_side(chosen):
            message = f"state directory {chosen} is in a folder {FOLDER}, where hosts keep what plugins store"
            raise StateRefused(message, "choose another directory with --state-dir")
        return chosen
    return managed_state_dir(plugin, environ)


def managed_state_dir(plugin: Plugin, environ: Mapping[str, str]) -> str:
    """The plugin's directory in the runner's own folder of state directories. Raises StateRefused."""
    root = state_root(environ)
    if not root.startswith("/"):  # a relative one would be below the working directory
        message = "there is no place for the plugin's state: HOME is not the path of a folder"
        hint = (
            "set HOME, or choose a directory with --state-dir; what runner wrap wrote needs an account with"
        )
        raise StateRefused(message, f"{hint} a home in the password database")
    return os.path.join(real_state_dir(root, follow="own"), state_name(plugin))


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

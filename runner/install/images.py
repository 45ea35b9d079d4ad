"""An image of the store: how it is started, and as whom.

Its configuration is a stranger's. It names only files of its own tree, and variables of its own programs; who
it runs as counts inside of its cage.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Mapping
from typing import Any

from runner.install.content import BadContent
from runner.install.image_reference import NOT_INSTALLED, SCHEME, image_request
from runner.install.request import UnusableSpec
from runner.install.roots import store_roots
from runner.install.store import Installed, Store, StoreRefused
from runner.plugin import Entrypoint, LaunchFault, Plugin
from sandbox import look
from sandbox.paths.in_tree import find_in_tree
from sandbox.spec import ARGUMENT_LIMIT, ImageRoot, is_variable_name
from sandbox.speed.value import NamedTuple

CONFIG = "image.json"  # in the folder of the set
MOST_CONFIG_BYTES = 1 << 20
_MOST_WORDS = 4096
_MOST_ACCOUNTS_BYTES = 1 << 20
_MOST_ID = (1 << 31) - 2
_LAST_SIGNAL = 64


class ImageConfig(NamedTuple):
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    directory: str
    user: str
    system: str
    architecture: str
    stop_signal: int


class ImageUnusable(Exception):
    """The message says why the image cannot be started, the hint what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


# --- its configuration --------------------------------------------------------------------------------------


def read_config(raw: bytes) -> ImageConfig:
    """Raises BadContent."""
    try:
        document = json.loads(raw) if len(raw) <= MOST_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadContent("its configuration is no JSON object")
    config = document.get("config") or {}
    if not isinstance(config, dict):
        raise BadContent("its configuration is damaged: config is no object")
    env = [pair.partition("=") for pair in _words(config, "Env")]
    directory = _text(config, "WorkingDir") or "/"
    entrypoint = _words(config, "Entrypoint")
    return ImageConfig(
        entrypoint=() if entrypoint == ("",) else entrypoint,
        cmd=_words(config, "Cmd"),
        env=tuple({name: value for name, _, value in env if is_variable_name(name)}.items()),
        directory=os.path.normpath("/" + directory.lstrip("/")),
        user=_text(config, "User"),
        system=_text(document, "os"),
        architecture=_text(document, "architecture"),
        stop_signal=_signal(_text(config, "StopSignal")),
    )


def _signal(text: str) -> int:
    """The number of a signal; SIGTERM, as everywhere, if the image names none that is known."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 3 else 0
    if 0 < number <= _LAST_SIGNAL:
        return number
    name = "SIG" + text.upper().removeprefix("SIG")
    return int(signal.Signals.__members__.get(name, signal.SIGTERM))


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key) or ""
    try:
        if isinstance(value, str) and "\0" not in value and len(os.fsencode(value)) <= ARGUMENT_LIMIT:
            return value
    except UnicodeEncodeError:  # half of a surrogate pair is no character
        pass
    raise BadContent(f"its configuration is damaged: {key} is no text that can be used")


def _words(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if isinstance(value, list) and len(value) <= _MOST_WORDS:
        return tuple(_text({key: each}, key) for each in value)
    raise BadContent(f"its configuration is damaged: {key} is no list of texts")


# --- in the store -------------------------------------------------------------------------------------------


def with_image(plugin: Plugin, environ: Mapping[str, str]) -> Plugin:
    """The plugin with what the store has of its image; unchanged if there is nothing: `image_fault` says so
    then."""
    found = _in_store(plugin, environ)
    return found if isinstance(found, Plugin) else plugin


def image_fault(plugin: Plugin, environ: Mapping[str, str]) -> LaunchFault | None:
    """Why the image that a plugin needs cannot be its root, or None."""
    found = _in_store(plugin, environ)
    return found if isinstance(found, LaunchFault) else None


def _in_store(plugin: Plugin, environ: Mapping[str, str]) -> Plugin | LaunchFault:
    asked, entry = plugin.spec.image, plugin.entrypoint
    if asked is None or asked.tree or entry is None:
        return plugin
    try:
        if (found := find_image(asked, environ)) is not None:
            entry, spec = _entrypoint(entry, *found), plugin.spec._replace(image=found[0])
            return plugin._replace(entrypoint=entry, spec=spec)
    except ImageUnusable as fault:
        return LaunchFault("image_unusable", str(fault), fault.hint)
    except StoreRefused as refused:
        return LaunchFault("store_refused", str(refused), refused.hint)
    message = f"the image {asked.reference} is not installed, and no launch fetches one"
    return LaunchFault(NOT_INSTALLED, message, f"fetch it once: runner install {SCHEME}{asked.reference}")


def find_image(asked: ImageRoot, environ: Mapping[str, str]) -> tuple[ImageRoot, ImageConfig] | None:
    """The image as it is stored; None if it is not. Raises ImageUnusable and StoreRefused."""
    try:
        request = image_request(asked.reference)
    except UnusableSpec as fault:
        raise ImageUnusable(f"the entry {fault}") from None
    for folder in store_roots(environ):
        store = Store(folder)
        if (found := store.find(request)) is not None:
            tree = store.tree(found.set_name)
            try:
                config = read_config(_read(os.path.join(os.path.dirname(tree), CONFIG)))
            except (OSError, BadContent) as fault:
                message = f"the image {asked.reference} is damaged in the store: {fault}"
                raise ImageUnusable(message, "remove it, and install it again") from None
            return _root(asked, tree, config), config
    return None


def image_digest(store: Store, installed: Installed) -> str:
    """The digest of the manifest that the set of an image was made from; '' if that is not known."""
    lock = store.lock_of(installed.set_name)
    # The set is named by the digest of its lock.
    packages = () if lock is None or lock.name != installed.set_name else lock.packages
    return next((each.integrity for each in packages if each.name != CONFIG), "")


def _read(path: str) -> bytes:
    look.note_content(path)
    with open(path, "rb") as file:
        return file.read(MOST_CONFIG_BYTES + 1)


def _root(asked: ImageRoot, tree: str, config: ImageConfig) -> ImageRoot:
    """Raises ImageUnusable."""
    name = asked.user or config.user or "0"
    uid, gid, home = _account(tree, name)
    env = dict(config.env)
    # What was set before is where the packages are that its interpreter starts.
    env.update((key, f"{value}:{env[key]}" if env.get(key) else value) for key, value in asked.env)
    return asked._replace(
        tree=tree,
        user=name,
        uid=uid,
        gid=gid,
        home=home,
        env=tuple(env.items()),
        stop_signal=config.stop_signal,
        directory=asked.directory or config.directory,
    )


def _entrypoint(entry: Entrypoint, root: ImageRoot, config: ImageConfig) -> Entrypoint:
    """What is started: the image's own program with the arguments of the entry, or its command by the files
    of the image. Raises ImageUnusable."""
    if not root.starts_own:
        return entry
    own, args = config.entrypoint, root.args or config.cmd
    if root.entrypoint is not None:  # with another one docker leaves the image's command out
        own, args = ((root.entrypoint,) if root.entrypoint else ()), root.args
    words = (*own, *args)
    if not words:
        message = f"the image {root.reference} has no entry point and no command of its own"
        raise ImageUnusable(message, "write the command behind the image")
    return entry._replace(command=words[0], args=words[1:], launcher=entry.words, stored_args=len(words) - 1)


# --- who it runs as -----------------------------------------------------------------------------------------


def _account(tree: str, name: str) -> tuple[int, int, str]:
    """The uid, the gid and the home of USER or USER:GROUP, by the image's own files. Raises ImageUnusable."""
    user, _, group = name.partition(":")
    accounts = _lines(tree, "etc/passwd", 7)
    found = next((each for each in accounts if user in (each[0], each[2])), None)
    if found is None and not user.isdecimal():
        message = f"the image has no user {user[:80]!r} in its /etc/passwd"
        raise ImageUnusable(message, "give another one as a number: --user UID")
    uid = _number(user if found is None else found[2])
    gid = 0 if found is None else _number(found[3])
    if group:
        of_name = next((each for each in _lines(tree, "etc/group", 3) if group in (each[0], each[2])), None)
        if of_name is None and not group.isdecimal():
            message = f"the image has no group {group[:80]!r} in its /etc/group"
            raise ImageUnusable(message, "give another one as a number: --user USER:GID")
        gid = _number(group if of_name is None else of_name[2])
    home = "/" if found is None or not found[5].startswith("/") else os.path.normpath(found[5])
    return uid, gid, "/" + home.lstrip("/")


def _number(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _MOST_ID:
        return int(text)
    message = f"{text[:80]!r} cannot be the user or group of an image"
    raise ImageUnusable(message, f"give another one, a number up to {_MOST_ID}: --user UID")


def _lines(tree: str, path: str, fields: int) -> list[list[str]]:
    found = find_in_tree(tree, path)
    if found is None or not stat.S_ISREG(found.status.st_mode):
        return []
    # Where it really is: a fact of a stored plan is asked of the host, where a link leads elsewhere.
    real = tree + found.path
    look.note_content(real)
    with open(real, encoding="utf-8", errors="replace", newline="\n") as file:
        text = file.read(_MOST_ACCOUNTS_BYTES)
    # A NUL would end a word of a command line.
    rows = (line.split(":") for line in text.split("\n") if "\0" not in line)
    return [row for row in rows if len(row) >= fields]

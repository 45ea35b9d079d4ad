"""Finds the installation of a program: a Python or node prefix, a virtual environment, or the package of a
script.

Programs find their parts relative to these folders, so a program is shown together with its installation.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.files import text_at

_CONFIGURATION_BYTES = 65536


def package_of(script: str) -> str:
    """The folder a script belongs to: the nearest one with the files of a package, else the script's own
    folder."""
    before, among, _ = script.partition("/node_modules/")
    if among:
        # A package in node_modules needs its neighbours and their dependencies.
        return f"{before}/node_modules"
    own = folder = os.path.dirname(script)
    while folder not in ("/", "/home", "/opt", "/srv", "/usr", "/tmp", "/var"):
        if any(
            look.exists(os.path.join(folder, mark))
            for mark in ("package.json", "pyproject.toml", "pyvenv.cfg")
        ):
            return folder
        folder = os.path.dirname(folder)
    return own


def home_of(executable: str) -> str | None:
    """The virtual environment or language prefix that a program is installed in, or None."""
    prefix, last = os.path.split(os.path.dirname(executable))
    if last not in ("bin", "sbin") or prefix in ("/", "/usr"):
        return None
    if look.exists(os.path.join(prefix, "pyvenv.cfg")) or is_runtime(prefix):
        return prefix
    return None


# Only these parts of a prefix hold programs. Beside them are projects of users (conda), a token (nvm's
# etc/npmrc), or the data of services (Linuxbrew's var).
_PARTS = ("bin", "lib", "lib64", "libexec", "include", "share")


_NODE_PARTS = ("bin", "lib/node_modules")


DISPENSABLE_PARTS = ("/libexec", "/include", "/share")


def parts_of(prefix: str) -> tuple[str, ...]:
    """The parts that an installation can have; none if `prefix` is no installation."""
    if prefix == "/":
        return ()
    if look.isfile(os.path.join(prefix, "pyvenv.cfg")):
        return (*_PARTS, "pyvenv.cfg")
    if _has_python(prefix):
        return _PARTS
    return _NODE_PARTS if _has_node(prefix) else ()


def is_runtime(prefix: str) -> bool:
    """Whether `prefix` is an installation of Python or node and not just a folder with such a name."""
    # The root directory has /lib/python3, and is no prefix.
    return prefix != "/" and (_has_node(prefix) or _has_python(prefix))


def _has_node(prefix: str) -> bool:
    is_file = look.isfile(os.path.join(prefix, "bin/node"))
    return is_file and look.isdir(os.path.join(prefix, "lib/node_modules/npm"))


def _has_python(prefix: str) -> bool:
    library = os.path.join(prefix, "lib")
    try:
        names = look.listdir(library)
    except OSError:
        return False
    return any(name.startswith("python3") and look.isfile(f"{library}/{name}/os.py") for name in names)


def venv_base(prefix: str) -> str | None:
    """The prefix of the Python that a virtual environment was made from; None if it is no environment."""
    text = text_at(os.path.join(prefix, "pyvenv.cfg"), _CONFIGURATION_BYTES)
    for line in text.splitlines():
        key, _, value = line.partition("=")
        home = value.strip()
        if key.strip() == "home" and home.startswith("/") and "\0" not in home:
            base = look.realpath(home)
            return os.path.dirname(base) if os.path.basename(base) == "bin" else base
    return None

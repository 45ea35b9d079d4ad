"""Extras: parts of the runner with dependencies of their own, and the command that installs those here.

No registry has the runner, so a command names the checkout, or the dependencies themselves.
"""

from __future__ import annotations

import os
import shlex
import sys

from sandbox import CODE_ROOT

_NAME = "plugin-runner"
_DEBIAN = f"/usr/lib/{_NAME}"


def missing(extra: str, error: ModuleNotFoundError) -> str:
    """What to say if an import failed that the extra provides."""
    name = (error.name or "a package").partition(".")[0]
    return f"{name} is missing; install it with {install_command(extra)}"


def install_command(extra: str, root: str = CODE_ROOT, prefix: str = sys.prefix) -> str:
    """The command for this installation. `root`: of the code. `prefix`: of the environment."""
    if prefix == _DEBIAN:  # the package has all of them
        return f"apt-get install --reinstall ./{_NAME}_*.deb"
    if os.path.exists(f"{prefix}/pipx_metadata.json"):
        return shlex.join(("pipx", "inject", os.path.basename(prefix), *_requirements(extra)))
    pip = f"{prefix}/bin/pip"
    words = [pip] if os.path.exists(pip) else [sys.executable, "-m", "pip"]
    if os.path.exists(f"{root}/pyproject.toml"):
        return shlex.join((*words, "install", "-e", f"{root}[{extra}]"))
    return shlex.join((*words, "install", *_requirements(extra)))


def _requirements(extra: str) -> list[str]:
    """The dependencies of an extra, and of those that it includes."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        every = requires(_NAME) or []
    except PackageNotFoundError:
        return [f"{_NAME}[{extra}]"]
    found: dict[str, None] = {}
    for each in every:
        requirement, _, condition = each.partition(";")
        if condition.replace("'", '"').strip() != f'extra == "{extra}"':
            continue
        name, _, included = requirement.strip().partition("[")
        inner = included.rstrip("]").split(",") if name == _NAME else ()
        found.update(dict.fromkeys([one for part in inner for one in _requirements(part)]))
        if name != _NAME:
            found[requirement.strip()] = None
    return list(found)

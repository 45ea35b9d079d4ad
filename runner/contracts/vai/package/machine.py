"""Whether a package can be launched: it was built for this machine, and its program is in it."""

from __future__ import annotations

import os

from runner.contracts.vai.declared import Declared, declared_by
from runner.plugin import LaunchFault, Plugin
from sandbox import look
from sandbox.document.diagnostic import quoted
from sandbox.paths.mounts import contains
from sandbox.speed.value import NamedTuple

# What manifests call a machine that the kernel calls otherwise.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_SHOWN = 10  # words of the manifest in a message


class MachineFault(NamedTuple):
    key: str  # of [runtime]
    cause: str
    message: str
    hint: str


def machine_fault(declared: Declared) -> MachineFault | None:
    """Returns why the package cannot run here, or None."""
    machine = os.uname().machine
    own = _ARCHITECTURES.get(machine, machine)
    for key, listed, names in (("os", declared.os, ("linux",)), ("arch", declared.arch, (own, machine))):
        if listed and not set(listed) & set(names):
            given = ", ".join(map(quoted, listed[:_MOST_SHOWN]))
            message = f"the package was built for {key} {given}, and this machine has {quoted(names[0])}"
            hint = (
                f"get a package for {names[0]}, or add it to {key} under [runtime] if the program runs here"
            )
            return MachineFault(key, f"wrong_{key}", message, hint)
    return None


def find_in_package(root: str, name: str) -> str:
    """The real path of a file of the package. Raises FileNotFoundError, and ValueError if a link on the way
    leads out of the package."""
    real = look.realpath(os.path.join(root, name))
    if not contains(look.realpath(root), real):
        raise ValueError(real)
    look.stat(real)
    return real


def outside_message(name: str, real: str) -> tuple[str, str]:
    """Message and hint about a file whose link leads out of the package."""
    return (
        f"{quoted(name)} leads out of the package, to {quoted(real)}",
        "put the file itself into the package",
    )


def launch_fault(plugin: Plugin) -> LaunchFault | None:
    fault = machine_fault(declared_by(plugin))
    if fault is not None:
        return LaunchFault(fault.cause, fault.message, fault.hint)
    if plugin.entrypoint is not None and plugin.root is not None:
        name = plugin.entrypoint.command.removeprefix("./")
        try:
            find_in_package(plugin.root, name)
        except ValueError as error:
            return LaunchFault("link_outside", *outside_message(name, str(error)))
        except OSError:
            return None  # the launch says that it is missing
    return None

"""Whether a package was built for this machine."""

from __future__ import annotations

import os

from runner.contracts.contract import LaunchFault
from runner.contracts.vai.declared import Declared, declared_by
from runner.plugin import Plugin
from sandbox.document.diagnostic import quoted
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


def launch_fault(plugin: Plugin) -> LaunchFault | None:
    fault = machine_fault(declared_by(plugin))
    return None if fault is None else LaunchFault(fault.cause, fault.message, fault.hint)

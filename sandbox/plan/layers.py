"""The layers of a launch: requested and effective. available_layers.py decides which there are."""

from __future__ import annotations

import os

from sandbox.spec import INSIDE_ID
from sandbox.speed.typed import TYPE_CHECKING, Iterable
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.policy.policy import Policy
    from sandbox.spec import Grant

UID = "uid"  # the layer of this name


class Layer(NamedTuple):
    """One layer: what was requested, and what is in force."""

    name: str
    requested: str
    effective: str
    detail: str = ""

    @property
    def degraded(self) -> bool:
        return self.requested != self.effective


class LayerUnavailable(Exception):
    """This machine cannot enforce a layer that is required."""

    def __init__(self, layer: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.layer = layer
        self.hint = hint


class Layers(NamedTuple):
    """The optional layers on this machine. The other layers are always on."""

    seccomp_filter: bytes  # empty: there is none, and the policy does not require one
    cgroup_namespace: bool
    user_namespace_lock: bool
    session_keyring: bool
    uid_range: tuple[int, int] | None  # for leased uids; None: the plugin has the runner's own uid


def list_layers(
    layers: Layers,
    grant: Grant,
    policy: Policy,
    identity: str = "",
    inside: int = INSIDE_ID,
    *,
    layered: bool = False,
) -> tuple[Layer, ...]:
    """Every layer, for `runner explain` and reports.

    What is in the plan is in force: bwrap does not start the program unless all its options worked, and the
    spawner checks its own steps. `identity`: the plugin's identity, if its uid is not a leased one. `inside`:
    the uid that it sees as its own. `layered`: its root takes changes, in memory.
    """
    network = grant.network.mode
    reach = _network_detail(grant)
    rows = (
        (
            "filesystem",
            "changes of the root in memory, only the listed paths"
            if layered
            else "read-only root, only the listed paths",
            True,
            "",
        ),
        ("namespaces", "user, pid, ipc, uts, mount", True, ""),
        ("cgroup_namespace", "private", layers.cgroup_namespace, ""),
        ("network", network, True, reach),
        ("capabilities", "none", True, ""),
        ("no_new_privileges", "on", True, ""),
        ("user_namespace_lock", "on", layers.user_namespace_lock, ""),
        ("seccomp", grant.seccomp, bool(layers.seccomp_filter), ""),
        (
            UID,
            _identity(policy, layers, identity, inside),
            os.geteuid() != 0 or layers.uid_range is not None,
            "",
        ),
        ("session_keyring", "own", layers.session_keyring, ""),
        ("environment", "only the listed names", True, ""),
        ("descriptors", "0, 1, 2", True, ""),
        ("core_dumps", "off", True, ""),
        ("parent_death", "ends the tree", True, ""),
    )
    kept_without_a_cage = ("environment", "descriptors", "core_dumps")
    return tuple(
        Layer(
            name,
            wanted,
            wanted if given and (not grant.unsandboxed or name in kept_without_a_cage) else "NONE",
            detail,
        )
        for name, wanted, given, detail in rows
    )


def _network_detail(grant: Grant) -> str:
    network = grant.network
    if network.mode == "host" or grant.unsandboxed:
        return "shares the host's network"
    if network.mode == "open":
        return "every host by name, by way of the gate"
    if network.hosts:
        return f"the {len(network.hosts)} listed, by way of the gate"
    return "loopback only"


def _identity(policy: Policy, layers: Layers, identity: str, inside: int) -> str:
    if identity:
        return shown_as(identity, inside)
    if os.geteuid() == 0:
        first, last = layers.uid_range or policy.uids
        return shown_as(f"leased from {first}-{last}", inside)
    return shown_as(f"the caller's ({os.geteuid()})", inside)


def with_owner(
    layers: Iterable[Layer], uid: int, identity: str = "", inside: int = INSIDE_ID
) -> tuple[Layer, ...]:
    """The layers of a plan, with the plugin's uid on the host filled in.

    `identity`: the plugin's identity, if its uid is not a leased one.
    """
    return tuple(_owned(layer, uid, identity, inside) if layer.name == UID else layer for layer in layers)


def _owned(layer: Layer, uid: int, identity: str, inside: int) -> Layer:
    if identity:
        wanted = shown_as(identity, inside)
        layer = Layer(UID, wanted, layer.effective if layer.degraded else wanted)
    return layer._replace(detail=f"uid {uid}")


def shown_as(identity: str, inside: int = INSIDE_ID) -> str:
    return f"{identity}, shown as {inside}"

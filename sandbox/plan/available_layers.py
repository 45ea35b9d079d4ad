"""Find out which layers this machine can enforce for a launch.

A layer that it cannot enforce stops the launch, unless the policy says `prefer` for exactly that one. Then
`runner explain` and every report name the missing layer.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.identity.uid_range import usable_range
from sandbox.plan.layers import UID, Layer, Layers, LayerUnavailable, shown_as
from sandbox.policy.policy import Policy
from sandbox.seccomp import filter as seccomp_filter
from sandbox.spec import Grant


def available_layers(grant: Grant, policy: Policy, bwrap: str, *, can_join_keyring: bool) -> Layers:
    """The layers of a launch on this machine. Raises LayerUnavailable for one that is missing and
    required."""
    if grant.unsandboxed:
        return Layers(b"", False, False, False, None)
    return Layers(
        seccomp_filter=_filter(grant, policy),
        cgroup_namespace=_require_layer(
            policy,
            "cgroup_namespace",
            look.exists("/proc/self/ns/cgroup"),
            "this kernel has no cgroup namespaces",
            "use a kernel built with CONFIG_CGROUPS=y",
        ),
        user_namespace_lock=_can_lock(policy, bwrap),
        session_keyring=_require_layer(
            policy,
            "session_keyring",
            can_join_keyring,
            "no session keyring can be joined here, so the plugin would share the caller's keys: keyctl "
            "is refused, in a container mostly by the seccomp filter around the runner",
            "start the container with --security-opt seccomp=policies/container/seccomp.json",
        ),
        uid_range=_uid_range(policy),
    )


def _require_layer(policy: Policy, layer: str, available: bool, message: str, remedy: str) -> bool:
    if not available and policy.layer(layer) == "require":
        raise LayerUnavailable(
            layer, message, f'{remedy}, or say {layer} = "prefer" under [layers] in the policy'
        )
    return available


def _filter(grant: Grant, policy: Policy) -> bytes:
    try:
        return seccomp_filter.filter_bytes(grant.seccomp)
    except seccomp_filter.SeccompUnavailable as error:
        _require_layer(policy, "seccomp", False, str(error), "run it on a machine that has one")
        return b""


def _can_lock(policy: Policy, bwrap: str) -> bool:
    """Whether bwrap knows --disable-userns. Tried only if the policy does not require the lock: it means
    starting bwrap, and an old bwrap refuses the option itself."""
    if policy.layer("user_namespace_lock") == "require":
        return True
    import subprocess

    help_text = subprocess.run([bwrap, "--help"], capture_output=True, env={}, timeout=10, check=False)
    return b"--disable-userns" in help_text.stdout


def _uid_range(policy: Policy) -> tuple[int, int] | None:
    if os.geteuid() != 0:
        return None
    first, last = policy.uids
    usable = usable_range(policy.uids)
    _require_layer(
        policy,
        "uid",
        usable is not None,
        f"the plugins' uids {first}-{last} do not exist in this user namespace",
        "map them into the container, name other uids under [user] in the policy",
    )
    return usable


def list_layers(layers: Layers, grant: Grant, policy: Policy, identity: str = "") -> tuple[Layer, ...]:
    """Every layer, for `runner explain` and reports.

    What is in the plan is in force: bwrap does not start the program unless all its options worked, and the
    spawner checks its own steps. `identity`: the plugin's identity, if its uid is not a leased one.
    """
    network = grant.network.mode
    reach = _network_detail(grant)
    rows = (
        ("filesystem", "read-only root, only the listed paths", True, ""),
        ("namespaces", "user, pid, ipc, uts, mount", True, ""),
        ("cgroup_namespace", "private", layers.cgroup_namespace, ""),
        ("network", network, True, reach),
        ("capabilities", "none", True, ""),
        ("no_new_privileges", "on", True, ""),
        ("user_namespace_lock", "on", layers.user_namespace_lock, ""),
        ("seccomp", grant.seccomp, bool(layers.seccomp_filter), ""),
        (
            UID,
            _identity(policy, layers, identity),
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


def _identity(policy: Policy, layers: Layers, identity: str) -> str:
    if identity:
        return shown_as(identity)
    if os.geteuid() == 0:
        first, last = layers.uid_range or policy.uids
        return shown_as(f"leased from {first}-{last}")
    return shown_as(f"the caller's ({os.geteuid()})")

"""Find out which layers this machine can enforce for a launch.

A layer that it cannot enforce stops the launch, unless the policy says `prefer` for exactly that one. Then
`runner explain` and every report name the missing layer.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.identity.uid_range import usable_range
from sandbox.plan.layers import UID, Layers, LayerUnavailable
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
            look.lexists("/proc/self/ns/cgroup"),  # what it leads to may be refused by AppArmor
            "this kernel has no cgroup namespaces",
            "use a kernel built with CONFIG_CGROUPS=y",
        ),
        session_keyring=_require_layer(
            policy,
            "session_keyring",
            can_join_keyring,
            "no session keyring can be joined here, so the plugin would share the caller's keys: keyctl "
            "is refused, in a container mostly by the seccomp filter around the runner",
            "start the container with --security-opt seccomp=policies/container/seccomp.json",
        ),
        uid_range=_uid_range(policy),
        user_namespace_lock=_can_lock(policy, bwrap),
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
        UID,
        usable is not None,
        f"the plugins' uids {first}-{last} do not exist in this user namespace",
        "map them into the container, name other uids under [user] in the policy",
    )
    return usable

"""The defences of a launch: those that are wanted, and those it has. available_layers.py decides."""

from __future__ import annotations

from sandbox.speed.typed import Iterable
from sandbox.speed.value import NamedTuple

INSIDE_ID = 65534  # the uid and gid that every plugin sees as its own: nobody
UID = "uid"  # the layer of this name


class Layer(NamedTuple):
    """One defence: what was wanted, what there is."""

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
    """What the optional defences come to on this machine. The others have no switch."""

    seccomp_filter: bytes  # empty: there is none, and the policy can do without
    cgroup_namespace: bool
    user_namespace_lock: bool
    session_keyring: bool
    uid_range: tuple[int, int] | None  # to lease from; None: the plugin has the runner's own uid


def with_owner(layers: Iterable[Layer], uid: int, identity: str = "") -> tuple[Layer, ...]:
    """The layers of a plan as they are carried out, by a plugin with this uid on the host.

    `identity`: who the plugin is, if its uid is not a leased one.
    """
    return tuple(_owned(layer, uid, identity) if layer.name == UID else layer for layer in layers)


def _owned(layer: Layer, uid: int, identity: str) -> Layer:
    if identity:
        wanted = shown_as(identity)
        layer = Layer(UID, wanted, layer.effective if layer.degraded else wanted)
    return layer._replace(detail=f"uid {uid}")


def shown_as(identity: str) -> str:
    return f"{identity}, shown as {INSIDE_ID}"

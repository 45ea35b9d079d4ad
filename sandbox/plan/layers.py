"""The layers of a launch: requested and effective. available_layers.py decides."""

from __future__ import annotations

from sandbox.speed.typed import Iterable
from sandbox.speed.value import NamedTuple

INSIDE_ID = 65534  # the uid and gid that every plugin sees as its own: nobody
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


def with_owner(layers: Iterable[Layer], uid: int, identity: str = "") -> tuple[Layer, ...]:
    """The layers of a plan, with the plugin's uid on the host filled in.

    `identity`: the plugin's identity, if its uid is not a leased one.
    """
    return tuple(_owned(layer, uid, identity) if layer.name == UID else layer for layer in layers)


def _owned(layer: Layer, uid: int, identity: str) -> Layer:
    if identity:
        wanted = shown_as(identity)
        layer = Layer(UID, wanted, layer.effective if layer.degraded else wanted)
    return layer._replace(detail=f"uid {uid}")


def shown_as(identity: str) -> str:
    return f"{identity}, shown as {INSIDE_ID}"

"""The result of one probe of the doctor."""

from __future__ import annotations

from typing import Literal, NamedTuple

Status = Literal["ok", "degraded", "missing", "info"]


class Finding(NamedTuple):
    """The result of one probe.

    `missing`: the layer cannot be enforced here. `degraded`: it works, but something around it is weaker
    than it should be. `info`: no layer of the default policy depends on it.
    """

    layer: str
    status: Status
    summary: str
    detail: str = ""
    remedy: str = ""
    cause: str = ""  # stable word for programs: outer_seccomp, apparmor, sysctl:user.max_user_namespaces, …

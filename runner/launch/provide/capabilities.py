"""What root itself may do, where a container or a unit takes some of it away."""

from __future__ import annotations

import os

from sandbox.doctor.probes import first_obstacle
from sandbox.plan.layers import LayerUnavailable


def require_capabilities(uid_range: tuple[int, int]) -> None:
    """For a root that may not write everywhere. Raises LayerUnavailable if it may not drop its uid either."""
    found = first_obstacle(os.environ, uid_range=uid_range)
    if found is not None and found.layer == "uid_drop":
        raise LayerUnavailable(found.layer, found.summary, " ".join(found.remedy.split())) from None

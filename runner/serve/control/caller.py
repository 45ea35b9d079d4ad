"""Who asks the control plane: the operator on the unix socket, or an org by its token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from runner.serve.control.settings import ControlSettings
from runner.serve.peer import org_of


class ControlCaller(NamedTuple):
    name: str  # as it stands in the history and in the audit
    org: str = ""  # empty: the operator, who sees all

    def sees(self, org: str) -> bool:
        """Whether what belongs to an org exists for this caller."""
        return self.org in ("", org)

    @property
    def only(self) -> str | None:
        """The org whose rows a query may return. None: of all."""
        return self.org or None

    def orgs(self, settings: ControlSettings) -> Mapping[str, Collection[str]]:
        """The orgs that this caller may bind for, with the references to their secrets."""
        return {org: settings.secret_uris(org) for org in settings.orgs if self.sees(org)}


OPERATOR = ControlCaller("operator")


def control_caller(name: str) -> ControlCaller:
    """`name`: the caller as the door knows it."""
    return ControlCaller(name, org_of(name))

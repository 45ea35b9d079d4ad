"""Find the pages that messages point to: in a checkout, or where pip has put them."""

from __future__ import annotations

import os
import sysconfig

from sandbox import CODE_ROOT

_INSTALLED = "share/doc/plugin-runner/docs"  # as in pyproject.toml


def page(name: str) -> str:
    """The path of a page of the documentation; its name in the sources if it is not installed."""
    prefixes = [sysconfig.get_path("data"), CODE_ROOT]  # CODE_ROOT: pip install --target
    if "posix_user" in sysconfig.get_scheme_names():  # pip install --user
        prefixes.append(sysconfig.get_path("data", "posix_user"))
    places = [f"{CODE_ROOT}/docs/{name}", *(f"{prefix}/{_INSTALLED}/{name}" for prefix in prefixes)]
    return next((place for place in places if os.path.exists(place)), f"docs/{name}")

"""Ask the package registry whether a version in the lock has a known vulnerability.

    scripts/audit [--registry URL]

Exit status: 0 if each has none, 1 if one has, 77 if the registry says nothing about some: that is not a pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

from scripts.releasing.lock import Pin, read_lock

REGISTRY = "https://pypi.org"
FOUND, UNKNOWN = 1, 77
_SECONDS = 30
_MOST_BYTES = 64 << 20  # a package with thousands of files has 20 MB


def vulnerabilities(pin: Pin, registry: str) -> list[str] | None:
    """What is known against this version, a line each; None if the registry does not say."""
    # Some mirrors have only the page of the newest version.
    for path in (f"{pin.name}/{pin.version}", pin.name):
        document = _ask(f"{registry.rstrip('/')}/pypi/{path}/json")
        try:
            if document is None or document["info"]["version"] != pin.version:
                continue
            known = [each for each in document["vulnerabilities"] if not each.get("withdrawn")]
            return [_line(each) for each in known]
        except (KeyError, TypeError, AttributeError):  # not the answer that PyPI documents
            continue
    return None


def _line(known: dict[str, Any]) -> str:
    names = ", ".join(str(name) for name in (known["id"], *known.get("aliases", ())))
    fixed = ", ".join(str(version) for version in known.get("fixed_in", ())) or "no version"
    return f"{names}: mended in {fixed}. {known.get('summary') or ''}".rstrip()


def _ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            return json.loads(answer.read(_MOST_BYTES))
    except (OSError, ValueError):  # urllib's errors are OSErrors
        return None


def audit(pins: Sequence[Pin], registry: str = REGISTRY) -> int:
    """Print what is known. Returns the exit status."""
    answers = {pin: vulnerabilities(pin, registry) for pin in pins}
    for pin, lines in answers.items():
        for line in lines or ():
            print(f"{pin.name} {pin.version}: {line}")
    silent = [pin.name for pin, lines in answers.items() if lines is None]
    found = sum(bool(lines) for lines in answers.values())
    print(f"audit: {len(pins)} packages, {found} with known vulnerabilities, {len(silent)} not checked")
    if silent:
        print(f"audit: NOT CHECKED, {registry} says nothing about: {', '.join(silent)}")
    return FOUND if found else UNKNOWN if silent or not pins else 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/audit", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--registry", default=REGISTRY, metavar="URL", help="default: %(default)s")
    return audit(read_lock(), parser.parse_args(argv).registry)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

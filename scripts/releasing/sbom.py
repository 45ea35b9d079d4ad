"""A software bill of materials in CycloneDX 1.5, from the lock and the metadata of what is installed."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import runner
from scripts.releasing.lock import LOCK, Pin

# setuptools builds the wheel, and is not installed with it.
BUILD_ONLY = frozenset({"setuptools"})


def sbom(pins: Iterable[Pin], epoch: int, places: Iterable[Path] | None = None) -> dict[str, Any]:
    """Returns the document. Licences and dependencies are those of the packages in `places` (folders
    site-packages; without them, those of this environment), if their version is the pinned one."""
    listed = [pin for pin in pins if pin.name not in BUILD_ONLY]
    search = sys.path if places is None else [str(place) for place in places]
    found = {(_canonical(each.name), each.version): each for each in distributions(path=search)}
    held = {pin.name: found.get((pin.name, pin.version)) for pin in listed}
    own = f"pkg:pypi/plugin-runner@{runner.__version__}"
    refs = {pin.name: f"pkg:pypi/{pin.name}@{pin.version}" for pin in listed}
    graph = [{"ref": refs[name], "dependsOn": _needs(each, refs)} for name, each in held.items()]
    graph.insert(0, {"ref": own, "dependsOn": sorted(refs.values())})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # The same for the same content: the file is reproducible.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + ' '.join(refs.values()))}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "plugin-runner",
                "version": runner.__version__,
                "licenses": [{"expression": "Apache-2.0"}],
                "purl": own,
            },
        },
        "components": [_component(pin, refs[pin.name], held[pin.name]) for pin in listed],
        "dependencies": graph,
    }


def _component(pin: Pin, ref: str, found: Distribution | None) -> dict[str, Any]:
    files = [{"alg": "SHA-256", "content": content} for content in pin.hashes]
    place = {
        "type": "distribution",
        "url": f"https://pypi.org/project/{pin.name}/{pin.version}/",
        "comment": f"the files of this version, each with its hash in {LOCK.name}",
        "hashes": files,
    }
    known = {"type": "library", "bom-ref": ref, "name": pin.name, "version": pin.version, "purl": ref}
    licences = [] if found is None else _licences(found.metadata.json)
    return {**known, **({"licenses": licences} if licences else {}), "externalReferences": [place]}


def _licences(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the package says of its licence: an expression, a short text, or classifiers."""
    if expression := metadata.get("license_expression"):
        return [{"expression": expression}]
    text = str(metadata.get("license", "")).strip()
    names = [text] if text and len(text) < 100 and "\n" not in text else []
    classifiers = [each for each in metadata.get("classifier", ()) if each.startswith("License ::")]
    names = names or [each.rpartition(" :: ")[2] for each in classifiers]
    return [{"license": {"name": name}} for name in names]


def _needs(found: Distribution | None, refs: Mapping[str, str]) -> list[str]:
    """The listed packages that this one always needs: no others of its extras or for other systems."""
    wanted = (found.requires or ()) if found is not None else ()
    always = (each for each in wanted if not re.search(r"\bextra\b", each.partition(";")[2]))
    names = {_canonical(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in always}
    return sorted(refs[name] for name in names & refs.keys())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

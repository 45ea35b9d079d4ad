"""Images under a policy that requires signatures: which count, and when one may start by itself.

A signature of an image says what is in it: its files, its entry point, its command, its variables. It says
nothing about the words of an entry such as `docker run -v … IMAGE ARGS`, which nobody signed.
"""

from __future__ import annotations

import os
import time

from runner.install.image_reference import image_request
from runner.install.images import find_image, image_digest
from runner.install.store import Store
from runner.launch.stages import Decided
from runner.package.fault import PackageFault
from runner.package.image_signature import judge_image
from runner.package.keys import load_trusted
from runner.package.signature import VerifiedPackage
from sandbox.policy.policy import admits_image, matches, steers
from sandbox.spec import ImageRoot
from sandbox.speed.typed import Iterator, Mapping

RULE = "signature"
# Words of `docker run` that change what a publisher made, by the fields that they set.
_WORDS = {
    "entrypoint": "--entrypoint",
    "args": "the arguments behind the image",
    "user": "--user",
    "directory": "--workdir",
    "places": "a volume",
    "folders": "--tmpfs",
}


def check_image(decided: Decided, image: ImageRoot) -> VerifiedPackage | None:
    """The signature by which an image counts; None: the policy itself names it by its digest. Raises
    PackageFault, and DocumentError for the trust file."""
    trust, reference = decided.policy.packages.trust, image.reference
    # A person's approvals, --image among them, follow what the policy allows itself.
    own = decided.policy.images[: len(decided.policy.images) - len(decided.approval.images)]
    named = f'the operator can add "{reference}" to allow under [images] in the policy'
    if not admits_image(own, reference):
        message = f"it would start in the image {reference}, which the policy itself does not allow"
        raise PackageFault(RULE, message, named)
    # Also of what is around its files: who may rename there can put another folder of root's in their place.
    owners = {os.lstat(place).st_uid for place in (image.tree, *_folders_above(image.tree))}
    if strangers := owners - {0, os.stat(trust).st_uid}:
        message = f"the image {reference} is stored for uid {min(strangers)}, who may not say what is trusted"
        hint = f"let root, or the owner of {trust}, install it and start it"
        raise PackageFault(RULE, message, hint)
    # What is only named does not start by itself: the operator meant the root of a signed plugin.
    if "@" in reference and reference in own and decided.loaded.plugin.root is not None:
        return None
    if "@" not in reference:
        named = f"name the image by its digest, {reference.rpartition(':')[0]}@sha256:…"
        named = f"{named}, here and in allow under [images] of the policy"
    try:
        return _judge(image, trust)
    except PackageFault as fault:
        message = f"it would start in the image {reference}: {fault}"
        raise PackageFault(fault.rule, message, f"{fault.hint}; or {named}") from None


def _folders_above(tree: str) -> tuple[str, str, str]:
    """The folder of its set, that of all sets, and the store."""
    folder = os.path.dirname(tree)
    sets = os.path.dirname(folder)
    return folder, sets, os.path.dirname(sets)


def _judge(image: ImageRoot, trust: str) -> VerifiedPackage:
    """Raises PackageFault and DocumentError."""
    trusted = load_trusted(trust)
    store = Store(_folders_above(image.tree)[-1])
    found = store.find(image_request(image.reference))
    if found is None or store.tree(found.set_name) != image.tree:
        raise PackageFault(RULE, "it was installed anew while it was checked", "try again")
    digest = image_digest(store, found)
    return judge_image(found.signatures, found.request.name, digest, trusted, trust, time.time())


def require_alone(decided: Decided, image: ImageRoot, environ: Mapping[str, str]) -> None:
    """Raise PackageFault unless a launch starts an image as its publisher made it, and shows it nothing of
    the host but what the policy itself shows every plugin, and its state."""
    alone = find_image(
        ImageRoot(image.reference, image.where, starts_own=True, read_only=image.read_only), environ
    )
    asked = [] if alone is None else _changes(image, alone[0])
    if alone is None or asked or (asked := [*_additions(decided)]):
        told = f", and nobody signed {', '.join(asked)}" if asked else ""
        message = f"its program is in the image {image.reference}, and it has no folder to sign{told}"
        hint = "a signed image starts only as it is: take that out, or choose another policy for it"
        raise PackageFault(RULE, message, hint)


def _changes(image: ImageRoot, alone: ImageRoot) -> list[str]:
    return [
        _WORDS.get(name, name)
        for name, value, usual in zip(ImageRoot._fields, image, alone, strict=True)
        if value != usual
    ]


def _additions(decided: Decided) -> Iterator[str]:
    """What it would get that could be code, and that only the entry or a person names."""
    policy, plugin, said = decided.policy, decided.loaded.plugin, decided.loaded.invocation.overrides
    yield from (f"the folder {each.path}" for each in decided.grant.paths if each.origin not in _OWN_ORIGINS)
    if plugin.project is not None and policy.project != "none":
        yield f"the folder {plugin.project.path}"
    ceiling = policy.env.ceiling[: len(policy.env.ceiling) - len(decided.approval.env)]
    given = {*dict(policy.env.set), *policy.env.passed, *dict(said.env), *said.pass_env}
    for name, _ in decided.grant.env:
        if name not in given and (steers(name) or not matches(ceiling, name)):
            yield f"the variable {name}"


_OWN_ORIGINS = ("policy", "state")

"""The signature of an image. A registry has it beside the image, and the store in the record of the request.

    {"schema": 1, "image": "docker.io/acme/tools", "algorithm": "ed25519", "key_id": …,
     "digest": "sha256:…", "signed_at": "2026-11-16T03:00:00Z", "signature": …}

`image` is the repository, without a tag. `digest` is that of the manifest of one image, for one platform: it
is what a launch knows of an image that was installed. An index is not signed; each image in it is.

What is signed: the bytes of _CONTEXT, followed by the canonical JSON of all keys but `signature`. What is
signed of a package (signature.py) is canonical JSON alone, which begins with "{". So no signature of the one
is ever valid for the other. Each reader also refuses the document of the other, whose keys are not its own.
The repository is signed, so that a registry cannot give one image for another of the same publisher. Tags are
not: which image a tag means, the registry says when the image is installed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from runner.package.fault import PackageFault
from runner.package.keys import ALGORITHM, SigningKey, TrustedKey
from runner.package.signature import (
    SCHEMA,
    VerifiedPackage,
    canonical_json,
    future_warning,
    read_fields,
    require_made_with,
    trusted_key,
    utc_text,
)
from sandbox.document.diagnostic import quoted

_CONTEXT = b"plugin-runner image signature 1\n"
_AGAIN = "sign the image again: runner package sign docker://IMAGE --key FILE"
_MOST_BYTES = 4 << 10  # one has about 400; the store has up to 64 in one record


class ImageSignature(NamedTuple):
    """The document, with its fields in the order in which they are written."""

    schema: int
    image: str
    algorithm: str
    key_id: str
    digest: str
    signed_at: str  # RFC 3339, UTC
    signature: str = ""  # base64; empty: not signed yet

    @property
    def message(self) -> bytes:
        """What is signed."""
        signed = {name: value for name, value in self._asdict().items() if name != "signature"}
        return _CONTEXT + canonical_json(signed)

    @property
    def text(self) -> str:
        return json.dumps(self._asdict(), indent=2, ensure_ascii=False) + "\n"


def sign_image(image: str, digest: str, key: SigningKey, now: float) -> ImageSignature:
    """`now`: seconds since 1970."""
    unsigned = ImageSignature(SCHEMA, image, ALGORITHM, key.key_id, digest, utc_text(now))
    return unsigned._replace(signature=base64.b64encode(key.sign(unsigned.message)).decode())


def parse_image_signature(raw: bytes) -> ImageSignature:
    """Raises PackageFault for what is not exactly such a document."""
    if len(raw) > _MOST_BYTES:
        message = f"the signature of the image cannot be used: it has more than {_MOST_BYTES} bytes"
        raise PackageFault("signature_malformed", message, _AGAIN)
    fields = read_fields(raw, ImageSignature._fields, "the signature of the image", _AGAIN)
    return ImageSignature(SCHEMA, **fields)


def choose_own(documents: Iterable[bytes], image: str, digest: str) -> tuple[str, ...]:
    """Those that say that they are for this image. Whether they are valid is still to be judged."""
    kept: dict[str, None] = {}
    for raw in documents:
        try:
            claim = parse_image_signature(raw)
        except PackageFault:
            continue  # whoever may write to the registry can put anything beside an image
        if (claim.image, claim.digest) == (image, digest):
            kept[raw.decode()] = None
    return tuple(kept)


def verify_image(
    raw: bytes, image: str, digest: str, trusted: Mapping[str, TrustedKey], trust_file: str, now: float
) -> VerifiedPackage:
    """Raises PackageFault at the first check that fails, in this order: the document, its key, whose image it
    is, the signature itself."""
    claim = parse_image_signature(raw)
    key = trusted_key(claim.key_id, trusted, trust_file, "the image")
    if claim.image != image:
        message = f"the signature is for {quoted(claim.image)}, and the image is {quoted(image)}"
        raise PackageFault("signature_identity", message, _AGAIN)
    if claim.digest != digest:
        message = (
            f"the image is not the one that was signed: it is {digest}, and the signature has {claim.digest}"
        )
        raise PackageFault("signature_digest", message, _AGAIN)
    require_made_with(key, claim.signature, claim.message, trust_file, "the image", _AGAIN)
    warning = future_warning(claim.signed_at, now, "the image")
    return VerifiedPackage(
        image, "", key.key_id, digest, claim.signed_at, comment=key.comment, warning=warning
    )


def judge_image(
    documents: Iterable[str],
    image: str,
    digest: str,
    trusted: Mapping[str, TrustedKey],
    trust_file: str,
    now: float,
) -> VerifiedPackage:
    """The newest valid signature of a trusted key. Raises PackageFault if there is none."""
    found: list[VerifiedPackage] = []
    faults: list[PackageFault] = []
    for each in documents:
        try:
            found.append(verify_image(each.encode(errors="replace"), image, digest, trusted, trust_file, now))
        except PackageFault as fault:
            faults.append(fault)
    if found:
        # Who replaces a key signs again, and the old key may be trusted a while longer.
        return max(found, key=lambda each: each.signed_at)
    if faults:
        raise faults[0]
    message = f"there is no signature of {image}@{digest}, and one of a trusted key is required"
    hint = f"ask its publisher to sign it; an image that is installed: runner install --update {image}"
    raise PackageFault("signature_missing", message, hint)

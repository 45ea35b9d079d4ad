"""`runner package sign` and `inspect` with docker://IMAGE: signatures of images in registries."""

from __future__ import annotations

import argparse
import time
from typing import Any

from runner.cli.shared.registry import access_of, signature_text
from runner.install.image_reference import image_request
from runner.install.request import Request, UnusableSpec
from runner.oci.stored import SignatureState, read_trust
from runner.package.fault import PackageFault
from runner.package.image_signature import judge_image, parse_image_signature
from runner.package.keys import load_key


def sign_image(args: argparse.Namespace, document: dict[str, Any]) -> list[str]:
    """Sign what the reference means now. Returns lines for people. Raises PackageFault."""
    access, request, key = access_of(args), _request(args.folder), load_key(args.key, args.key_id)
    from runner.oci.client import wait_for
    from runner.oci.sign_image import sign_images

    done = wait_for(lambda: sign_images(request, key, access=access))
    document["signatures"] = [signature._asdict() for _, signature in done]
    lines = [f"{args.folder}: signed: {request.name}"]
    for image, signature in done:
        lines.append(f"  image      {signature.digest} {image.platform}")
        lines.append(f"  signature  {signature.key_id}, {signature.signed_at}")
    return lines


def inspect_image(args: argparse.Namespace, document: dict[str, Any]) -> list[str]:
    """Returns what the reference means now, and who signed it. Raises PackageFault."""
    access, request, trusted = access_of(args), _request(args.folder), read_trust(args.trust)
    from runner.oci.client import wait_for
    from runner.oci.sign_image import inspect_images

    lines, shown = [f"{args.folder}: {request}"], []
    for image in wait_for(lambda: inspect_images(request, access=access)):
        digest, signatures = image.manifest.digest, []
        for text in image.signatures:
            claim, state = parse_image_signature(text.encode()), SignatureState("unchecked")
            told = "not checked: add --trust FILE"
            if trusted is not None:
                try:
                    keys = trusted.keys
                    signed = judge_image((text,), request.name, digest, keys, trusted.path, time.time())
                    state = SignatureState("trusted", signed=signed)
                except PackageFault as fault:
                    state = SignatureState("untrusted", str(fault))
                told = signature_text(state, trusted.path)
            signatures.append({"key_id": claim.key_id, "signed_at": claim.signed_at, "state": told})
        shown.append({"digest": digest, "platform": image.platform, "signatures": signatures})
        lines.append(f"  image      {digest} {image.platform}")
        lines += [
            f"  signature  {each['key_id']}, {each['signed_at']}: {each['state']}" for each in signatures
        ]
        lines += [] if signatures else ["  signature  none"]
    document |= {"reference": str(request), "images": shown}
    return lines


def _request(word: str) -> Request:
    try:
        return image_request(word)
    except UnusableSpec as fault:
        raise PackageFault("reference", f"it {fault}") from None

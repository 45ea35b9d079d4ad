"""Credentials: what docker login and podman login have stored for a registry.

Looked at in this order, the first that has something for the registry counts:

    $REGISTRY_AUTH_FILE, $XDG_RUNTIME_DIR/containers/auth.json, ~/.config/containers/auth.json   podman's
    $DOCKER_CONFIG/config.json, ~/.docker/config.json                                            docker's

A file has them itself ("auths"), or names a program that has them ("credHelpers" for one registry,
"credsStore" for all). The program is docker-credential-NAME on PATH. No message repeats anything of these
files' values.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runner.oci.reference import Reference
from runner.package.fault import PackageFault
from sandbox.document.diagnostic import DocumentError, printable
from sandbox.document.read import parse, read_bounded

_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HELPER_SECONDS = 60.0  # it may ask the person for the password of a key ring
_MOST_HELPER_BYTES = 64 << 10
_IDENTITY_TOKEN = "<token>"  # in place of the user name: the secret is one to get tokens with
_NOT_FOUND = "credentials not found"  # what helpers print for a registry that they do not know
DOCKER_HUB = "docker.io"
_HUB_NAMES = ("https://index.docker.io/v1/", "index.docker.io", DOCKER_HUB)


class Credentials(NamedTuple):
    user: str = ""
    password: str = ""
    identity_token: str = ""  # in place of both

    def __repr__(self) -> str:
        return "Credentials(…)"  # a traceback must not show them

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_credentials(reference: Reference, environ: Mapping[str, str]) -> Credentials | None:
    """None if nobody has logged in there. Raises PackageFault for a file or a helper that cannot be used."""
    for path in _files(environ):
        try:
            document = parse(path, read_bounded(path), "json").data
        except DocumentError as error:
            if error.diagnostics[0].rule == "file_missing":
                continue
            # Not its text: the message of a parser may repeat a part of the file.
            message = f"{printable(path)}, which has credentials for registries, cannot be read as JSON"
            raise PackageFault("credentials", message, "mend it, or log in anew") from None
        if (found := _in_document(document, reference, environ)) is not None:
            return found
    return None


def _files(environ: Mapping[str, str]) -> Iterator[str]:
    home = environ.get("HOME") or os.path.expanduser("~")
    if chosen := environ.get("REGISTRY_AUTH_FILE"):
        yield chosen
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield os.path.join(runtime, "containers/auth.json")
    yield os.path.join(
        environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "containers/auth.json"
    )
    yield os.path.join(environ.get("DOCKER_CONFIG") or os.path.join(home, ".docker"), "config.json")


def _in_document(
    document: Mapping[str, Any], reference: Reference, environ: Mapping[str, str]
) -> Credentials | None:
    names = _names(reference)
    helpers, auths = document.get("credHelpers"), document.get("auths")
    for name in names:
        helper = helpers.get(name) if isinstance(helpers, dict) else None
        if isinstance(helper, str) and (found := _ask_helper(helper, name, environ)) is not None:
            return found
    store = document.get("credsStore")
    if isinstance(store, str) and store:
        for name in names[-len(_HUB_NAMES) :] if reference.registry == DOCKER_HUB else names[-1:]:
            if (found := _ask_helper(store, name, environ)) is not None:
                return found
    for name in names:
        if isinstance(auths, dict) and isinstance(entry := auths.get(name), dict):
            return _of_entry(entry, name)
    return None


def _names(reference: Reference) -> tuple[str, ...]:
    """The keys that fit, the narrowest first: podman stores some for a part of a registry only."""
    parts = reference.repository.split("/")
    paths = ["/".join((reference.registry, *parts[:count])) for count in range(len(parts), 0, -1)]
    hosts = (
        _HUB_NAMES
        if reference.registry == DOCKER_HUB
        else (f"https://{reference.registry}", reference.registry)
    )
    return (*paths, *hosts)


def _of_entry(entry: Mapping[str, Any], name: str) -> Credentials | None:
    token = entry.get("identitytoken")
    if isinstance(token, str) and token:
        return Credentials(identity_token=token)
    user, password = entry.get("username"), entry.get("password")
    auth = entry.get("auth")
    if isinstance(auth, str) and auth:
        try:
            user, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise PackageFault(
                "credentials", f"the stored credentials for {name} cannot be read", f"log in anew to {name}"
            ) from None
    if isinstance(user, str) and isinstance(password, str) and user:
        return Credentials(user, password.rstrip("\0"))
    return None


def _ask_helper(helper: str, name: str, environ: Mapping[str, str]) -> Credentials | None:
    """None: it has nothing for the registry. Raises PackageFault."""
    program = f"docker-credential-{helper}"
    path = shutil.which(program, path=environ.get("PATH")) if _HELPER_NAME.fullmatch(helper) else None
    hint = f"install it, or log in anew to {name}"
    if path is None:
        message = f"the program {printable(program)}, which has the credentials for {name}, is not on PATH"
        raise PackageFault("credentials", message, hint)
    try:
        done = subprocess.run(
            [path, "get"],
            input=name.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            timeout=_HELPER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        raise PackageFault("credentials", f"{program} gave no answer about {name}", hint) from None
    if done.returncode:
        if _NOT_FOUND.encode() in done.stdout[:1024].lower():
            return None
        message = f"{program} failed for {name} with exit status {done.returncode}"
        raise PackageFault("credentials", message, hint)
    try:
        answer = json.loads(done.stdout[:_MOST_HELPER_BYTES])
        user, secret = answer["Username"], answer["Secret"]
        if not isinstance(user, str) or not isinstance(secret, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PackageFault("credentials", f"{program} gave an answer that is none", hint) from None
    return Credentials(identity_token=secret) if user == _IDENTITY_TOKEN else Credentials(user, secret)

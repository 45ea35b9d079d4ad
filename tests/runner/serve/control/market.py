"""A daemon with a control plane, two orgs, an author who signs packages, and the words to ask it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from runner.package.keys import load_key, make_key
from runner.package.listing import list_package
from runner.package.signature import sign, write_signature
from tests.conftest import ROOT
from tests.runner.serve.house import House, house

BINDING = {
    "package_id": "acme/devkit",
    "package_version": "0.1.0",
    "export_id": "search",
    "scope": {"org_id": "alpha"},
    "secrets": {"api_key": "secret://alpha/key"},
    "status": "active",
    "rollout": {"traffic_percent": 100},
}
TOKENS = {"alpha": "a" * 40, "beta": "b" * 40}


class Answered(NamedTuple):
    status: int
    document: Any
    headers: Mapping[str, str]

    @property
    def code(self) -> str:
        found: str = self.document["error"]["code"]
        return found

    @property
    def etag(self) -> dict[str, str]:
        return {"If-Match": self.headers["etag"]}


class Market:
    """What lies in the folder of a test: packages, keys, settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        for key in ("one", "two"):
            make_key(str(folder / key), key)
        for org, token in TOKENS.items():
            self.write(f"{org}.token", token)
            self.write(f"{org}.key", f"the secret of {org}")
        self.trust("one")
        self.settings()

    def write(self, name: str, text: str) -> Path:
        """Replace a file at once: the daemon watches some of them, and would read half of one."""
        path, new = self.folder / name, self.folder / f".{name}.new"
        new.write_text(text)
        new.chmod(0o600)
        return new.replace(path)

    def trust(self, *keys: str) -> None:
        self.write("trusted", "".join((self.folder / f"{key}.pub").read_text() for key in keys))

    def settings(self, more: str = "", orgs: str = "") -> Path:
        tables = "".join(
            f'[orgs.{org}]\ntokens = ["@{org}.token"]\nsecrets = {{key = "@{org}.key"}}\n' for org in TOKENS
        )
        return self.write("control.toml", f'trust = "trusted"\nstore = "store"\n{more}\n{orgs or tables}')

    def package(self, version: str = "0.1.0", key: str | None = "one", name: str = "devkit") -> Path:
        """The folder of a package, signed with a key of the folder; None: not at all."""
        root = self.folder / f"{name}-{version}-{key}"
        if not root.exists():
            shutil.copytree(ROOT / "tests/plugins/vai_devkit", root)
        manifest = root / "vai-plugin.toml"
        text = manifest.read_text().replace("0.1.0", version).replace("acme/devkit", f"acme/{name}")
        manifest.write_text(text)
        if key is not None:
            signed = sign(
                list_package(str(root)),
                f"acme/{name}",
                version,
                load_key(str(self.folder / key)),
                time.time(),
            )
            write_signature(str(root), signed)
        return root


class ControlHouse:
    """The daemon, for one caller: the operator on the socket, or an org."""

    def __init__(self, door: House, market: Market) -> None:
        self.door, self.market = door, market

    async def __call__(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        org: str = "",
        tcp: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        body = (
            b""
            if document is None
            else document
            if isinstance(document, bytes)
            else json.dumps(document).encode()
        )
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if org:
            lines.append(f"Authorization: Bearer {TOKENS.get(org, org)}")
        raw = await self.door.ask("\r\n".join([*lines, "", ""]).encode() + body, tcp=tcp)
        head, _, rest = raw.partition(b"\r\n\r\n")
        first, *given = head.decode().split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in given)}
        return Answered(int(first.split(" ")[1]), json.loads(rest) if rest else None, found)

    async def import_(self, root: Path, **more: Any) -> Answered:
        return await self("POST", "/v1/plugin-packages", {"source": str(root), **more})

    async def bind(self, org: str = "", **changes: Any) -> Answered:
        return await self("POST", "/v1/plugin-bindings", {**BINDING, **changes}, org=org)


@asynccontextmanager
async def open_market(folder: Path, said: list[str] | None = None) -> AsyncIterator[ControlHouse]:
    market = Market(folder)
    async with house(folder, said=said, control=str(folder / "control.toml")) as door:
        yield ControlHouse(door, market)

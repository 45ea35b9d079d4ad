"""Packages for the registry of the test internet: npm archives and wheels, made here."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ADDRESS = "http://registry.example.com"

# An MCP server without a library: one tool, which says who answers.
NODE_SERVER = """\
#!/usr/bin/env node
const fs = require("fs"), cache = require("os").homedir() + "/.cache";
const kept = () => {  // what it kept in its cache the last time
  const before = fs.existsSync(cache + "/x") ? " again" : "";
  fs.mkdirSync(cache, { recursive: true });
  fs.writeFileSync(cache + "/x", "");
  return before;
};
const rl = require("readline").createInterface({ input: process.stdin });
const send = (id, result) => console.log(JSON.stringify({ jsonrpc: "2.0", id, result }));
rl.on("line", (line) => {
  const { id, method, params } = JSON.parse(line);
  if (method === "initialize")
    send(id, { protocolVersion: params.protocolVersion, capabilities: { tools: {} },
               serverInfo: { name: "demo", version: VERSION } });
  else if (method === "tools/list")
    send(id, { tools: [{ name: "who", inputSchema: { type: "object" } }] });
  else if (method === "tools/call")
    send(id, { content: [{ type: "text", text: VERSION + " " + process.argv.slice(2).join(",") + kept() }] });
});
"""
PYTHON_SERVER = """\
import json, sys

def main():
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["method"] == "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                      "serverInfo": {"name": "demo", "version": "1"}}
        elif asked["method"] == "tools/list":
            result = {"tools": [{"name": "who", "inputSchema": {"type": "object"}}]}
        elif asked["method"] == "tools/call":
            result = {"content": [{"type": "text", "text": "wheel " + ",".join(sys.argv[1:])}]}
        else:
            continue
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def publish_npm(
    registry: Path,
    name: str,
    versions: Mapping[str, Mapping[str, str | bytes]],
    about: Mapping[str, Any] | None = None,
    *,
    entries: Sequence[tarfile.TarInfo] = (),
    integrity: str = "",
) -> None:
    """`versions`: the files of each. `about`: more of package.json. `entries`: put into the archives too."""
    known: dict[str, Any] = {}
    for version, files in versions.items():
        package = {"name": name, "version": version, "bin": "index.js", **(about or {})}
        data = _tgz({"package.json": json.dumps(package), **files}, entries)
        file = f"{name.rpartition('/')[2]}-{version}.tgz"
        (registry / f"{name.replace('/', '__')}__-__{file}").write_bytes(data)
        digest = integrity or "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        known[version] = {**package, "dist": {"tarball": f"{ADDRESS}/{name}/-/{file}", "integrity": digest}}
    newest = list(versions)[-1]
    document = {"name": name, "dist-tags": {"latest": newest}, "versions": known}
    (registry / name.replace("/", "__")).write_text(json.dumps(document))


def node_server(version: str) -> dict[str, str | bytes]:
    return {"index.js": NODE_SERVER.replace("VERSION", json.dumps(version))}


def _tgz(files: Mapping[str, str | bytes], entries: Sequence[tarfile.TarInfo]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for path, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            about = tarfile.TarInfo(f"package/{path}")
            about.size, about.mode = len(data), 0o755
            archive.addfile(about, io.BytesIO(data))
        for each in entries:
            archive.addfile(each)
    return made.getvalue()


def link(name: str, to: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(f"package/{name}")
    made.type, made.linkname = tarfile.SYMTYPE, to
    return made


def publish_wheel(
    registry: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    script: str,
    *,
    digest: str = "",
    metadata: str = "",
) -> None:
    """`metadata`: more lines of METADATA."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{script}\n",
    }
    record = "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in {**content, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    _publish_file(registry, name, file, made.getvalue(), digest)


def publish_sdist(registry: Path, name: str, version: str, setup: str) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        about = tarfile.TarInfo(f"{name}-{version}/setup.py")
        about.size = len(setup)
        archive.addfile(about, io.BytesIO(setup.encode()))
    _publish_file(registry, name, f"{name}-{version}.tar.gz", made.getvalue(), "")


def _publish_file(registry: Path, name: str, file: str, data: bytes, digest: str) -> None:
    (registry / f"files__{file}").write_bytes(data)
    digest = digest or hashlib.sha256(data).hexdigest()
    link = f'<!DOCTYPE html><body><a href="{ADDRESS}/files/{file}#sha256={digest}">{file}</a>'
    (registry / f"simple__{name}").write_text(link)

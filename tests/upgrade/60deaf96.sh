#!/bin/bash
# What a person did, and root a part of it.
set -euo pipefail
cd
PATH=/srv/before/runner/.venv/bin:$PATH
mkdir -p documents plugins .cursor
echo "a document" >documents/note.txt
# A plugin with state. Its tool counts its own calls.
runner new nexo plugins/counter >/dev/null
sed -i 's|^# fs_write_paths = .*|fs_write_paths = ["${state_dir}"]|' plugins/counter/plugin.toml
sed -i 's|    return {"words".*|    import os\n    with open(os.environ["RUNNER_STATE_DIR"] + "/calls", "a+") as file:\n        file.write("x")\n        file.seek(0)\n        return {"calls": len(file.read())}|' plugins/counter/plugin.py
runner call plugins/counter counter_count --input '{"text": ""}'
[ "$(id -u)" != 0 ] || exit 0
# An approval.
runner new nexo plugins/reader >/dev/null
sed -i 's|^# fs_read_paths = .*|fs_read_paths = ["/srv/before/home/documents"]|' plugins/reader/plugin.toml
runner allow plugins/reader --yes
# A stored plan. Files that are newer than some seconds are not stored.
sleep 5
runner plan plugins/reader | tail -n 1
# A host's configuration with the formatting of a person, wrapped, and with an approval.
printf '{\r\n\r\n  "mcpServers": {\r\n\t"plain": { "command": "/usr/bin/cat" },\r\n' >.cursor/mcp.json
printf '    "full": {"args": ["-u"], "env": {"TOKEN": "${env:TOKEN}"}, "command" : "cat" } }\r\n}' >>.cursor/mcp.json
cp .cursor/mcp.json mcp.json.before
runner wrap .cursor/mcp.json --yes
cp .cursor/mcp.json mcp.json.wrapped
runner allow .cursor/mcp.json --server plain --read /srv/before/home/documents --yes
# A signed package.
runner new nexo plugins/signed >/dev/null
runner keygen key >/dev/null
runner package sign plugins/signed --key key
rm key

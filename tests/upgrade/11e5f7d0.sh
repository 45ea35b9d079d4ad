#!/bin/bash
# What a person did with a version that has the daemon, its control plane and the gateway, and root a part of it.
. /srv/before/60deaf96.sh

# An approval with all that options can add, and plans of `exec` and `run`. The plan above is that of a manifest.
runner new nexo plugins/wide >/dev/null
mkdir out
runner allow plugins/wide --read "$PWD/documents" --write "$PWD/out" --net api.example.com:443 --env GREETING --yes
sleep 5
runner exec plugins/reader </dev/null
runner run --name echo -- /usr/bin/cat </dev/null

# A host whose servers are behind one gateway. A client has seen their tools.
runner new mcp plugins/talker >/dev/null
mkdir -p .config/Claude
cat >.config/Claude/claude_desktop_config.json <<'JSON'
{
	"mcpServers" : { "talker": {"command": "/srv/before/home/plugins/talker/server.py",  "args": [] } },
    "theme": "dark"  }
JSON
cp .config/Claude/claude_desktop_config.json claude.before
runner allow .config/Claude/claude_desktop_config.json --server talker --read "$PWD/plugins/talker" --yes
runner wrap --gateway .config/Claude/claude_desktop_config.json --yes
cp .config/Claude/claude_desktop_config.json claude.wrapped
cat >ask <<'PYTHON'
"""Ask the gateway of a host's configuration for its tools, and call one."""
import json, subprocess, sys
entry = json.load(open(".config/Claude/claude_desktop_config.json"))["mcpServers"]["runner-gateway"]
with subprocess.Popen([entry["command"], *entry["args"]], stdin=-1, stdout=-1, text=True) as gateway:
    def ask(id, method, **params):
        print(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}), file=gateway.stdin, flush=True)
        while (answer := json.loads(gateway.stdout.readline())).get("id") != id:
            pass
        return answer["result"]
    ask(1, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={"name": "host", "version": "1"})
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}), file=gateway.stdin, flush=True)
    while not (tools := ask(2, "tools/list")["tools"]):
        pass
    print(sorted(each["name"] for each in tools))
    print(ask(3, "tools/call", name="talker__greet", arguments={"name": "you"})["content"][0]["text"])
    gateway.stdin.close()
PYTHON
python3 ask

# A server of uvx in the store, from an index that is a folder.
mkdir -p index/demo .config/pip
cat >wheel.py <<'PYTHON'
import pathlib, sys, zipfile
wheel, server = sys.argv[1:]
files = {
    "demo.py": "def main():\n    " + pathlib.Path(server).read_text().replace("\n", "\n    "),
    "demo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
    "demo-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "demo-1.0.dist-info/entry_points.txt": "[console_scripts]\ndemo = demo:main\n",
}
files["demo-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in [*files, "demo-1.0.dist-info/RECORD"])
with zipfile.ZipFile(wheel, "w") as archive:
    for name, text in files.items():
        archive.writestr(name, text)
PYTHON
wheel=demo-1.0-py3-none-any.whl
python3 wheel.py "index/demo/$wheel" plugins/talker/server.py
rm wheel.py
echo "<!DOCTYPE html><body><a href=\"$wheel#sha256=$(sha256sum "index/demo/$wheel" | cut -d' ' -f1)\">$wheel</a>" >index/demo/index.html
printf '[global]\nindex-url = file://%s/index\nextra-index-url =\nfind-links =\n' "$PWD" >.config/pip/pip.conf
echo '{"mcpServers": {"demo": {"command": "uvx", "args": ["demo"]}}}' >uvx.json
runner install uvx.json --yes

# A daemon with four plugins, which is a control plane too.
mkdir served daemon
for name in notes sleeper broken; do runner new nexo "served/$name" >/dev/null; done
sed -i 's|^# fs_write_paths = .*|fs_write_paths = ["${state_dir}"]|' served/sleeper/plugin.toml
sed -i 's|    return {"words".*|    import os, time\n    open(os.environ["RUNNER_STATE_DIR"] + "/asked", "w").close()\n    time.sleep(1000)|' served/sleeper/plugin.py
printf '#!/bin/sh\nexit 1\n' >served/broken/plugin.py
make_kit() { # FOLDER: a package with a tool and a hook. The hook fails for good if the event says so.
    runner new vai "$1" >/dev/null
    sed -i 's/^# secret_slots/secret_slots/' "$1/vai-plugin.toml"
    printf '\n[[exports]]\nid = "notice"\nkind = "hook"\n[exports.hook]\nsubscribes_to = ["run.completed"]\n' >>"$1/vai-plugin.toml"
    cat >notice <<'PYTHON'
def notice(body):
    if "doomed" in json.dumps(body):
        raise Failed("tool.invalid_input", "it says so")
    return {}


EXPORTS = {"greet": greet, "notice": notice}
PYTHON
    sed -i -e '/^EXPORTS = /{r notice' -e 'd}' "$1/bin/plugin"
    rm notice
}
make_kit served/kit
make_kit daemon/kit
runner keygen daemon/key --key-id example >/dev/null
runner package sign daemon/kit --key daemon/key
rm daemon/key
python3 -c 'print("t" * 40)' >daemon/north.token
echo "the secret of north" >daemon/north.secret
cat >daemon/settings.toml <<'TOML'
[notes]
env = {GREETING = "Hello"}
[broken]
numbers = {failures = 1, eager = false, retry_first = false}
TOML
cat >daemon/control.toml <<'TOML'
trust = "key.pub"
[orgs.north]
tokens = ["@north.token"]
secrets = {api = "@north.secret"}
TOML
chmod 600 daemon/*.*
socket=$PWD/daemon/serve.sock
at="--socket $socket"
runner serve --config served --settings daemon/settings.toml --control daemon/control.toml $at &
daemon=$!
trap 'kill $daemon' EXIT
until runner ps $at >/dev/null 2>&1; do sleep 0.1; done
call() { runner call --via "$socket" "$@"; }
post() { curl -sS --fail --unix-socket "$socket" -H 'Content-Type: application/json' "http://localhost$1" -d "$2" >/dev/null; }
until_says() { until grep -q "$1" <("${@:2}"); do sleep 0.1; done; } # TEXT COMMAND...

# Calls that ended, one with a key. One that was refused, with a key.
call notes notes_count --input '{"text": "one two"}'
call notes notes_count --input '{"text": "one two three"}' --key counted
! call notes notes_count --input '{"text": 3}'
! call broken broken_count --input '{"text": ""}'
until_says quarantined runner ps $at
! call broken broken_count --input '{"text": ""}' --key refused
# Deliveries: one that arrived, one that is a dead letter, and one that waits, because its plugin is stopped.
deliver() { post /deliveries '{"plugin": "example.kit", "hook": "notice", "id": "'"$1"'", "event": {"type": "run.completed", "subject": {"kind": "run", "id": "'"$2"'"}}}'; }
deliver arrived run
until_says arrived curl -sS --unix-socket "$socket" 'http://localhost/deliveries?state=acked'
deliver died doomed
until_says died curl -sS --unix-socket "$socket" 'http://localhost/deliveries?state=dead'
runner ctl stop example.kit $at
deliver waits run
# The control plane: a package, a binding of an org, a call and an event.
runner package import daemon/kit --publisher Example $at
runner package install example/kit@0.1.0 --export greet --org north --id north-greet --secret api_token=api $at
runner package install example/kit@0.1.0 --export notice --org north --id north-notice $at
runner binding set north-greet --percent 50 $at
runner binding set north-greet --percent 100 $at
runner binding invoke tools/greet --input '{"name": "north"}' --token-file daemon/north.token $at
runner binding event run.completed --org north --id event --event '{"subject": {"kind": "run", "id": "run-1"}}' $at
until_says north-notice runner binding records --binding north-notice --ended succeeded $at
# The daemon is killed while a call runs.
call sleeper sleeper_count --input '{"text": ""}' --key lost &
until_says asked find .local/state/runner/plugins -name asked
trap - EXIT
kill -KILL $daemon
wait || true
rm "$socket"

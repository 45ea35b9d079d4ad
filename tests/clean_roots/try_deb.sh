#!/bin/bash
# Runs in a clean root (enter.sh) with /opt/package.deb and /opt/older.deb, a package of an earlier version. Each line
# of the result is a name and a value; the first thing that fails ends it.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive HOME=/srv/root  # homes are their owners': purging leaves them alone
quietly() { "$@" >/opt/log 2>&1 || { tail -n 20 /opt/log >&2; exit 1; }; }
# Everything but what programs write while they run, and what packages leave behind by design.
list_files() {
    find / -xdev \( -path /opt -o -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run -o -path /srv \
        -o -path /var/cache/apt -o -path /var/cache/man -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/log \
        -o -path /var/cache/debconf \) -prune -o -print | sort
}
seconds_of() { local TIMEFORMAT=%R; { time "$@" >/opt/log 2>&1; } 2>&1; }
person() { setpriv --reuid=1000 --regid=1000 --clear-groups env -i HOME=/srv/person PATH=/usr/bin:/bin "$@"; }

# A plugin with state: its tool counts its own calls.
make_counter() {
    quietly "$@" runner new nexo counter
    sed -i 's|^# fs_write_paths = .*|fs_write_paths = ["${state_dir}"]|' counter/plugin.toml
    sed -i 's|    return {"words".*|    import os\n    with open(os.environ["RUNNER_STATE_DIR"] + "/calls", "a+") as file:\n        file.write("x")\n        file.seek(0)\n        return {"calls": len(file.read())}|' counter/plugin.py
}
count() { "$@" runner call counter counter_count --input '{"text": ""}'; }

quietly apt-get update
# The package brings all that the runner needs. man-db is for this test.
quietly apt-get install -y --no-install-recommends /opt/package.deb man-db
runner --version >/dev/null
quietly apt-get purge -y plugin-runner
list_files >/opt/before
# An earlier version is used, and this one is installed over it, both without a network.
quietly unshare --net dpkg --install /opt/older.deb
test -e /usr/lib/plugin-runner/lib/python3*/site-packages/runner/__pycache__/withdrawn.*.pyc
install -d -o 1000 -g 1000 /srv/person /srv/root/documents
cd /srv/person && make_counter person && count person >/opt/log
cd /srv/root && make_counter env && count env >/opt/log
sed 's|^# fs_read_paths = .*|fs_read_paths = ["/srv/root/documents"]|' counter/plugin.toml >toml && cp -r counter reader && mv toml reader/plugin.toml
quietly runner allow reader --yes
install -d /etc/runner && echo "# of an administrator" >/etc/runner/note
[ ! -e /etc/apparmor.d/runner ] || echo "# of an administrator" >>/etc/apparmor.d/runner
find /var/lib/runner -type f | sort | xargs sha256sum >/opt/state
echo "install $(seconds_of unshare --net dpkg --install /opt/package.deb)"
sha256sum --quiet --check /opt/state
test -z "$(find /usr/lib/plugin-runner -name 'withdrawn*')"
grep -q "of an administrator" /etc/runner/note
if [ -e /etc/apparmor.d/runner ]; then
    grep -q "of an administrator" /etc/apparmor.d/runner
    sed -i '/of an administrator/d' /etc/apparmor.d/runner
fi
runner allow --list | grep -q "read  /srv/root/documents"
echo "kept $(count env) $(cd /srv/person && count person)"
rm -r /etc/runner
cd /
echo "start $(seconds_of runner --version)"
echo "version $(runner --version)"
quietly runner doctor
grep -q '^✓ own code ' /opt/log
echo "doctor $(tail -n 1 /opt/log | cut -c 1-70)"
# A starter, as root and as a person; nothing of the package changes by being used.
cd /srv/person
for contract in nexo mcp; do
    quietly person runner new "$contract" "/srv/person/$contract"
done
echo "root $(runner call nexo nexo_greet --input '{"name": "root"}')"
echo "person $(person runner call nexo nexo_greet --input '{"name": "person"}')"
quietly person runner --help
person runner exec nexo </dev/null
quietly person runner conformance mcp mcp
# As a person, some limits are preferred and not there: what counts is held.
for who in env person; do
    quietly $who runner doctor --attack
    tail -n 1 /opt/log | sed "s/^/attack-$who /"
done
# The extras are there: many plugins as one server, and a fleet, which nobody serves here.
printf '%s\n' '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}' |
    person runner gateway --config /srv/person/nexo | grep -o '"serverInfo"' | head -n 1 | sed 's/^/gateway /'
person runner ps --fleet nats://127.0.0.1:1 >/opt/log 2>&1 || head -n 1 /opt/log | sed 's/^/fleet /'
for unit in system/runner-serve.service system/runner-serve.socket system/runner-worker.service system/runner-door.service \
    user/runner-serve.service; do
    test -f "/usr/lib/systemd/$unit"
done
# (set -e does not see a line that begins with "!".)
if grep -h ^ExecStart= /usr/lib/systemd/*/runner-*.service | grep -vE "^ExecStart=(/bin/sh -c '.*' sh )?/usr/bin/runner " >&2 ||
    person sh -c 'echo >>/usr/lib/plugin-runner/bin/runner-start' 2>/dev/null; then
    exit 1
fi
man runner >/opt/log 2>/opt/errors
echo "man $(head -n 1 /opt/log)"
man runner-exec >/opt/log 2>>/opt/errors
grep -q -e '--inspect' /opt/log
test ! -s /opt/errors
bash -c 'source /usr/share/bash-completion/completions/runner && complete -p runner >/dev/null
    COMP_WORDS=(runner conf) COMP_CWORD=1 && _runner && echo "bash ${COMPREPLY[*]}"'
test -z "$(dpkg --verify plugin-runner)"
if [ -e /etc/apparmor.d/runner ]; then
    quietly apt-get install -y --no-install-recommends apparmor
    apparmor_parser --skip-kernel-load --skip-cache /etc/apparmor.d/runner
    echo "apparmor $(dpkg-query -f '${Version}' -W apparmor)"
    quietly apt-get purge -y apparmor
fi
cd /
quietly dpkg --purge plugin-runner
list_files >/opt/after
echo "left $(comm -13 /opt/before /opt/after | grep -v '^/etc/apparmor' | tr '\n' ' ')"

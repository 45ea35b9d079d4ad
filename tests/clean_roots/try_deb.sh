#!/bin/bash
# Runs in a clean root (enter.sh) with /opt/package.deb. Each line of the result is a name and a value; the
# first thing that fails ends it.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive HOME=/root
quietly() { "$@" >/opt/log 2>&1 || { tail -n 20 /opt/log >&2; exit 1; }; }
# Everything but what programs write while they run, and what packages leave behind by design.
list_files() {
    find / -xdev \( -path /opt -o -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run -o -path /srv \
        -o -path /var/cache/apt -o -path /var/cache/man -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/log \
        -o -path /var/cache/debconf \) -prune -o -print | sort
}
seconds_of() { local TIMEFORMAT=%R; { time "$@" >/opt/log 2>&1; } 2>&1; }
person() { setpriv --reuid=1000 --regid=1000 --clear-groups env -i HOME=/srv/person PATH=/usr/bin:/bin "$@"; }

quietly apt-get update
# The package brings all that the runner needs. man-db is for this test.
quietly apt-get install -y --no-install-recommends /opt/package.deb man-db
runner --version >/dev/null
quietly apt-get purge -y plugin-runner
list_files >/opt/before
# Once more, without a network.
echo "install $(seconds_of unshare --net dpkg --install /opt/package.deb)"
runner --version >/opt/log
echo "start $(seconds_of runner --version)"
echo "version $(runner --version)"
quietly runner doctor
grep -q '^✓ own code ' /opt/log
echo "doctor $(tail -n 1 /opt/log | cut -c 1-70)"
# A starter, as root and as a person; nothing of the package changes by being used.
install -d -o 1000 -g 1000 /srv/person
cd /srv/person
for contract in nexo mcp; do
    quietly person runner new "$contract" "/srv/person/$contract"
done
echo "root $(runner call nexo nexo_greet --input '{"name": "root"}')"
echo "person $(person runner call nexo nexo_greet --input '{"name": "person"}')"
# The extras are there: many plugins as one server.
printf '%s\n' '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}' |
    person runner gateway --config /srv/person/nexo | grep -o '"serverInfo"' | head -n 1 | sed 's/^/gateway /'
! person sh -c 'echo >>/usr/lib/plugin-runner/bin/runner-start' 2>/dev/null
man runner >/opt/log 2>/opt/errors
echo "man $(head -n 1 /opt/log)"
man runner-exec >/opt/log 2>>/opt/errors
grep -q -e '--inspect' /opt/log
test ! -s /opt/errors
bash -c 'source /usr/share/bash-completion/completions/runner && complete -p runner' | sed 's/^/bash /'
dpkg --verify plugin-runner
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

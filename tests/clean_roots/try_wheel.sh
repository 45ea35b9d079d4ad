#!/bin/bash
# Runs in a clean root (enter.sh) with the wheel in /opt: as people install it with pipx.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive HOME=/root PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin
export PATH="/usr/local/bin:$PATH"
quietly() { "$@" >/opt/log 2>&1 || { tail -n 20 /opt/log >&2; exit 1; }; }
quietly apt-get update
quietly apt-get install -y --no-install-recommends bubblewrap pipx
TIMEFORMAT=%R
echo "install $( { time pipx install /opt/*.whl >/opt/log 2>&1; } 2>&1 )"
echo "version $(runner --version)"
quietly runner doctor
quietly runner new nexo /srv/nexo
echo "root $(runner call /srv/nexo nexo_greet --input '{"name": "root"}')"
quietly pipx uninstall plugin-runner
test ! -e /usr/local/bin/runner

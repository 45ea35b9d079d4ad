# A small image whose command is `runner`.
#
#   docker build -t runner .
#   docker run --rm -i \
#       --security-opt seccomp=unconfined \
#       --security-opt apparmor=unconfined \
#       --security-opt systempaths=unconfined \
#       -v "$PWD/my-plugin:/plugin:ro" runner exec /plugin
#
# bubblewrap builds its cage out of namespaces and mounts, and Docker's defaults forbid exactly those:
#
#   seccomp=unconfined       Docker's filter refuses clone and unshare with namespace flags, mount, umount2 and
#                            pivot_root to a process without CAP_SYS_ADMIN. A copy of Docker's own profile that adds
#                            these five calls and keyctl is enough, and better: --security-opt seccomp=that-profile.json.
#                            keyctl gives each plugin a session keyring of its own, and Docker's default refuses it; a
#                            policy with [layers] session_keyring = "prefer" does without.
#                            Plugins do not gain by it: the runner puts its own, stricter filter on each of them.
#   apparmor=unconfined      the docker-default AppArmor profile denies every mount. No effect where there is no
#                            AppArmor. On Ubuntu 23.10 and later the host must allow unprivileged user namespaces too:
#                            sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile for bwrap.
#   systempaths=unconfined   Docker hides parts of /proc under other mounts, and the kernel then refuses a fresh
#                            procfs in a new user namespace, because it would show what is hidden. The plugin's own
#                            /proc needs a fresh one. The runner masks what Docker would have masked.
#   -i                       the plugin's standard input is the caller's.
#
# Why not --privileged: it would also give the container every capability, every device of the host and a writable
# /sys. The three options above give none of these; a hole in the cage would still end in an ordinary container.
#
# As root in the container (the default here) each plugin gets a uid of its own (2147418112-2147483647, or 61184-65519
# in a user namespace with 65536 ids), and the runner's files are out of its reach by ownership as well. With
# `--user 1000:1000` it works too, with one uid for all plugins; give it a home then: `-e HOME=/tmp`.
# State that is to outlive the container: `-v plugin-state:/var/lib/runner`.
#
# Budgets: Docker shows a container its cgroups read-only, so the runner can limit the memory of a plugin only process by
# process. The shipped default policy would not start a plugin as root then; the image's own policy, which
# differs in nothing else, prefers these two budgets, and every report says what is missing. Put bounds on the container
# as a whole (--memory, --pids-limit), or make its cgroups writable (Docker 28: --security-opt writable-cgroups=true) and
# use `--policy default`.
#
# `docker run … runner doctor` says what is missing, layer by layer.

FROM debian:bookworm-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libcap-dev python3-dev python3-venv
WORKDIR /src
# Dependencies first: they change more rarely than the code, and python-prctl has to be compiled.
COPY pyproject.toml README.md LICENSE ./
RUN python3 -m venv /opt/runner \
 && python3 -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))' \
    > requirements.txt \
 && /opt/runner/bin/pip install --no-cache-dir --use-pep517 -r requirements.txt
COPY runner runner
COPY sandbox sandbox
COPY policies policies
RUN /opt/runner/bin/pip install --no-cache-dir --no-deps . \
 && /opt/runner/bin/pip uninstall -y setuptools pip

FROM debian:bookworm-slim
# python3 of the system, not an image of its own: plugins written in Python find it in /usr/bin, which the cage shows.
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap libcap2 python3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/runner /opt/runner
RUN ln -s /opt/runner/bin/runner /usr/local/bin/runner
COPY policies/default.toml /etc/runner/policy.toml
RUN sed -i 's/^mode = "delegated"/mode = "prefer"/' /etc/runner/policy.toml
ENTRYPOINT ["runner"]
CMD ["--help"]

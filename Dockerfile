# A small image whose command is `runner`.
#
#   docker build -t runner .
#   docker run --rm -i --init \
#       --security-opt seccomp=policies/container/seccomp.json \
#       --security-opt apparmor=unconfined \
#       --security-opt systempaths=unconfined \
#       -v "$PWD/my-plugin:/plugin:ro" -v plugin-state:/var/lib/runner runner exec /plugin
#
# What each option is for, what it costs, Podman and Kubernetes: docs/containers.md.
# What is missing in a container, layer by layer: docker run … runner doctor.

FROM debian:trixie-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libcap-dev python3-dev python3-venv
WORKDIR /src
# Dependencies first, those of every extra: they change less often than the code, and python-prctl has to be compiled.
# Each has one version and the hashes of its files (requirements.txt says how it is made). That includes setuptools,
# which compiles python-prctl and the runner: without build isolation pip downloads nothing that is not in the list.
COPY requirements.txt ./
RUN python3 -m venv /opt/runner \
 && sed -n '/^setuptools==/,/[^\\]$/p' requirements.txt > setuptools.txt \
 && /opt/runner/bin/pip install --no-cache-dir --require-hashes -r setuptools.txt \
 && /opt/runner/bin/pip install --no-cache-dir --require-hashes --no-build-isolation -r requirements.txt
COPY pyproject.toml README.md LICENSE SECURITY.md CHANGELOG.md ./
COPY runner runner
COPY sandbox sandbox
COPY policies policies
COPY docs docs
COPY scripts/entry scripts/entry
RUN /opt/runner/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/runner/bin/pip uninstall -y setuptools pip

FROM debian:trixie-slim
LABEL org.opencontainers.image.title="runner" \
      org.opencontainers.image.description="Runs strangers' plugins in a cage built with bubblewrap" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="/opt/runner/share/doc/plugin-runner/docs/containers.md" \
      org.opencontainers.image.base.name="docker.io/library/debian:trixie-slim"
# The system's python3 instead of a Python image: plugins written in Python find it in /usr/bin, which the cage shows.
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap libcap2 python3 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/runner /opt/runner
# --chmod: COPY keeps the modes of the checkout, and the runner refuses a policy that its group can write.
COPY --chmod=0644 policies/default.toml /etc/runner/policy.toml
COPY --chmod=0644 policies/container/seccomp.json /usr/local/share/runner/seccomp.json
# Container engines show cgroups read-only. As root, the default policy requires limits that need writable cgroups.
# The image's policy only prefers these limits, and every report says what is missing. Nothing else differs.
RUN sed -i 's/^mode = "delegated"/mode = "prefer"/' /etc/runner/policy.toml \
 && chmod 0755 /etc/runner \
 && ln -s /opt/runner/bin/runner /usr/local/bin/runner \
 && useradd --uid 1000 --create-home runner \
 && install -d -o 1000 -g 1000 -m 0711 /var/lib/runner
# State is in /var/lib/runner, as for root, so that one volume fits both.
ENV XDG_STATE_HOME=/var/lib
# Not root: with systempaths=unconfined, root could write the host's /proc/sys. A number, because Kubernetes'
# runAsNonRoot cannot look up a name.
USER 1000:1000
ENTRYPOINT ["runner"]
CMD ["--help"]

"""Paths that no policy can allow, as constants, and how a path is judged by its name alone.

A policy adds to these and cannot take one away. What a name leads to is judged in denylist.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from sandbox.paths.mounts import contains, join

# The nexo contract's hard denylist, in its order.
HOST_PATHS: tuple[str, ...] = (
    "/etc/shadow",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/proc/sys",
    "/proc/kcore",
    "/proc/kallsyms",
    "/sys/firmware",
    "/sys/kernel",
    "/dev/mem",
    "/dev/kmem",
    "/dev/port",
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/private/var/run/docker.sock",
    "/root",
    "/boot",
)


# Where limits are kept. The plugin of an ordinary user has the uid to which its own memory.max belongs: it
# must not even see the place, neither here nor wherever else one of these filesystems is mounted.
CGROUP_PATHS: tuple[str, ...] = ("/sys/fs/cgroup",)


CGROUP_FILESYSTEMS = frozenset({"cgroup", "cgroup2", "cpuset", "fuse.lxcfs"})


# The contract's home list (which its reference defines and never applies) …
CONTRACT_HOME_PATHS: tuple[str, ...] = (
    ".aws",
    ".ssh",
    ".gnupg",
    ".netrc",
    ".docker",
    ".kube",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".npmrc",
    ".config/gh",
    ".config/git",
)


# … and ours: places that hold credentials in the same way.
HOME_PATHS: tuple[str, ...] = (
    *CONTRACT_HOME_PATHS,
    ".azure",
    ".config/gcloud",
    ".config/rclone",
    ".config/containers/auth.json",
    ".git-credentials",
    ".pypirc",
    ".pgpass",
    ".my.cnf",
    ".vault-token",
    ".terraform.d",
    ".password-store",
    ".local/share/keyrings",
    ".local/share/kwalletd",
    ".pki",
    ".mozilla",
    ".thunderbird",
    ".config/google-chrome",
    ".config/chromium",
    ".bash_history",
    ".zsh_history",
    ".python_history",
)


# Refused with everything below: sockets of daemons live here, and a read-only bind does not stop connect().
SOCKET_PATHS: tuple[str, ...] = ("/run", "/var/run")


# Refused as a whole, while a directory below may be granted.
HOME_BASES = ("/home", "/var/home", "/export/home", "/Users")


WHOLE_PATHS: tuple[str, ...] = ("/", "/tmp", "/var/tmp", "/dev", "/dev/shm", *HOME_BASES)


# Refused for writing: what the host itself runs or obeys. A plugin that may write there is out of its cage
# at the next login, cron job or package trigger.
HOST_WRITE_PATHS: tuple[str, ...] = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/var/spool/cron",
)


HOME_WRITE_PATHS: tuple[str, ...] = (
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".profile",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
    ".config/fish",
    ".config/autostart",
    ".config/systemd",
    ".config/environment.d",
    ".local/bin",
    ".local/share/applications",
    ".gitconfig",
    ".vimrc",
    ".config/nvim",
)


Origin = Literal["host", "cgroups", "home", "sockets", "whole", "execute", "deciding", "policy", "runner"]


Relation = Literal["equal", "below", "above"]


def lexical_fault(path: str) -> str | None:
    """Why `path` cannot be judged by its name, as half a sentence; None if it can.

    ".." is refused rather than resolved: whether /a/../b is /b depends on what /a is at that moment.
    """
    if not path:
        return "is empty"
    if "\0" in path:
        return "contains a NUL byte"
    if not path.startswith("/"):
        return "is not absolute"
    if ".." in path.split("/"):
        return "contains '..'"
    if len(os.fsencode(path)) >= 4096:  # PATH_MAX, with its NUL
        return "is longer than 4095 bytes"
    return None


def normal(path: str) -> str:
    """`path` without empty and "." segments and without a trailing slash. For paths without a fault."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def relation(path: str, denied: str) -> Relation | None:
    if path == denied:
        return "equal"
    if contains(denied, path):
        return "below"
    if contains(path, denied):
        return "above"
    return None


def lexical_hit(path: str, homes: Sequence[str] = (), extra: Sequence[str] = ()) -> str | None:
    """The denied path that `path` equals, lies below or lies above, judged by name alone."""
    wanted = normal(path)
    for denied in (*HOST_PATHS, *CGROUP_PATHS, *home_paths(homes), *extra):
        if relation(wanted, normal(denied)):
            return denied
    return None


def home_paths(homes: Iterable[str]) -> Iterator[str]:
    return (join(home, rest) for home in homes for rest in HOME_PATHS)

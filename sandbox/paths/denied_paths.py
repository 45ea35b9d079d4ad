"""Paths that no policy can allow, and how a path is judged by its name alone.

A policy can add paths and cannot remove one. denylist.py judges the file that a name leads to.
"""

from __future__ import annotations

import os

from sandbox.paths.mounts import contains
from sandbox.speed.typed import Iterable, Iterator, Literal, Mapping, Sequence
from sandbox.speed.value import NamedTuple

# The host's own secrets and controls.
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


# The files of limits. An ordinary user's plugin has the uid that owns its memory.max, so it must not see
# these filesystems, at any mount point.
CGROUP_PATHS: tuple[str, ...] = ("/sys/fs/cgroup",)


CGROUP_FILESYSTEMS = frozenset({"cgroup", "cgroup2", "cpuset", "fuse.lxcfs"})


# Places in a home directory that hold credentials: the most widely used ones …
_USUAL_HOME_PATHS: tuple[str, ...] = (
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


# Assistants keep tokens in the files below, and copies of them in these few folders: sign-ins, the `env` of
# every server in a configuration, what was typed. The files are named and not their folders: plugins
# live there (~/.claude/plugins, ~/.gemini/extensions), and a contract gives ~/.claude/projects and
# ~/.codex/sessions. The folders themselves are never given: they contain one of these. The launch adds the
# configurations of hosts (runner/contracts).
_ASSISTANT_PATHS: tuple[str, ...] = (
    ".claude.json",
    ".claude.json.backup",
    ".claude/.credentials.json",
    ".claude/settings.json",
    ".claude/settings.local.json",
    ".claude/history.jsonl",
    ".claude/backups",  # of .claude.json
    ".claude/ide",  # tokens of the editors that run
    ".claude/session-env",
    ".claude/shell-snapshots",
    ".config/Claude/config.json",
    ".config/Claude/Cookies",
    ".codex/auth.json",
    ".codex/.credentials.json",
    ".codex/config.toml",
    ".codex/history.jsonl",
    ".gemini/oauth_creds.json",
    ".gemini/gemini-credentials.json",
    ".gemini/settings.json",
    ".gemini/.env",
    ".qwen/oauth_creds.json",
    ".qwen/settings.json",
    ".qwen/.env",
    ".config/cursor/auth.json",
    ".config/github-copilot",
    ".copilot/config.json",
    ".continue/config.yaml",
    ".continue/config.json",
    ".continue/.env",
    ".config/goose/config.yaml",
    ".config/goose/secrets.yaml",
    ".local/share/opencode/auth.json",
    ".config/opencode/opencode.json",
    ".config/opencode/opencode.jsonc",
    ".aider.conf.yml",
    ".aider/oauth-keys.env",
)


# … and the others.
HOME_PATHS: tuple[str, ...] = (
    *_USUAL_HOME_PATHS,
    *_ASSISTANT_PATHS,
    ".local/state/runner/backups",  # of the configurations that `runner wrap` changed
    ".azure",
    ".config/gcloud",
    ".config/rclone",
    ".config/containers/auth.json",
    ".config/glab-cli",
    ".config/hub",
    ".cache/huggingface/stored_tokens",
    ".cache/huggingface/token",
    ".databrickscfg",
    ".gem/credentials",
    ".git-credentials",
    ".pypirc",
    ".yarnrc.yml",
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


# Denied with everything below: daemons have their sockets here, and a read-only bind does not stop connect().
SOCKET_PATHS: tuple[str, ...] = ("/run", "/var/run")

# systemd mounts a node of this folder over what a unit may not see: ProtectKernelModules= hides
# /usr/lib/modules. The nodes are root's, empty, and nobody may open them.
INACCESSIBLE_NODES = "/run/systemd/inaccessible"


# Denied as a whole; directories below may be granted.
HOME_BASES = ("/home", "/var/home", "/export/home", "/Users")


WHOLE_PATHS: tuple[str, ...] = ("/", "/tmp", "/var/tmp", "/dev", "/dev/shm", *HOME_BASES)


# Denied for writing: files that the host itself runs or obeys. A plugin that writes them could run code
# outside of its cage at the next login, cron job or package trigger.
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
    ".local/share/runner",  # packages that servers start from
    ".gitconfig",
    ".hgrc",
    ".config/hg",
    ".vimrc",
    ".config/nvim",
)


Origin = Literal[
    "host", "cgroups", "home", "sockets", "whole", "execute", "deciding", "policy", "runner", "storage"
]


Relation = Literal["equal", "below", "above"]


def lexical_fault(path: str) -> str | None:
    """Why `path` cannot be judged by its name, as the rest of a sentence that begins with it; None if it can.

    ".." is refused and not resolved: whether /a/../b is /b depends on what /a is at that moment.
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
    """`path` without empty and "." segments and without a trailing slash. It must have no lexical_fault()."""
    if path[:1] == "/" and "//" not in path and "/./" not in path and not path.endswith(("/", "/.")):
        return path  # as most are
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def relation(path: str, denied: str) -> Relation | None:
    if path == denied:
        return "equal"
    if contains(denied, path):
        return "below"
    if contains(path, denied):
        return "above"
    return None


DENYLIST_RULE = "denylist"  # the id of this rule in every denial, diagnostic and report

REASONS: Mapping[Origin, str] = {
    "host": "which no policy can allow",
    "cgroups": "where the kernel keeps limits: a plugin could raise its own",
    "home": "which holds credentials and which no policy can allow",
    "sockets": "where daemons keep their sockets",
    "whole": "which is never given as a whole",
    "execute": "which the host itself runs or obeys and no plugin may write",
    "deciding": "which decides what a plugin may do, or what a host runs: no plugin may write it",
    "policy": "which this policy denies",
    "runner": "which is the runner's own",
    "storage": "where hosts keep what plugins store",
}
_RELATIONS: Mapping[Relation, str] = {"equal": "is", "below": "lies below", "above": "contains"}


def denial_clause(relation: Relation, denied: str, origin: Origin) -> str:
    """Why a path is denied, such as "lies below /root, which no policy can allow"."""
    return f"{_RELATIONS[relation]} {denied}, {REASONS[origin]}"


def denial_hint(relation: Relation, origin: Origin = "host") -> str:
    if relation == "above" and origin == "storage":
        return "ask for the folders below it that the plugin needs, or choose another place with --state-dir"
    if relation == "above":
        return "ask for the folders below it that the plugin needs"
    return "copy what the plugin needs to a folder of its own, and ask for that"


class NameHit(NamedTuple):
    """A denied path, and how another path relates to it by name."""

    denied: str
    relation: Relation
    origin: Origin

    def clause(self) -> str:
        return denial_clause(self.relation, self.denied, self.origin)

    def hint(self) -> str:
        return denial_hint(self.relation)


def lexical_hit(path: str, homes: Sequence[str] = (), extra: Sequence[str] = ()) -> NameHit | None:
    """The denied path that `path` equals, lies below or contains, by name alone. `homes`: home directories
    whose credentials are denied too. `extra`: paths that the policy denies."""
    wanted = normal(path)
    groups: tuple[tuple[Origin, Iterable[str]], ...] = (
        ("host", HOST_PATHS),
        ("cgroups", CGROUP_PATHS),
        ("home", home_paths(homes)),
        ("policy", extra),
    )
    for origin, paths in groups:
        for denied in paths:
            if found := relation(wanted, normal(denied)):
                return NameHit(denied, found, origin)
    return None


def home_paths(homes: Iterable[str], rests: Iterable[str] = HOME_PATHS) -> Iterator[str]:
    for home in homes:
        within = home.rstrip("/") + "/"
        for rest in rests:
            yield within + rest

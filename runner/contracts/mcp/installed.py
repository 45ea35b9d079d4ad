"""A server that npx or uvx would start, started from the store of `runner install`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.contracts.mcp.docker_run import container_of
from runner.contracts.mcp.launchers import IMAGE_RUNNERS, command_line, launch_of, program_name
from runner.install.images import with_image
from runner.install.request import UnusableSpec
from runner.install.roots import main_store_root, store_roots
from runner.install.store import Store, StoreRefused
from runner.plugin import LaunchFault, Plugin, Template
from sandbox import look
from sandbox.spec import STATE_DIR_TOKEN, EnvRequest, ImageRoot, Limits, Network, SandboxSpec

REFUSED = "store_refused"


def installed(plugin: Plugin, environ: Mapping[str, str]) -> Plugin:
    """The plugin with its stored program; unchanged if nothing is stored for its command, or its store is
    refused: `launch_fault` says so then."""
    entry = plugin.entrypoint
    if entry is None:
        return plugin
    line = command_line((entry.command, *entry.args))
    if line and program_name(line[0]) in IMAGE_RUNNERS:
        return _in_image(plugin, line, environ)
    try:
        found = find_stored((entry.command, *entry.args), environ)
    except StoreRefused:
        return plugin
    if found is None:
        return plugin
    words, args, tree = found
    if plugin.spec.image is not None:
        words, image = _by_image(words, tree, plugin.spec.image)
        plugin = plugin._replace(spec=plugin.spec._replace(image=image))
    stored = len(words) - 1
    launcher = (entry.command, *entry.args)[: 1 + len(entry.args) - len(args)]
    if not launcher:  # the command has a whole line, with the program's own arguments
        launcher, stored = (entry.command,), stored + len(args)
    new = entry._replace(command=words[0], args=(*words[1:], *args), launcher=launcher, stored_args=stored)
    return plugin._replace(entrypoint=new, spec=_with_state(plugin.spec, tree))


def _by_image(words: tuple[str, ...], tree: str, image: ImageRoot) -> tuple[tuple[str, ...], ImageRoot]:
    """The words with the image's interpreter in place of the host's, and the image with the packages."""
    image = image._replace(package=tree)
    if words[0] == f"{tree}/bin/python":
        # The one of the version that the packages were fetched for: what is compiled in them fits no other.
        [python, *_] = look.listdir(f"{tree}/lib")
        image = image._replace(env=(("PYTHONPATH", f"{tree}/lib/{python}/site-packages"),))
        words = (python, *words[1:])
    return words, image


def _in_image(plugin: Plugin, argv: Sequence[str], environ: Mapping[str, str]) -> Plugin:
    """The plugin with the image of `docker run` as its root. With another one, `launch_fault` refuses it."""
    if plugin.spec.image is not None:
        return plugin
    try:
        run = container_of(argv)
    except UnusableSpec:
        return plugin
    spec, template = plugin.spec, plugin.template
    if run.env_files:
        base = template or Template("")
        if base.env_file:
            return plugin
        template = base._replace(env_file=run.env_files[0])
    limits = [getattr(run.limits, name) or getattr(spec.limits, name) for name in Limits._fields]
    spec = spec._replace(
        image=run.image,
        paths=(*spec.paths, *run.paths),
        env=run.variables(spec.env),
        limits=Limits(*limits),
        network=Network("none") if run.offline else spec.network,
    )
    # Its words are those of a container, which sees no folder that it is started in.
    return with_image(plugin._replace(spec=spec, template=template, folder=""), environ)


def _with_state(spec: SandboxSpec, tree: str) -> SandboxSpec:
    """With the state directory as home, and its package in an overlay: what a program keeps in ~/.cache would
    be fetched anew at each start otherwise, and some keep their data beside their code."""
    if not any(each.path == STATE_DIR_TOKEN for each in spec.paths):
        return spec
    known = {each.name for each in spec.env}
    wanted = {"HOME": STATE_DIR_TOKEN, "XDG_CACHE_HOME": f"{STATE_DIR_TOKEN}/.cache"}
    added = tuple(EnvRequest(name, value, fixed=True) for name, value in wanted.items() if name not in known)
    return spec._replace(env=(*spec.env, *added), overlaid=tree)


def find_stored(
    argv: Sequence[str], environ: Mapping[str, str], *, main_only: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...], str] | None:
    """The stored program in place of a launcher's command line, the arguments that it gets, and the folder of
    its packages; None if there is none. `main_only`: in the store that a start by a host looks into. Raises
    StoreRefused."""
    try:
        launch = launch_of(argv)
    except UnusableSpec:
        return None
    if launch is None:
        return None
    for root in (main_store_root(environ),) if main_only else store_roots(environ):
        store = Store(root)
        if (found := store.find(launch.request)) is not None:
            return store.words(found), launch.args, store.tree(found.set_name)
    return None


def is_stored(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a host's entry has its program in the store that a start by its host looks into."""
    try:
        return find_stored(argv, environ, main_only=True) is not None
    except StoreRefused:
        return False


def store_fault(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchFault | None:
    """Why the store that may have the program is not used, or None."""
    try:
        find_stored(argv, environ)
    except StoreRefused as refused:
        return LaunchFault(REFUSED, str(refused), refused.hint)
    return None

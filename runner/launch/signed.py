"""Launch under a policy that requires signatures: copy the package, check the copy, and mount the copy.

Only launches under such a policy import this. `rehearse_check` checks the files where they are, and changes
nothing on the machine.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager

from runner.launch.failures import as_failure
from runner.launch.orders import unwinding_signals
from runner.launch.read import read_invocation
from runner.launch.signed_image import RULE, check_image, require_alone
from runner.launch.stages import Decided
from runner.launch.verdict import TIMEOUT
from runner.outcome import EXEC_DEADLINE, EXEC_REFUSED, Failure, Outcome
from runner.package.fault import PackageFault
from runner.package.keys import load_trusted
from runner.package.listing import FileList, list_package
from runner.package.program import CodePlaces, require_image_program, require_own_program
from runner.package.signature import read_signature, verify
from runner.package.snapshot import PackageCopy, take_snapshot
from runner.plugin import Plugin
from sandbox.document.diagnostic import DocumentError
from sandbox.document.read import read_bounded
from sandbox.paths.denied_paths import normal
from sandbox.paths.mounts import contains, join, relative
from sandbox.plan.plan import Bind, LaunchPlan
from sandbox.policy.policy import RUNTIME_PATHS
from sandbox.speed.typed import Callable, Iterator, Mapping

_HINT = 'or set signature = "optional" under [packages] in a policy of your own'


@contextmanager
def check_package(
    decided: Decided, environ: Mapping[str, str], began: float | None = None
) -> Iterator[Decided]:
    """The decision with a copy of the package, whose signature is valid and whose key is trusted. The copy is
    removed when the context ends. Raises Failure, also at the deadline, which runs from `began` (monotonic
    clock)."""
    deadline = decided.grant.limits.deadline
    until = None if began is None or deadline is None else began + deadline

    def look() -> None:
        if until is not None and time.monotonic() >= until:
            raise Failure(TIMEOUT, EXEC_DEADLINE)

    with unwinding_signals() as calm, ExitStack() as stack:
        with _refusing(decided):
            checked = _check(decided, environ, stack, look)
        stack.callback(calm)  # runs before the copy is removed
        try:
            yield checked
        except Failure as failure:
            # Messages name the original folder: the copy is removed before anybody reads them.
            failure.outcome = _replace_text(failure.outcome, checked.copy, checked.original)
            raise


def _replace_text(outcome: Outcome, text: str, new: str) -> Outcome:
    return outcome._replace(
        message=outcome.message.replace(text, new),
        hint=outcome.hint.replace(text, new),
        denials=tuple(
            denial._replace(
                asked=denial.asked.replace(text, new),
                reason=denial.reason.replace(text, new),
                hint=denial.hint.replace(text, new),
            )
            for denial in outcome.denials
        ),
    )


def rehearse_check(decided: Decided, environ: Mapping[str, str]) -> Decided:
    """Check the package without a copy, for a rehearsal. Raises Failure, as `check_package` does."""
    with _refusing(decided):
        decided = _check_image(decided, environ)
        if decided.signed is not None:
            return decided
        root = _require_coverable(decided)
        trust, plugin = decided.policy.packages.trust, decided.loaded.plugin
        raw = read_signature(root)
        now = time.time()
        signed = verify(
            raw, plugin.id, plugin.version, load_trusted(trust), trust, now, lambda: list_package(root)
        )
        return decided._replace(signed=signed)


@contextmanager
def _refusing(decided: Decided) -> Iterator[None]:
    with as_failure(decided):  # faults of the trust file are faults of the policy
        try:
            yield
        except PackageFault as fault:
            raise Failure(_refusal(decided, str(fault), fault.hint), EXEC_REFUSED) from None


def _refusal(decided: Decided, reason: str, hint: str) -> Outcome:
    message = f"policy {decided.policy.name} requires a signed package: {reason}"
    return Outcome("policy_denied", "policy", message, RULE, "; ".join(filter(None, (hint, _HINT))))


def _check(
    decided: Decided, environ: Mapping[str, str], stack: ExitStack, look: Callable[[], None]
) -> Decided:
    decided = _check_image(decided, environ)
    if decided.signed is not None:
        return decided
    root = _require_coverable(decided)
    trust, plugin = decided.policy.packages.trust, decided.loaded.plugin
    trusted = load_trusted(trust)
    raw = read_signature(root)
    taken: list[PackageCopy] = []

    def copy_package() -> FileList:
        taken.append(stack.enter_context(take_snapshot(root, environ, look)))
        return taken[-1].listing

    signed = verify(raw, plugin.id, plugin.version, trusted, trust, time.time(), copy_package)
    [copy] = taken
    if read_signature(copy.path) != raw:
        raise PackageFault(RULE, "its signature changed while it was checked", "try again")
    _require_same_manifest(decided, copy.path, root)
    return decided._replace(
        loaded=decided.loaded._replace(plugin=_at_copy(plugin, root, copy.path)),
        signed=signed,
        copy=copy.path,
        original=root,
    )


def _check_image(decided: Decided, environ: Mapping[str, str]) -> Decided:
    """The decision with the signature of its image. If there is no package, what the image itself starts is
    all that is signed. Raises PackageFault and DocumentError."""
    plugin, image = decided.loaded.plugin, decided.loaded.plugin.spec.image
    is_alone = plugin.root is None
    if image is None or (is_alone and not image.starts_own):
        return decided
    if is_alone:
        require_alone(decided, image, environ)
    found = check_image(decided, image)
    return decided._replace(signed_image=found, signed=found if is_alone else None)


def _require_coverable(decided: Decided) -> str:
    """The plugin's own folder. Raises PackageFault if the signature cannot cover all its code."""
    plugin = decided.loaded.plugin
    root, entrypoint = plugin.root, plugin.entrypoint
    if root is None and plugin.spec.image is not None:
        message = f"its program is in the image {plugin.spec.image.reference}, and it has no folder to sign"
        raise PackageFault(RULE, message, "choose another policy for it")
    if root is None:
        message = "the plugin has no folder of its own that could be signed: its manifest is a configuration"
        raise PackageFault(RULE, message, "choose another policy for it")
    if decided.grant.unsandboxed:
        message = "without a cage nothing keeps the plugin to the files that were checked"
        raise PackageFault(RULE, message, 'set unsandboxed = "deny" in the policy')
    if not contains(root, plugin.manifest):
        message = f"the manifest {plugin.manifest} is not in the plugin's folder {root}"
        raise PackageFault(RULE, message, "move it there and sign the package again")
    assert entrypoint is not None  # `load` has refused it
    command = os.path.normpath(os.path.join(entrypoint.directory, entrypoint.command))
    outside = "" if contains(root, entrypoint.directory) else entrypoint.directory
    if "/" in entrypoint.command and not any(contains(place, command) for place in (root, *RUNTIME_PATHS)):
        outside = command if plugin.spec.image is None else ""  # `require_checked` knows what is the image's
    if outside:
        message = f"it starts {outside}, which is neither in the plugin's folder {root} nor of the system"
        raise PackageFault(RULE, message, "put the program into the package and sign it again")
    for asked in decided.grant.paths:
        if contains(root, normal(asked.path)):
            message = f"it asks for {asked.path} of its own folder, and gets only what was checked of it"
            raise PackageFault(RULE, message, "take that path out of the manifest and sign the package again")
    return root


def _require_same_manifest(decided: Decided, copy: str, root: str) -> None:
    """Raise PackageFault unless the decision was made from the signed text of the manifest."""
    invocation, plugin = decided.loaded.invocation, decided.loaded.plugin
    try:
        text = read_bounded(join(copy, relative(plugin.manifest, root)))
    except DocumentError as error:
        raise PackageFault(RULE, error.diagnostics[0].message, "sign the package again") from None
    read = read_invocation(invocation, text=text)
    if read.plugin != plugin:
        raise PackageFault(RULE, "its manifest changed while it was checked", "try again")


def _at_copy(plugin: Plugin, root: str, copy: str) -> Plugin:
    """The plugin with the copy in place of its folder. In the cage the copy has the folder's path."""
    entrypoint = plugin.entrypoint
    assert entrypoint is not None
    command = entrypoint.command
    if command.startswith("/") and contains(root, os.path.normpath(command)):
        command = join(copy, relative(os.path.normpath(command), root))
    # The copy has no empty folders.
    parts = tuple(part for part in plugin.root_parts if os.path.lexists(join(copy, part)))
    return plugin._replace(
        root=copy,
        root_inside=plugin.root_inside or root,
        root_parts=parts or plugin.root_parts,
        entrypoint=entrypoint._replace(
            command=command, directory=join(copy, relative(entrypoint.directory, root))
        ),
    )


def require_checked(decided: Decided, plan: LaunchPlan) -> None:
    """Check the finished plan: the copy is mounted, and everything that is started comes from it or from the
    system. In a rehearsal the folder takes the place of the copy. Raises Failure."""
    plugin = decided.loaded.plugin
    if plugin.root is None:  # there is an image alone
        assert plugin.spec.image is not None
        tree = plugin.spec.image.tree
        with _refusing(decided):
            require_image_program(plan, CodePlaces(tree, tree, tree, plan.directory), tree)
        return
    if decided.copy:
        require_copy_mounted(decided, plan)
    places = CodePlaces(
        os.path.realpath(plugin.root),
        plugin.root_inside or plugin.root,
        decided.original or plugin.root,
        plan.directory,
    )
    image = plugin.spec.image
    with _refusing(decided):
        if image is not None:
            require_image_program(plan, places, image.tree)
            return
        # The path of the original folder may contain links. The copy is mounted without them.
        require_own_program(plan, places, links=bool(decided.copy))


def require_copy_mounted(decided: Decided, plan: LaunchPlan) -> None:
    """Raise Failure unless the copy is mounted in place of the plugin's folder, and no file of the original
    is shown elsewhere."""
    inside = decided.loaded.plugin.root_inside
    for bind in plan.operations:
        if not isinstance(bind, Bind) or contains(decided.copy, bind.real):
            continue
        if contains(inside, bind.dest) or contains(decided.original, bind.real):
            reason = f"{bind.real} would be shown at {bind.dest}, and it was not checked"
            hint = "let manifest and scripts name files of the package by relative paths"
            raise Failure(_refusal(decided, reason, hint), EXEC_REFUSED)

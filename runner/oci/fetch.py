"""Fetch packages from registries into the store of `runner install`. API for programs on trio:

    reference = parse_reference("oci://registry.example.com/acme/devkit:1.2.0")
    store = Store(main_store_root(os.environ))                  # or another folder of one's own
    package = find_stored(reference, store)                     # without the network; None: it is not there
    package = await fetch(reference, store, trust="/etc/runner/trusted-keys")

All of these raise PackageFault, whose message, rule and hint say what is wrong.

A `StoredPackage` is a folder that is complete, read-only and stays: `package.path` can be given to every
function that takes the path of a manifest. `package.plugin` is what its manifest says. `package.digest` is
the digest in the registry: the same digest is the same files, so it can be kept as the identity of an
imported package. `package.signature` says what is known about its signature.

A tag is resolved once: `fetch` of the same tag gives the package that is stored, also without a network,
until `update=True`. With `required`, a package without a signature of a trusted key is refused before
anything of it is unpacked. Without it every package is taken, and `package.signature.status` says "trusted",
"untrusted" (with the reason), "absent", or "unchecked" if no trust file was given.

What comes from the registry lies in a file without a name until it was checked. A fetch that fails or is
cancelled leaves nothing. Several tasks and processes may fetch at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import IO, NamedTuple, TypeVar, cast

import trio

from runner.install.store import Installed, Lock, Locked, Store, StoreRefused
from runner.manifest.semver import is_older
from runner.manifest.unpack import UNREADABLE, extract, read_tar
from runner.oci.archive import list_archive
from runner.oci.artifact import INDEX, MANIFEST, PackageManifest, digest_of, read_package, read_signature
from runner.oci.client import USUAL_ACCESS, RegistryAccess, RegistryClient, open_registry
from runner.oci.reference import Reference
from runner.oci.stored import (
    SignatureState,
    StoredPackage,
    TrustedKeys,
    find_stored,
    judge_signatures,
    read_plugin,
    read_trust,
    request_of,
    require_identity,
)
from runner.package.fault import PackageFault
from runner.package.listing import SIGNATURE_NAME, FileList
from runner.package.signature import parse_signature
from runner.plugin import Plugin
from sandbox.document.diagnostic import printable

# Store.changing() sets the umask of the whole process.
_one_at_a_time = threading.Lock()
_BUSY_SECONDS = 0.1


Result = TypeVar("Result")


class _Busy(Exception):
    """Another process changes the store."""


# What a reference was, the plugin that it would be, and the digest of its package.
Accept = Callable[[StoredPackage | None, Plugin, str], bool]


class PulledPackage(NamedTuple):
    """What a registry gave: complete and as its digests say, and nothing of it written to a folder."""

    manifest: PackageManifest
    listing: FileList
    signature: SignatureState


# --- from a registry ----------------------------------------------------------------------------------------


async def fetch(
    reference: Reference,
    store: Store,
    *,
    trust: str | None = None,
    required: bool = True,
    access: RegistryAccess = USUAL_ACCESS,
    environ: Mapping[str, str] | None = None,
    contract: str | None = None,
    update: bool = False,
    older: bool = False,
    accept: Accept = lambda before, plugin, digest: True,
    tell: Callable[[str], None] = lambda text: None,
) -> StoredPackage:
    """The package in the store, fetched if it is not there. Raises PackageFault.

    `trust`: the file of trusted keys; needed if `required`. `update`: ask the registry again. `older`: a tag
    may have moved to an older version, or to another plugin, than the one that is stored. `accept`: called in
    another thread before the package is stored, with what the reference was and what it would be; False
    leaves everything as it is. `tell`: called if another process has to end first."""
    if required and trust is None:
        raise ValueError("a required signature needs a trust file")
    before = await trio.to_thread.run_sync(lambda: find_stored(reference, store, trust=trust))
    if before is not None and not update:
        require_trusted(before.signature, required=required, reference=reference)
        return before
    trusted = read_trust(trust)
    with open_spool() as file:
        async with open_registry(reference, access, environ) as registry:
            pulled = await pull(registry, reference, file, trusted)
            require_trusted(pulled.signature, required=required)

        def keep() -> StoredPackage:
            return _keep(store, reference, file, pulled, trust, contract, update, older, accept)

        kept = await _when_free(keep, tell)
        require_trusted(kept.signature, required=required, reference=reference)
        return kept


async def _when_free(keep: Callable[[], Result], tell: Callable[[str], None]) -> Result:
    """Returns what `keep` returns, which is called again while it raises _Busy."""
    # Not in the thread: a task can be cancelled while it waits, a thread cannot.
    while True:
        try:
            return await trio.to_thread.run_sync(keep)
        except _Busy as busy:
            tell(str(busy))
            tell = _say_nothing
            await trio.sleep(_BUSY_SECONDS)


async def keep_in_store(store: Store, keep: Callable[[], Result], tell: Callable[[str], None]) -> Result:
    """Call `keep` in a thread that holds the store alone. `tell`: called if another process has to end first.
    Raises PackageFault, also in place of an OSError of `keep`."""

    def hold() -> Result:
        with _holding(store), store.changing(_raise_busy):
            return keep()

    return await _when_free(hold, tell)


@contextmanager
def _holding(store: Store) -> Iterator[None]:
    """One change at a time, whose faults are PackageFaults."""
    try:
        with _one_at_a_time:
            yield
    except StoreRefused as refused:
        raise PackageFault("store_refused", str(refused), refused.hint) from None
    except OSError as error:
        message = f"the package cannot be stored in {store.root}: {error.strerror}"
        hint = "make room there, and let this user write to it"
        raise PackageFault("store_refused", message, hint) from None


def _say_nothing(text: str) -> None:
    pass


def _raise_busy(text: str) -> None:
    raise _Busy(text)


@contextmanager
def open_spool() -> Iterator[IO[bytes]]:
    """A file without a name, which goes with its descriptor. /tmp is in memory on many machines. Raises
    PackageFault if it cannot be written, also at its end: a part may still be in a buffer."""
    usual = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    try:
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or usual) as file:
            yield file
    except OSError as error:
        message = f"the package cannot be kept in a temporary file: {error.strerror}"
        raise PackageFault("store_refused", message, "make room in /var/tmp, or where TMPDIR says") from None


class InterruptibleFile:
    """A file that is read in a thread of trio. Reading ends when the task does, by a deadline or by ^C."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.peek = file.seek, file.peek  # type: ignore[attr-defined]  # it is buffered

    def read(self, size: int = -1) -> bytes:
        trio.from_thread.check_cancelled()
        return self._file.read(size)


async def pull(
    registry: RegistryClient, reference: Reference, file: IO[bytes], trusted: TrustedKeys | None
) -> PulledPackage:
    """Write the package's tar to `file`, check all of it, and judge its signatures. Raises PackageFault."""
    manifest = await get_package(registry, reference)
    signatures = await get_signatures(registry, manifest.digest)
    listing = await list_layer(registry, manifest, file)
    signature = await trio.to_thread.run_sync(judge_signatures, signatures, lambda: listing, trusted)
    return PulledPackage(manifest, listing, signature)


async def list_layer(
    registry: RegistryClient, package: PackageManifest, file: IO[bytes] | None = None
) -> FileList:
    """Fetch the package's tar, into `file` if there is one. Returns its files. Raises PackageFault."""
    if file is None:
        with open_spool() as own:
            return await list_layer(registry, package, own)
    await registry.get_blob(package.layer, file)
    file.flush()
    file.seek(0)
    return await trio.to_thread.run_sync(list_archive, cast(IO[bytes], InterruptibleFile(file)))


async def get_package(registry: RegistryClient, reference: Reference) -> PackageManifest:
    """Raises PackageFault."""
    return read_package((await get_document(registry, reference))[0])


async def get_document(
    registry: RegistryClient, reference: Reference, digest: str = "", kinds: Sequence[str] = (MANIFEST, INDEX)
) -> tuple[bytes, str]:
    """The index or manifest that a reference means, or what it has by this digest, with its digest. Raises
    PackageFault."""
    found = await registry.get_manifest(digest or reference.version, kinds)
    if found is None:
        message = f"{reference.registry} has no {reference.repository} {reference.version}"
        raise PackageFault("registry_missing", message, "check the reference, and whether you have to log in")
    return found


async def get_signatures(registry: RegistryClient, subject: str) -> list[bytes]:
    """The signatures that the registry has for the package or image with this digest. Who signed what is
    still to be judged. Raises PackageFault."""
    found = []
    for referrer in await registry.referrers(subject):
        manifest = await registry.get_manifest(referrer.digest)
        if manifest is not None:
            layer, content = read_signature(manifest[0], subject), BytesIO()
            await registry.get_blob(layer, content)
            found.append(content.getvalue())
    return found


def require_trusted(state: SignatureState, *, required: bool, reference: Reference | None = None) -> None:
    """`reference`: of a package that is stored. Raises PackageFault."""
    if not required or state.status == "trusted":
        return
    if state.status == "untrusted":
        raise PackageFault(state.rule, state.reason, state.hint)
    where = "the registry has" if reference is None else "the store has"
    message = f"{where} no signature of the package, and one of a trusted key is required"
    hint = "ask its publisher to sign it and push it again"
    if reference is not None:
        hint = f"ask the registry for one: runner install --update {reference}"
    raise PackageFault("signature_missing", message, hint)


def unpack_pulled(file: IO[bytes], pulled: PulledPackage, folder: str, *, read_only: bool = False) -> None:
    """Write the files of a package, and its signature, into a new folder. `read_only`: of the files, not of
    the folders. Raises PackageFault and OSError."""
    os.mkdir(folder, 0o755)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        file.seek(0)
        extract(read_tar(file), fd, read_only=read_only)
    except UNREADABLE as error:
        raise PackageFault(
            "package_tar", f"the package cannot be unpacked: {printable(str(error))}"
        ) from None
    finally:
        os.close(fd)
    if pulled.signature.document:
        with open(os.path.join(folder, SIGNATURE_NAME), "xb") as signature:
            signature.write(pulled.signature.document)
            os.fchmod(signature.fileno(), 0o444 if read_only else 0o644)


def _keep(
    store: Store,
    reference: Reference,
    file: IO[bytes],
    pulled: PulledPackage,
    trust: str | None,
    contract: str | None,
    update: bool,
    older: bool,
    accept: Accept,
) -> StoredPackage:
    """Unpack the package into the store. Raises PackageFault, and _Busy."""
    with _holding(store), store.changing(_raise_busy), store.new_set() as new:
        before = find_stored(reference, store, trust=trust)  # others may have changed it meanwhile
        if before is not None and not update:
            return before
        tree = os.path.join(new, "tree")
        unpack_pulled(file, pulled, tree, read_only=True)
        plugin = read_plugin(tree, reference, contract)
        require_identity(pulled.signature, plugin)
        if before is not None and not older:
            _require_newer(before, plugin, reference)
        if not accept(before, plugin, pulled.manifest.digest):
            assert before is not None  # the first is asked for before anything is fetched
            return before
        packages = [Locked(plugin.id, plugin.version, pulled.manifest.digest)]
        if document := pulled.signature.document:
            packages.append(Locked(SIGNATURE_NAME, parse_signature(document).key_id, digest_of(document)))
        lock = Lock("oci", "", tuple(packages))
        versions = ((plugin.id, plugin.version),)
        store.add(Installed(request_of(reference), lock.name, (), versions), lock, new, read_only=True)
        path = store.tree(lock.name)
    plugin = read_plugin(path, reference, contract)
    return StoredPackage(path, pulled.manifest.digest, reference, plugin, pulled.signature)


def _require_newer(before: StoredPackage, plugin: Plugin, reference: Reference) -> None:
    if plugin.id != before.plugin.id:
        message = f"{reference} was {before.plugin.id} and is {plugin.id} now"
        raise PackageFault("version_other", printable(message), "if that is meant, add --downgrade")
    if is_older(plugin.version, before.plugin.version):
        message = (
            f"{reference} is {plugin.version} now, which is older than {before.plugin.version}, "
            "the one that is installed"
        )
        raise PackageFault("version_older", printable(message), "if that is meant, add --downgrade")

"""The folder in which imported packages lie: copies of folders and tars, and what registries gave.

    STORE/NAME/package/     a copy; NAME is the digest of its files and its signature
    STORE/oci/              a store of packages from registries (runner/oci)

A copy is made of the bytes that were hashed, under another name, and renamed when it is complete. Nobody but
the user of the daemon can write there.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Collection
from typing import NamedTuple

from runner.install.store import Store
from runner.manifest.load import find
from runner.package.fault import PackageFault
from runner.package.listing import FileList, list_package
from runner.package.signature import read_signature
from runner.package.snapshot import PACKAGE, PackageCopier, open_copies
from sandbox.document.diagnostic import DocumentError
from sandbox.identity.removal import remove_tree
from sandbox.paths.walk import LinkRefused, TooManyLinks

_OCI = "oci"
_TARS = (".tar", ".tar.gz", ".tgz")
_COPY = re.compile(r"([0-9a-f]{64}|new\.[0-9a-f]{32})\Z")


class ImportedFiles(NamedTuple):
    """The files of a package in the store."""

    folder: str
    listing: FileList
    signature: str  # the document; empty: there is none
    source: str


class PackageFolder:
    """The store. Its methods block. All raise PackageFault."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def of_registries(self) -> Store:
        """Where packages of registries are fetched to. Nothing of it is removed."""
        return Store(os.path.join(self.path, _OCI))

    def add(self, source: str) -> ImportedFiles:
        """Copy the package in a folder, or in a tar."""
        if not os.path.isdir(source) and not (source.endswith(_TARS) and os.path.isfile(source)):
            message = f"{source} is neither a folder nor a tar ({', '.join(_TARS)})"
            raise PackageFault("package_none", message, "name the folder of a package, or a tar of it")
        try:
            root = os.path.dirname(find(source).path)
            place, parent = open_copies(self.path)
        except DocumentError as error:
            first = error.diagnostics[0]
            raise PackageFault(first.rule, first.text(), first.hint) from None
        except (OSError, LinkRefused, TooManyLinks) as error:
            raise self._fault(error) from None
        new = f"new.{secrets.token_hex(16)}"
        try:
            listing, signature = self._copy(root, parent, new)
            name = hashlib.sha256(listing.text + b"\0" + signature).hexdigest()
            os.sync()  # a copy that has its name is complete, also after a power cut
            try:
                os.rename(new, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError:
                if not os.path.isdir(os.path.join(place, name)):
                    raise
                remove_tree(new, parent, os.geteuid())  # it was imported before, or by another just now
        except OSError as error:
            remove_tree(new, parent, os.geteuid())
            raise self._fault(error) from None
        except BaseException:
            remove_tree(new, parent, os.geteuid())
            raise
        finally:
            os.close(parent)
        return ImportedFiles(os.path.join(place, name, PACKAGE), listing, signature.decode(), source)

    def _copy(self, root: str, parent: int, new: str) -> tuple[FileList, bytes]:
        os.mkdir(new, 0o700, dir_fd=parent)
        holder = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            with PackageCopier(holder) as copier:
                listing = list_package(root, copier)
                copier.finish()
            os.fchmod(holder, 0o711 if os.geteuid() == 0 else 0o700)
            signature = b""
            try:
                signature = read_signature(f"/proc/self/fd/{holder}/{PACKAGE}")
                signature.decode()
            except PackageFault as fault:
                if fault.rule != "signature_missing":
                    raise
            except UnicodeDecodeError:
                raise PackageFault("signature_malformed", "the signature is not UTF-8") from None
            return listing, signature
        finally:
            os.close(holder)

    def sweep(self, used: Collection[str]) -> None:
        """Remove copies that no package has: of imports that were interrupted or refused, and of signatures
        that were replaced. Only when no plugin runs."""
        try:
            place, parent = open_copies(self.path)
        except (OSError, LinkRefused, TooManyLinks) as error:
            raise self._fault(error) from None
        try:
            for name in filter(_COPY.match, os.listdir(parent)):
                if os.path.join(place, name, PACKAGE) not in used:
                    remove_tree(name, parent, os.geteuid())
        except OSError as error:
            raise self._fault(error) from None
        finally:
            os.close(parent)

    def _fault(self, error: Exception) -> PackageFault:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        message = f"the package cannot be stored in {self.path}: {why}"
        return PackageFault("store_refused", message, "make room there, and let the daemon write to it")

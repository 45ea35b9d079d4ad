"""The layers of an image, merged into one tree.

The tree is put together in memory: names, links, and the digests of files. Only the contents go to the disk
at once, each under its digest, so no name of a layer is a path of ours before all layers were read. Links
are followed in memory, where there is nothing outside. In the end the tree is written once, parents before
children: nothing that is written passes through a link.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from runner.install.files import FileStore
from runner.install.store import link_digest
from runner.manifest.unpack import UNREADABLE, UnfitTar
from runner.oci.layer import MOST_DEPTH, MOST_PATH, LayerEntry, path_parts
from runner.package.fault import PackageFault
from sandbox.document.diagnostic import printable, quoted
from sandbox.network.credentials import AUTHORITIES

# Of all layers together, also those that a later layer replaces, and with the folders above them: one entry
# may make a hundred.
MOST_ENTRIES = 500_000
# Characters of all its paths and links. They compress well, and each may have 4 KB, which is held in memory.
MOST_TEXT = 100_000_000
# On the ways to all of them, and through folders that are marked as replaced: a layer may repeat these.
MOST_STEPS = 50_000_000
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40  # on the way to one file
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
# What the cage puts over the image: it mounts nothing where there is nothing to mount it on.
_CAGE_FOLDERS = ("proc", "dev", "sys", "tmp", "run", "etc")
_HIDDEN_FOLDERS = ("proc", "dev", "sys", "tmp")  # the cage has its own: what the image has there is not seen
_CAGE_FILES = ("etc/resolv.conf", "etc/hosts", "etc/nsswitch.conf")
_AUTHORITIES = AUTHORITIES[0].lstrip("/")  # the image's own, where it has one


class ImageFile(NamedTuple):
    digest: str
    executable: bool
    layer: int


class ImageLink(NamedTuple):
    target: str
    layer: int


class ImageFolder:
    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.children: dict[str, ImageNode] = {}


ImageNode = ImageFile | ImageLink | ImageFolder


class ImageTree:
    """`files`: takes the contents. The methods raise PackageFault and OSError."""

    def __init__(self, files: FileStore) -> None:
        self.root = ImageFolder(0)
        self._files = files
        self._layer = 0
        self._entries = self._steps = self._text = 0

    def add_layer(self, entries: Iterator[LayerEntry]) -> None:
        self._layer += 1
        with _refusing("a layer of the image cannot be unpacked"):
            for entry in entries:
                self._count_entry()
                self._add(entry)

    def _add(self, entry: LayerEntry) -> None:
        if not entry.parts:  # the root is there
            return
        *above, name = entry.parts
        if any(part.startswith(_WHITEOUT) for part in above):
            raise UnfitTar(f"{_shown(entry.parts)} is below the mark of something removed")
        if name.startswith(_WHITEOUT):
            self._remove(above, name)
            return
        folder = self._folder(above)
        old = folder.children.get(name)
        match entry.kind:
            case "folder" if isinstance(old, ImageFolder):
                old.layer = self._layer
                return
            case "folder":
                node: ImageNode = ImageFolder(self._layer)
            case "file":
                node = ImageFile(
                    self._files.add(entry.content, entry.executable), entry.executable, self._layer
                )
            case "link":
                self._count_text(entry.target)
                node = ImageLink(entry.target, self._layer)
            case "hard link":
                node = self._linked(entry)
            case _:
                # A device takes the place of what an earlier layer has there, and is left out.
                folder.children.pop(name, None)
                return
        folder.children[name] = node

    def _remove(self, above: Sequence[str], name: str) -> None:
        """Take away what earlier layers have. What this layer has already added stays."""
        gone = name.removeprefix(_WHITEOUT)
        if gone in ("", ".", ".."):
            raise UnfitTar(f"{_shown((*above, name))} removes nothing that has a name")
        folder = self._find(above)
        if not isinstance(folder, ImageFolder):
            return
        if name == _OPAQUE:
            self._drop_older(folder)
        elif not name.startswith(_WHITEOUT * 2):  # marks of other kinds, which aufs had
            node = folder.children.get(gone)
            if isinstance(node, ImageFolder) and self._drop_older(node):
                return
            if node is not None and (isinstance(node, ImageFolder) or node.layer != self._layer):
                del folder.children[gone]

    def _drop_older(self, folder: ImageFolder) -> bool:
        """Returns whether something of this layer is in it."""
        for name, node in list(folder.children.items()):
            self._step()
            newer = node.layer == self._layer
            if isinstance(node, ImageFolder):
                newer = self._drop_older(node) or newer
            if not newer:
                del folder.children[name]
        return bool(folder.children) or folder.layer == self._layer

    def _count_entry(self) -> None:
        self._entries += 1
        if self._entries > MOST_ENTRIES:
            raise UnfitTar(f"it and those below it have more than {MOST_ENTRIES} files and folders")

    def _count_text(self, text: str) -> None:
        self._text += len(text)
        if self._text > MOST_TEXT:
            raise UnfitTar(f"its paths and links have more than {MOST_TEXT} characters together")

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise UnfitTar(f"its names and marks lead through folders and links more than {MOST_STEPS} times")

    def _linked(self, entry: LayerEntry) -> ImageNode:
        target = self._find(path_parts(entry.target), follow_last=False)
        if target is None or isinstance(target, ImageFolder):
            raise UnfitTar(
                f"{_shown(entry.parts)} is a hard link to {quoted(entry.target, 200)}, which is no file"
            )
        return target._replace(layer=self._layer)

    # --- ways in the tree ---------------------------------------------------------------------------------

    def _folder(self, parts: Sequence[str]) -> ImageFolder:
        """The folder of this path, with those above it. Missing ones are made."""
        found = self._find(parts, make=True)
        if not isinstance(found, ImageFolder):
            raise UnfitTar(f"{_shown(parts)} is a file, and a folder too")
        return found

    def _find(
        self, parts: Sequence[str], *, make: bool = False, follow_last: bool = True
    ) -> ImageNode | None:
        """What a path leads to. Links are followed as in the image's own root: ".." of that is itself."""
        steps: list[ImageFolder] = [self.root]
        todo, links = list(reversed(parts)), 0
        node: ImageNode = self.root
        while todo:
            name = todo.pop()
            self._step()
            if name in ("", "."):
                continue
            if name == "..":
                if len(steps) > 1:
                    steps.pop()
                node = steps[-1]
                continue
            if len(steps) > MOST_DEPTH:
                raise UnfitTar(f"{_shown(parts)} leads to folders more than {MOST_DEPTH} deep")
            found = steps[-1].children.get(name)
            if found is None and make:
                self._count_entry()
                found = steps[-1].children[name] = ImageFolder(self._layer)
            if found is None:
                return None
            if isinstance(found, ImageLink) and (todo or follow_last):
                links += 1
                if links > _MOST_LINKS:
                    raise UnfitTar(f"{_shown(parts)} leads through more than {_MOST_LINKS} links")
                if found.target.startswith("/"):
                    del steps[1:]
                todo += reversed(found.target.split("/"))
                node = steps[-1]
                continue
            node = found
            if isinstance(found, ImageFolder):
                steps.append(found)
            elif todo:
                return found if make else None
        return node

    # --- the end ------------------------------------------------------------------------------------------

    def make_places(self, directory: str) -> None:
        """Make what the cage mounts its own files on, and the working directory of the image."""
        self._layer += 1
        with _refusing("the working directory of the image cannot be made"):
            self._folder(path_parts(directory))
        empty = self._files.add((), False)
        for name in _CAGE_FOLDERS:
            if name in _HIDDEN_FOLDERS or not isinstance(self.root.children.get(name), ImageFolder):
                self.root.children[name] = ImageFolder(self._layer)
        for path in (*_CAGE_FILES, _AUTHORITIES):
            node: ImageNode = self.root
            *above, name = path.split("/")
            for part in above:
                if isinstance(node, ImageFolder):
                    node = node.children.setdefault(part, ImageFolder(self._layer))
            if isinstance(node, ImageFolder) and (path in _CAGE_FILES or name not in node.children):
                node.children[name] = ImageFile(empty, False, self._layer)

    def write(self, path: str) -> list[tuple[str, str]]:
        """Write the tree into a new folder. Returns each file and link with its digest, as the store lists
        them."""
        os.mkdir(path, 0o755)
        fd = os.open(path, _OPEN_FOLDER)
        try:
            with _refusing("the image cannot be unpacked"):
                return list(self._write(self.root, fd, ""))
        finally:
            os.close(fd)

    def _write(self, folder: ImageFolder, fd: int, above: str) -> Iterator[tuple[str, str]]:
        for name, node in sorted(folder.children.items()):
            path = above + name
            if len(os.fsencode(path)) > MOST_PATH:
                raise UnfitTar(f"one of its paths has more than {MOST_PATH} bytes: {quoted(path, 100)}")
            self._count_text(path)
            if isinstance(node, ImageFile):
                self._files.link(node.digest, node.executable, name, fd)
                yield path, node.digest
            elif isinstance(node, ImageLink):
                os.symlink(node.target, name, dir_fd=fd)
                yield path, link_digest(node.target)
            else:
                os.mkdir(name, 0o755, dir_fd=fd)
                inner = os.open(name, _OPEN_FOLDER, dir_fd=fd)
                try:
                    yield from self._write(node, inner, path + "/")
                finally:
                    os.close(inner)


def _shown(parts: Sequence[str]) -> str:
    return quoted("/".join(parts), 200)


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Tell what of a stranger's tar is wrong. Raises PackageFault."""
    try:
        yield
    except UNREADABLE as error:
        raise PackageFault(
            "image_layer", f"{message}: {printable(str(error))}", "nothing was stored"
        ) from None

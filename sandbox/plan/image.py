"""An image as the root of a cage: which of its files are mounted where, and what takes the changes.

    a layer      the whole tree, and above it an overlay whose changes are in memory. The root can be written
    no layer     each file and folder of the tree, read-only; /tmp, /run, /var/tmp and the home in memory.
                 Where the kernel refuses an overlay, or the image is asked for read-only

bwrap makes the places of mounts while it still sees the host, and before 0.12 follows links there. So each
place is looked up in the tree first: none may lead through a link (sandbox/paths/in_tree.py).
"""

from __future__ import annotations

import os
import stat

from sandbox import look
from sandbox.network.credentials import AUTHORITIES, BUNDLE
from sandbox.network.ssh import FOLDER as AGENT_FOLDER
from sandbox.paths.executable import ProgramFault
from sandbox.paths.in_tree import find_in_tree, find_obstacle
from sandbox.paths.mounts import contains, join, relative
from sandbox.paths.program import SYSTEM_PATH, Program
from sandbox.plan.operations import folder_size
from sandbox.plan.plan import Operation, PlanRefused, PlanRequest, Symlink
from sandbox.plan.relocation import Relocation
from sandbox.spec import Denial, Grant, ImageRoot, Note
from sandbox.speed.typed import Collection, Iterable, Iterator, Mapping, Sequence
from sandbox.speed.value import NamedTuple

# Places that the cage fills in every image. Nothing of the host may be shown there.
_OWN_FOLDERS = ("/proc", "/dev", "/sys")
_OWN_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", BUNDLE, AGENT_FOLDER)
_WRITABLE = ("/tmp", "/run", "/var/tmp")
_MOST_SEARCHED = 256  # folders of its PATH, whose text may be as long as an argument
_MOST_PARTS = 400  # each is a mount of its own, which takes bwrap 0.4 ms


class ImagePart(NamedTuple):
    path: str  # on the host
    dest: str


class ImageCage(NamedTuple):
    """How the image becomes the root of one cage."""

    layer_bytes: int  # of the layer in memory; 0: there is none
    parts: tuple[ImagePart, ...]
    links: tuple[Symlink, ...] = ()
    folders: tuple[str, ...] = ()  # in memory
    authorities: tuple[ImagePart, ...] = ()  # of the host's own, in the places that the image has for them
    why_no_layer: str = ""

    @property
    def dests(self) -> frozenset[str]:
        return frozenset(part.dest for part in self.parts)

    @property
    def own_dests(self) -> frozenset[str]:
        """What is mounted without being asked for."""
        return self.dests.union(part.dest for part in self.authorities)

    def note(self, image: ImageRoot) -> Note:
        message = f"{image.reference} is its root; what it changes there is in memory and ends with it"
        if not self.layer_bytes:
            places = ", ".join(("/tmp", *self.folders))
            message = f"{image.reference} is its root, read-only but for {places} ({self.why_no_layer})"
        return Note("image", message)


def image_cage(
    image: ImageRoot, grant: Grant, dests: Collection[str], uid_range: tuple[int, int] | None
) -> ImageCage:
    """`dests`: where something of the host is mounted. Raises PlanRefused."""
    authorities = tuple(
        part for part in _authorities(image.tree) if not any(contains(dest, part.dest) for dest in dests)
    )
    why = "it is asked for read-only" if image.read_only else _layer_fault(image.tree, uid_range)
    own = (*image.folders, *_missing_directory(image, dests))
    if not why:
        whole = ImagePart(image.tree, "/")
        return ImageCage(folder_size(grant.limits.tmp), (whole,), folders=own, authorities=authorities)
    home = () if image.home == "/" or image.read_only else (image.home,)
    wanted = own if image.read_only else (*_WRITABLE, *home, *own)
    folders = tuple(
        dict.fromkeys(
            path
            for path in wanted
            if path != "/tmp" and find_obstacle(image.tree, path, is_folder=True) is None
        )
    )
    # What is in memory hides what the image has there. What is mounted in it is made in it.
    new = [path for path in dests if not any(contains(folder, path) for folder in folders)]
    parts, links = _expand(image.tree, (*new, *folders), frozenset(dests))
    return ImageCage(0, tuple(parts), tuple(links), folders, authorities, why)


def _missing_directory(image: ImageRoot, dests: Collection[str]) -> Iterator[str]:
    """The working directory, if it has to be made, as docker does it: the image does not have it, or the cage
    has a folder in memory above it."""
    directory = image.directory or "/"
    made = any(contains(dest, directory) or contains(directory, dest) for dest in dests)
    if made or directory in ("/tmp", *image.folders) or any(contains(own, directory) for own in _OWN_FOLDERS):
        return
    hidden = any(contains(folder, directory) for folder in ("/tmp", *image.folders))
    missing = find_in_tree(image.tree, directory) is None
    if hidden or (missing and find_obstacle(image.tree, directory, is_folder=True) is None):
        yield directory


def _authorities(tree: str) -> Iterator[ImagePart]:
    own = next((look.realpath(path) for path in AUTHORITIES if look.isfile(path)), "")
    for path in AUTHORITIES if own else ():
        found = find_in_tree(tree, path)
        if found is not None and found.path == path and stat.S_ISREG(found.status.st_mode):
            yield ImagePart(own, path)


def _expand(tree: str, dests: Iterable[str], taken: Collection[str]) -> tuple[list[ImagePart], list[Symlink]]:
    """The files, folders and links of the tree one by one, as far down as something has to be made. `taken`:
    has something of the host in its place."""
    missing = [dest for dest in dests if find_in_tree(tree, dest) is None]
    parts: list[ImagePart] = []
    links: list[Symlink] = []
    todo = ["/"]
    while todo:
        folder = todo.pop()
        for name in sorted(look.listdir(join(tree, folder[1:]))):
            dest = join(folder, name)
            real = join(tree, dest[1:])
            if dest in (*_OWN_FOLDERS, "/tmp") or dest in taken:
                continue
            mode = look.lstat(real).st_mode
            if stat.S_ISLNK(mode):
                links.append(Symlink(dest, look.readlink(real)))
            elif any(contains(dest, path) for path in missing):
                todo.append(dest)
            else:
                parts.append(ImagePart(real, dest))
    if len(parts) + len(links) > _MOST_PARTS:
        reason = f"without a layer in memory its image would take {len(parts) + len(links)} mounts"
        raise PlanRefused(
            [Denial("image", tree, reason, "show what it needs in a folder that the image has")]
        )
    return parts, links


def place_denials(
    image: ImageRoot, grant: Grant, folders: Iterable[str], files: Iterable[str]
) -> list[Denial]:
    """Why something cannot be mounted where it is asked for, in this image. `folders` and `files`: the places
    of what is mounted."""
    shown = tuple(folders)
    asked = [(path, True) for path in (*shown, *image.folders)] + [(path, False) for path in files]
    if grant.scratch is not None:
        asked.append((grant.scratch.dest, True))
    asked += [(file.dest, False) for file in grant.memory_files]
    # The root itself would be taken for the image's own.
    asked += [(path, True) for _, path in image.places if path == "/"]
    found = []
    for path, is_folder in asked:
        reason = ""
        # In a folder of the host that is shown there, bwrap would make the places of these.
        if any(contains(path, own) or contains(own, path) for own in (*_OWN_FOLDERS, *_OWN_FILES)):
            reason = "the cage has files of its own there"
        elif path in image.folders and any(contains(folder, path) for folder in shown):
            reason = "it is in a folder of the host, which is mounted over it"
        elif (obstacle := find_obstacle(image.tree, path, is_folder=is_folder)) is not None:
            told = f"a link to {obstacle.target}" if obstacle.kind == "link" else f"a {obstacle.kind}"
            reason = f"in the image {obstacle.path} is {told}"
        if reason:
            hint = "choose another path in the image"
            found.append(Denial("image_place", path, f"nothing can be shown at {path}: {reason}", hint))
    return found


def nested_denials(
    shown: Mapping[str, str], folders: Iterable[str], files: Iterable[str], moved: Collection[str]
) -> Iterator[Denial]:
    """Why something cannot be mounted in a folder of the host that is shown. bwrap would make a missing place
    there, on the host, and before 0.12 follow links on the way. `shown`: folders by their path in the cage,
    with that on the host. `moved`: what has another path in the cage; of the rest a source is its own place.
    """
    for path, is_folder in (*((each, True) for each in folders), *((each, False) for each in files)):
        for dest, real in shown.items():
            is_moved = dest in moved or path in moved
            if dest == path or not contains(dest, path) or not is_moved:
                continue
            inside = "/" + relative(path, dest)
            obstacle = find_obstacle(real, inside, is_folder=is_folder)
            if obstacle is None and find_in_tree(real, inside) is not None:
                continue
            there = (
                f"{inside[1:]} is missing"
                if obstacle is None
                else f"{obstacle.path[1:]} is a {obstacle.kind}"
            )
            reason = f"{dest} shows {real} of the host, and {there} in it"
            hint = f"make a {'folder' if is_folder else 'file'} there, or choose another path in the image"
            yield Denial("image_place", path, f"nothing can be shown at {path}: {reason}", hint)


def link_denials(image: ImageRoot, cage: ImageCage, operations: Iterable[Operation]) -> list[Denial]:
    """Why the cage's own files cannot be made in this image: bwrap writes them before the image is all that
    there is, and before 0.12 follows links there, to files of the host."""
    own = cage.own_dests.union(link.dest for link in cage.links)
    dests = dict.fromkeys((BUNDLE, *(op.dest for op in operations if op.dest not in own)))
    found = []
    for dest in dests:
        obstacle = find_obstacle(image.tree, dest, is_folder=True)
        if obstacle is not None and obstacle.kind == "link":
            reason = f"the cage has {dest}, and in the image {obstacle.path} is a link to {obstacle.target}"
            found.append(Denial("image_place", dest, reason, "use an image without that link"))
    return found


# --- its program --------------------------------------------------------------------------------------------


def image_program(
    request: PlanRequest, image: ImageRoot, dests: Sequence[str], relocation: Relocation
) -> Program:
    """The program of the request, by its path in the cage. `dests`: what shows files of the host. Raises
    ProgramFault."""
    if not look.isdir(image.tree):
        told = f"the image {image.reference} was removed while it was looked at"
        raise ProgramFault(told, f"install it again: runner install docker://{image.reference}", found=False)
    program, *chosen = request.approved_program or (image.tree, image.package)
    if program != image.tree or (image.package and image.package not in chosen):
        other = f"{image.reference} is another image than the one that was allowed"
        if program == image.tree:
            other = f"{image.package} has other packages than those that were allowed"
        raise ProgramFault(
            other,
            "allow it again",
            found=True,
            denied=True,
        )
    command = request.command
    if "/" in command:
        directory = relocation.place(request.directory)
        start = directory if any(contains(dest, directory) for dest in dests) else image.directory
        paths = [os.path.normpath(os.path.join(start, relocation.place(command)))]
    else:
        search_path = dict(image.env).get("PATH") or SYSTEM_PATH
        folders = dict.fromkeys(each for each in search_path.split(":") if each.startswith("/"))
        paths = [join(folder, command) for folder in list(folders)[:_MOST_SEARCHED]]
    for path in paths:
        if any(contains(dest, path) for dest in dests) or _is_program(image.tree, path):
            return Program((path, *request.args), (), (), (), (), (), ())
    hint = "name one that is in it: only the image's own files are there"
    if image.package:
        hint = f"its packages were fetched for {command}: name an image that has that"
    raise ProgramFault(f"the image {image.reference} has no program {command}", hint, found=False)


def image_directory(image: ImageRoot, cage: ImageCage, dests: Iterable[str]) -> str:
    """Where the program starts. Raises PlanRefused."""
    directory = image.directory or "/"
    places = (*dests, *cage.folders, "/tmp")
    if any(contains(place, directory) or contains(directory, place) for place in places):
        return directory
    found = find_in_tree(image.tree, directory)
    if found is None or not stat.S_ISDIR(found.status.st_mode):
        reason = f"{image.reference} has no folder {directory} to start in"
        raise PlanRefused([Denial("image_place", directory, reason, "name one that it has")])
    return directory


def _is_program(tree: str, path: str) -> bool:
    found = find_in_tree(tree, path)
    return found is not None and stat.S_ISREG(found.status.st_mode) and bool(found.status.st_mode & 0o111)


# --- whether there can be a layer ---------------------------------------------------------------------------


def _layer_fault(tree: str, uid_range: tuple[int, int] | None) -> str:
    """Why this kernel mounts no layer in memory above the tree, or ''. Tried, in a child, as the launch would
    do it: kernels, filesystems and containers differ."""
    from sandbox.spawn.trial import LayerTrial, try_layer

    fd = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    mapped = -1
    try:
        uid, gid = os.geteuid(), os.getegid()
        if uid_range is not None:
            from sandbox.identity.idmap import FileOwner, IdmapUnavailable, idmapped_mount

            uid = gid = uid_range[0]
            held = os.fstat(fd)
            try:
                mapped = idmapped_mount(
                    fd, FileOwner(held.st_uid, held.st_gid), FileOwner(uid, gid), read_only=True
                )
            except IdmapUnavailable as refused:
                return f"owners cannot be mapped there: {os.strerror(refused.errno)}"
        code = try_layer(LayerTrial(uid, gid, uid_range is not None, fd, tree, mapped))
        return f"the kernel says: {os.strerror(code)}" if code else ""
    finally:
        os.close(fd)
        if mapped >= 0:
            os.close(mapped)

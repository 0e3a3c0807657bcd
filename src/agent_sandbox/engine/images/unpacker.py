"""Unpack the archive of an image. This runs inside a sandbox, as the program of a guest: the archive may be hostile.

The archive is that of `podman save` and `docker save`: manifest.json, the configuration, and a tar of each layer. Regular files,
directories and links are unpacked below /root-of-image, as the layers say, one over the other. Devices, pipes, setuid bits and names that
leave the root are left out and counted. Nothing else of the sandbox outlives it, so a link can lead nowhere that matters; it is resolved
inside the root all the same, as a container engine would. Only the standard library is there.

Prints one line of JSON: the configuration, the number of entries, and what was left out.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tarfile
from typing import IO

ARCHIVE, TOP = "/archive.tar", "/root-of-image"
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
LONGEST_CHAIN, DEEPEST = 40, 200
MOST_CONFIGURATION = 4 << 20
# What content that makes no sense raises.
NO_SENSE = (ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError)
left_out: collections.Counter[str] = collections.Counter()
privileged = os.getuid() == 0


class BadArchive(Exception):
    """The archive is not that of an image."""


def inside(parts: list[str], chain: int = 0) -> str:
    """Return the path, below the root, that these names lead to, with links resolved inside the root. Its last name is not resolved."""
    done: list[str] = []
    for index, part in enumerate(parts[:-1]):
        if part == "..":
            done = done[:-1]
            continue
        here = os.path.join(TOP, *done, part)
        if os.path.islink(here):
            if chain >= LONGEST_CHAIN:
                raise BadArchive("links in a circle")
            target = os.readlink(here)
            before = [] if target.startswith("/") else done
            return inside([*before, *names_of(target), *parts[index + 1 :]], chain + 1)
        done.append(part)
    if len(done) > DEEPEST:
        raise BadArchive("directories that are nested too deep")
    return os.path.join(TOP, *done, parts[-1]) if parts else TOP


def names_of(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def remove(path: str) -> None:
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for entry in os.listdir(path):
        remove(os.path.join(path, entry))
    os.rmdir(path)


def make_parents(path: str) -> None:
    above = os.path.dirname(path)
    if os.path.isdir(above):
        return
    make_parents(above)
    if os.path.lexists(above):
        os.unlink(above)
    os.mkdir(above, 0o755)


def dress(path: str, member: tarfile.TarInfo) -> None:
    """Give an entry its owner, mode and time."""
    if privileged:
        os.chown(path, member.uid & 0xFFFF, member.gid & 0xFFFF, follow_symlinks=False)
    if not member.issym():
        if member.mode & 0o6000:
            left_out["setuid and setgid bits"] += 1
        os.chmod(path, member.mode & 0o1777 | (0o700 if member.isdir() and not privileged else 0))
        os.utime(path, (member.mtime, member.mtime))


def write(layer: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    make_parents(path)
    if member.islnk() and inside(names_of(member.linkname)) == path and os.path.lexists(path):
        return  # a file that an archiver was given twice
    if not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        remove(path)
    if member.isdir():
        if not os.path.isdir(path):
            os.mkdir(path, 0o700)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        target = inside(names_of(member.linkname))
        if not os.path.lexists(target) or os.path.isdir(target):
            left_out["links to what is not there"] += 1
            return
        os.link(target, path, follow_symlinks=False)
        return
    else:
        source = content_of(layer, member)
        with open(path, "xb") as file:
            while chunk := source.read(1 << 20):
                file.write(chunk)
    dress(path, member)


def delete(path: str, brought: set[str]) -> None:
    """Delete what the layers below have at this path. What this layer has brought stays, wherever in it the deletion is written."""
    if path not in brought:
        remove(path)
    elif os.path.isdir(path) and not os.path.islink(path):
        for entry in os.listdir(path):
            delete(os.path.join(path, entry), brought)


def note(path: str, brought: set[str]) -> None:
    """Note that the layer has brought this path, and so the directories above it."""
    while len(path) > len(TOP) and path not in brought:
        brought.add(path)
        path = os.path.dirname(path)


def unpack(layer: tarfile.TarFile) -> int:
    """Unpack one layer over those before it. Return the number of its entries."""
    count, times, brought = 0, list[tuple[list[str], float]](), set[str]()
    while (member := layer.next()) is not None:
        layer.members.clear()  # type: ignore[attr-defined]  # a layer may have a million entries
        count += 1
        parts = names_of(member.name)
        if ".." in parts or any("\0" in part or len(os.fsencode(part)) > 255 for part in parts):
            left_out["names that leave the image"] += 1
            continue
        if not parts:
            continue
        if parts[-1] == OPAQUE:
            directory = inside([*parts[:-1], "x"])[:-2]
            for entry in os.listdir(directory) if os.path.isdir(directory) else ():
                delete(os.path.join(directory, entry), brought)
        elif parts[-1].startswith(WHITEOUT):
            if (name := parts[-1][len(WHITEOUT) :]) in ("", ".", ".."):
                left_out["names that leave the image"] += 1
            else:
                delete(inside([*parts[:-1], name]), brought)
        elif member.ischr() or member.isblk() or member.isfifo():
            left_out["devices and pipes"] += 1
        elif member.isfile() or member.isdir() or member.issym() or member.islnk():
            path = inside(parts)
            write(layer, member, path)
            note(path, brought)
            if member.isdir():
                times.append((parts, member.mtime))
        else:
            left_out["entries of other kinds"] += 1
    for parts, when in reversed(times):
        if os.path.isdir(path := inside(parts)) and not os.path.islink(path):
            os.utime(path, (when, when))
    return count


def member_of(archive: tarfile.TarFile, name: str) -> bytes:
    """Return the bytes of a small file of the archive."""
    member = archive.getmember(name)
    if not member.isfile() or member.size > MOST_CONFIGURATION:
        raise BadArchive(f"{name[:80]} is not a small file")
    return content_of(archive, member).read()


def content_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Return the content of a regular file. Raises `BadArchive` for another kind of entry."""
    content = archive.extractfile(member)
    if content is None:
        raise BadArchive(f"{member.name[:80]} is not a file")
    return content


def main() -> None:
    """Unpack the archive, and print what it was."""
    try:
        with tarfile.open(ARCHIVE, "r:*") as archive:
            manifests = json.loads(member_of(archive, "manifest.json"))
            if len(manifests) != 1:
                raise BadArchive(f"it holds {len(manifests)} images, not one")
            config = json.loads(member_of(archive, manifests[0]["Config"]))
            count = 0
            for name in manifests[0]["Layers"]:
                with tarfile.open(fileobj=content_of(archive, archive.getmember(name)), mode="r:*") as layer:
                    count += unpack(layer)
            said = {"config": config, "names": manifests[0].get("RepoTags") or [], "entries": count, "left_out": dict(left_out)}
            sys.stdout.write(json.dumps(said))
    except (BadArchive, tarfile.TarError, *NO_SENSE) as error:
        sys.stderr.write(f"not the archive of an image: {type(error).__name__}: {error}"[:400])
        sys.exit(65)
    except OSError as error:
        sys.stderr.write(f"it cannot be unpacked: {error}"[:400])
        sys.exit(74)


if __name__ == "__main__":
    main()

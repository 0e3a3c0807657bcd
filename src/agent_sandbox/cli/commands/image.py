"""`image`: list the container images that runs can use, add one from podman, docker, an archive or this machine, and remove one."""

from __future__ import annotations

import time
from typing import Literal

from agent_sandbox._fast.values import assert_never, dataclass
from agent_sandbox.cli.options import read_names
from agent_sandbox.cli.parser import Request, UsageError
from agent_sandbox.cli.render.messages import Console, human_size, shown
from agent_sandbox.cli.results import VerbResult, declined
from agent_sandbox.container_images import ContainerImage, add_image, image_from_machine, list_images, load_image, remove_image

Question = Literal["list", "add", "load", "from-machine", "remove"]
_OPTIONS: dict[Question, tuple[str, ...]] = {
    "list": (),
    "add": ("--pull",),
    "load": ("--name",),
    "from-machine": ("--with",),
    "remove": ("--yes",),
}


@dataclass(frozen=True)
class ImageOptions:
    """Options of `image`: what is asked for, the image or the file, and how it is made."""

    question: Question = "list"
    what: str = ""
    pull: bool = False
    packages: tuple[str, ...] = ()
    name: str = ""
    yes: bool = False

    @classmethod
    def read(cls, request: Request) -> ImageOptions:
        """Read the words of a request. Raises `UsageError`."""
        word, *rest = request.words or ("list",)
        question = next((each for each in _OPTIONS if each == word), None)
        if question is None or len(rest) != (question != "list"):
            why = f"image takes list, add NAME, load FILE, from-machine NAME or remove NAME, not {' '.join(request.words)!r}"
            raise UsageError(why, hint="see: agent-sandbox help image")
        for option in ("--pull", "--with", "--name", "--yes"):
            if request.has(option) and option not in _OPTIONS[question]:
                raise UsageError(f"{option} does not go with image {question}", hint="leave it out")
        packages = read_names(request, "--with") if request.has("--with") else ("python3",)
        name = request.value("--name") or ""
        return cls(question, rest[0] if rest else "", request.has("--pull"), packages, name, request.has("--yes"))


@dataclass(frozen=True)
class ImageListing:
    """An image that runs can use. `left_out` says what of it was not unpacked."""

    id: str
    names: tuple[str, ...]
    machine: str
    created: float
    bytes: int
    source: str
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, image: ContainerImage) -> ImageListing:
        """Return the facts about an image."""
        names = tuple(map(shown, image.names))
        return cls(image.id, names, shown(image.machine), image.created, image.bytes, shown(image.source), image.left_out)


@dataclass(frozen=True)
class ImagesResult(VerbResult):
    """The images of this user, newest first; the one that was added or removed, if `done` says so."""

    kind = "images"

    images: tuple[ImageListing, ...]
    done: str | None = None

    def text(self, console: Console) -> None:
        for each in self.images:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created))
            print(f"{each.id[:12]}  {when}  {human_size(each.bytes):>9}  {', '.join(each.names)}  ({each.source})".rstrip())
            for words in each.left_out if self.done == "added" else ():
                console.note(f"left out: {words}")
        if self.done is not None:
            console.note(self.done)
        elif not self.images:
            console.note("there are no images; make one: agent-sandbox image from-machine python:3.11-slim")


def image(options: ImageOptions, console: Console) -> VerbResult:
    """Do what is asked for. Raises `RuntimeUnavailable`, `WorkspaceError` and `PolicyError`."""
    match options.question:
        case "list":
            return ImagesResult(tuple(map(ImageListing.of, list_images())))
        case "add":
            made = add_image(options.what, pull=options.pull, announce=console.note)
        case "load":
            made = load_image(options.what, name=options.name)
        case "from-machine":
            made = image_from_machine(options.what, options.packages)
        case "remove":
            if no := declined("image remove", f"Remove the image {shown(options.what)}?", console, yes=options.yes):
                return no
            return ImagesResult((ImageListing.of(remove_image(options.what)),), "removed")
        case _:
            assert_never(options.question)
    return ImagesResult((ImageListing.of(made),), "added")

"""Builds images with buildah on a base made by debootstrap, and runs programs in them: unprivileged, with read-only
roots."""

from __future__ import annotations

import ast
import configparser
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from testing.processes import children_of
from tests.deploy.dockerfiles import FOLDER, NOBODY, ROOT

BASE = "localhost/specdec-base:bookworm"
TOOLS = ("buildah", "debootstrap", "unshare", "setpriv", "chroot", "mount")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_SECONDS = 1800.0
READY_SECONDS = 180.0

START = """
root=$1 user=$2; shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for each in hosts resolv.conf; do
    touch "$root/etc/$each"
    mount --bind "/etc/$each" "$root/etc/$each"
done
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    test "$3" = rw || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
mount -o remount,bind,ro "$root"
exec setpriv --no-new-privs chroot --userspec="$user" --groups= "$root" "$@"
"""
"""Script of the first process in new PID and mount namespaces: it makes the root read-only and becomes the program."""


def run(*command: str | Path, seconds: float = BUILD_SECONDS) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Mount(NamedTuple):
    source: Path
    target: str
    mode: str = "ro"


@dataclass
class Process:
    """A running program in an image."""

    popen: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        """PID of the program's own process, the first in its namespace."""
        (found,) = children_of(self.popen.pid)
        return found

    def ready(self) -> str:
        """Wait for the line "ready"; return its address."""
        assert self.popen.stdout is not None
        word, _, address = self.popen.stdout.readline().strip().partition(" ")
        assert word == "ready", self.log.read_text()
        return address

    def end(self) -> int:
        """Send SIGTERM, as to a container; return the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.popen.wait(60)


class Image:
    """A built image, and a container of it in which programs run."""

    def __init__(self, buildah: tuple[str, ...], name: str) -> None:
        found = json.loads(run(*buildah, "inspect", "--type", "image", name))["OCIv1"]["config"]
        self.config: dict[str, Any] = found
        self.root = Path(run(*buildah, "mount", run(*buildah, "from", name).strip()).strip())

    @contextmanager
    def started(
        self, folder: Path, *arguments: str, mounts: Iterable[Mount] = (), entry: Iterable[str] = ()
    ) -> Iterator[Process]:
        """Run its entrypoint, or `entry`, with these arguments until the context ends."""
        command = ["env", "-i", *self.config["Env"], *(entry or self.config["Entrypoint"]), *arguments]
        mounted = [str(part) for each in mounts for part in each]
        namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
        log = folder / f"{len(list(folder.iterdir()))}.log"
        with (
            log.open("w") as stderr,
            subprocess.Popen(
                [*namespaces, "sh", "-ec", START, "sh", str(self.root), self.config["User"], *mounted, "--", *command],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as popen,
        ):
            try:
                yield Process(popen, log)
            finally:
                popen.kill()

    def output(self, folder: Path, *arguments: str, mounts: Iterable[Mount] = (), entry: Iterable[str] = ()) -> str:
        """Run a program and return its output; it must succeed."""
        with self.started(folder, *arguments, mounts=mounts, entry=entry) as process:
            found, _ = process.popen.communicate(timeout=READY_SECONDS)
            assert process.popen.returncode == 0, process.log.read_text()
        return found


def pip_settings(folder: Path) -> list[str]:
    """Return build arguments that give pip in the build this machine's package indexes."""
    settings = configparser.RawConfigParser()
    named: set[str] = set()
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        section = "global" if section == ":env:" else section
        text = str(ast.literal_eval(value))
        if not settings.has_section(section):
            settings.add_section(section)
        settings.set(section, name, text)
        # An index on disk links to files beside it, so its folder is mounted.
        named |= {str(Path(word[7:]).parent) if word.startswith("file://") else word for word in text.split()}
    with (folder / "pip.conf").open("w") as file:
        settings.write(file)
    local = sorted(each for each in named if each.startswith("/") and Path(each).exists())
    volumes = [word for each in local for word in ("--volume", f"{each}:{each}:ro")]
    return ["--secret", f"id=pip.conf,src={folder / 'pip.conf'}", *volumes]


def torch_index() -> str:
    """Return the index for torch: TORCH_INDEX, else the CPU index if reachable, else "" (the default index)."""
    if (named := os.environ.get("TORCH_INDEX")) is not None:
        return named
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=10):
            return TORCH_INDEX
    except OSError:
        return ""


@dataclass
class Builder:
    buildah: tuple[str, ...]
    arguments: list[str]

    def build(self, file: Path, name: str, context: Path = ROOT, **arguments: str) -> Image:
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        options = (
            "bud",
            "--isolation",
            "chroot",
            "--file",
            file,
            "--tag",
            f"localhost/{name}",
        )
        run(*self.buildah, *options, *self.arguments, *given, context)
        return Image(self.buildah, f"localhost/{name}")

    def build_service(self, role: str) -> Image:
        """Build the image of a service as `localhost/specdec-ROLE`."""
        file = FOLDER / "services.Dockerfile"
        return self.build(file, f"specdec-{role}", ROLE=role, TORCH_INDEX=torch_index())


def owned(folder: Path) -> Path:
    """Make a folder owned by the user of the images."""
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return folder

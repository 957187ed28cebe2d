"""Harbor's tasks in containers, with the program `docker` or `podman`: `Containers` builds a task's image once, and
starts a container of it for each episode.

Files and processes are kept between commands. The content is not trusted: there is no network unless configured, memory
and processes are limited, and containers are ended from outside. The tests run with the container's own programs, which
the model may have changed, as in Harbor.
"""

import asyncio
import hashlib
import io
import os
import re
import shutil
import socket
import tarfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from birl.envs.harbor_folder import REWARDS, Folder
from birl.errors import BirlError
from birl.process import tied
from birl.sandbox.protocol import Ending, Result

OUTPUT = 1 << 20  # bytes kept of each output
SECONDS = 60.0  # timeout of a command of docker or podman
WAITING = "while :; do sleep 3600; done"  # a container's first process
PROCESSES = 512  # limit of processes in a container
REWARD = 1 << 20  # bytes read of a file with a reward


class Containers:
    """Containers of docker or podman (`program`). `begin` returns the name of a new container, which `end` removes.

    Example: machine = await Containers.open("podman", memory_mb=1024, network=False, keep=False, workers=2)
    """

    def __init__(self, program: str, *, memory_mb: int, network: bool, keep: bool, workers: int) -> None:
        self.program, self.memory_mb, self.network, self.keep = program, memory_mb, network, keep
        self.images: dict[Path, asyncio.Task[str]] = {}
        self.alive: set[str] = set()
        self.turn = asyncio.Semaphore(workers or os.cpu_count() or 1)

    @classmethod
    async def open(cls, program: str, *, memory_mb: int, network: bool, keep: bool, workers: int) -> "Containers":
        """Check that the program works, and remove containers that killed runs on this machine have left. Raises
        `BirlError` if it is missing or does not answer."""
        if shutil.which(program) is None:
            raise BirlError(f"env.sandbox={program}: there is no program {program} in PATH.")
        self = cls(program, memory_mb=memory_mb, network=network, keep=keep, workers=workers)
        known = await self.call("ps", "-a", "--format", "{{.Names}}", what="cannot be used")
        left = [name for name in known.split() if (owner := _owner(name)) is not None and not _runs(owner)]
        if left:
            await self.command("rm", "-f", *left)
        return self

    async def begin(self, folder: Folder) -> str:
        if folder.path not in self.images:
            self.images[folder.path] = asyncio.create_task(self._image(folder))
        image = await asyncio.shield(self.images[folder.path])
        name = f"birl-{_place()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        bounds = [f"--memory={folder.memory_mb or self.memory_mb}m", f"--pids-limit={PROCESSES}", "--stop-timeout=0"]
        bounds += [f"--cpus={folder.cpus:g}"] if folder.cpus else []
        bounds += [] if self.network and folder.network else ["--network=none"]
        self.alive.add(name)
        try:
            await self.call(
                "run", "--detach", f"--name={name}", *bounds, "--security-opt=no-new-privileges", "--entrypoint=sh",
                image, "-c", WAITING, what=f"{folder.path}: its container does not start",
            )  # fmt: skip
        except BaseException:
            await self.end(name)
            raise
        return name

    async def _image(self, folder: Folder) -> str:
        """The image of a task: the one named in task.toml, or the build of its Dockerfile, cached by its content."""
        environment = folder.path / "environment"
        if folder.image:
            if (await self.command("image", "inspect", folder.image)).exit_code != 0:
                await self.call("pull", folder.image, what=f"{folder.path}", seconds=folder.build_seconds)
            return folder.image
        if not (environment / "Dockerfile").is_file():
            raise BirlError(f"{folder.path}: it has no environment/Dockerfile, and task.toml names no docker_image.")
        tag = f"birl-harbor:{_digest(environment)}"
        if (await self.command("image", "inspect", tag)).exit_code != 0:
            words = ["build", "--quiet", f"--tag={tag}", str(environment)]
            await self.call(*words, what=f"{environment}/Dockerfile", seconds=folder.build_seconds)
        return tag

    async def run(
        self, folder: Folder, state: str, command: Sequence[str], *, seconds: float, more: bytes = b""
    ) -> tuple[str, Result]:
        """Run a command in the container. With `more`, an archive of files, /tests, /logs and /solution are recreated
        before it, and the model's processes are ended unless `keep`."""
        if more:
            await self._clear(folder, state, more)
        words = ["exec", *(["--workdir", folder.workdir] if folder.workdir else [])]
        words += [part for name, value in folder.environment.items() for part in ("--env", f"{name}={value}")]
        async with self.turn:
            result = await self.command(*words, state, *command, seconds=seconds)
            if result.ending is Ending.TIMEOUT:
                await self.call("restart", state, what=f"{folder.path}: its container does not start again")
                result = replace(result, detail=f"it took longer than {seconds:g} s, and all processes were ended")
        if more and result.ending is Ending.OK:  # a reward of tests that were ended is none
            result = replace(result, files=await self._rewards(state))
        return state, result

    async def _clear(self, folder: Folder, state: str, more: bytes) -> None:
        if not self.keep:
            await self.call("restart", state, what=f"{folder.path}: its container does not start again")
        words = ["exec", "--user=0", "--workdir=/", state, "rm", "-rf", "/tests", "/logs", "/solution"]
        await self.call(*words, what=f"{folder.path}: /tests, /logs and /solution of its container stay")
        await self.call("cp", "-", f"{state}:/", what=f"{folder.path}: its container takes no files", given=more)

    async def _rewards(self, state: str) -> dict[str, bytes]:
        result: dict[str, bytes] = {}
        for name in REWARDS:
            told = await self.command("cp", f"{state}:/{name}", "-")
            if told.exit_code == 0 and not told.truncated:
                with tarfile.open(fileobj=io.BytesIO(told.stdout)) as archive:
                    entry = archive.next()
                    if entry is not None and entry.isreg() and (file := archive.extractfile(entry)) is not None:
                        result[name] = file.read(REWARD)
        return result

    async def end(self, state: str) -> None:
        if state in self.alive:
            await self.command("rm", "-f", state)
            self.alive.discard(state)

    async def close(self) -> None:
        for task in self.images.values():
            task.cancel()
        await asyncio.gather(*self.images.values(), return_exceptions=True)
        if self.alive:
            await self.command("rm", "-f", *self.alive)

    async def call(self, *words: str, what: str, seconds: float = SECONDS, given: bytes = b"") -> str:
        """Output of a command. Raises `BirlError` with its last line if it fails."""
        told = await self.command(*words, seconds=seconds, given=given)
        if told.ending is Ending.TIMEOUT:
            raise BirlError(f"{what}: {self.program} {words[0]} took longer than {seconds:g} s.")
        if told.exit_code != 0:
            raise BirlError(f"{what}: {self.program} {words[0]}: {told.last}")
        return told.stdout.decode(errors="replace")

    async def command(self, *words: str, seconds: float = SECONDS, given: bytes = b"") -> Result:
        """Run a command of docker or podman. `exit_code` is None after a timeout."""
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *tied([self.program, *words]),
            stdin=asyncio.subprocess.PIPE if given else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        outputs = [_Output(stream) for stream in (process.stdout, process.stderr) if stream is not None]

        async def talk() -> None:
            async with asyncio.TaskGroup() as group:
                for output in outputs:
                    group.create_task(output.drain())
                group.create_task(_feed(process, given))
            await process.wait()

        code = None
        try:
            await asyncio.wait_for(talk(), seconds)
            code = process.returncode
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        stdout, stderr = outputs
        return Result(
            ending=Ending.TIMEOUT if code is None else Ending.OK, kind=self.program, exit_code=code,
            stdout=bytes(stdout.kept), stderr=bytes(stderr.kept), truncated=stdout.lost or stderr.lost,
            seconds=time.monotonic() - began,
        )  # fmt: skip


class _Output:
    """The first OUTPUT bytes of a process's output, and whether there were more."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self.stream, self.kept, self.lost = stream, bytearray(), False

    async def drain(self) -> None:
        while piece := await self.stream.read(1 << 16):
            room = OUTPUT - len(self.kept)
            self.kept += piece[:room]
            self.lost = self.lost or len(piece) > room


async def _feed(process: asyncio.subprocess.Process, given: bytes) -> None:
    if process.stdin is not None:
        try:
            process.stdin.write(given)
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):  # it has ended: its exit code says why
            pass
        process.stdin.close()


def _digest(folder: Path) -> str:
    """Digest of the files that an image is built from."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink()):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        mode = 0 if path.is_symlink() else path.stat().st_mode & 0o111
        whole.update(f"{path.relative_to(folder)}\0{mode}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:24]


def _place() -> str:
    return re.sub(r"[^a-z0-9]", "", socket.gethostname().lower())[:20] or "here"


def _owner(name: str) -> int | None:
    """Id of the process on this machine that started a container."""
    match = re.fullmatch(rf"birl-{_place()}-(\d+)-[0-9a-f]{{12}}", name)
    return int(match[1]) if match else None


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

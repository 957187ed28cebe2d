"""Harbor's tasks in containers of the real docker or podman, of an image that is made of this machine's own programs:
no registry is asked."""

import asyncio
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from birl.envs.harbor import Config
from birl.envs.harbor_container import Containers
from birl.envs.harbor_folder import read, read_all
from birl.errors import BirlError
from birl.types import Outcome, Trajectory
from tests.envs import harbor_play
from tests.envs.harbor_play import ran

PROGRAMS = ("bash", "sh", "cat", "tr", "rm", "ls", "sleep", "mkdir", "tail", "env")
DOCKER = """FROM scratch
ADD root.tar /
ENV LEVEL=2
WORKDIR /srv/work
COPY word.txt ./
RUN cat word.txt word.txt > twice.txt
"""
TESTS = """#!/bin/bash
if [ "$(cat /srv/work/hello.txt 2>/dev/null)" = HELLO ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


def rootfs(path: Path) -> None:
    """An archive of programs and the libraries that they load."""
    files = {Path("/bin") / name: Path(shutil.which(name) or "") for name in PROGRAMS}
    for program in list(files.values()):
        listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        files |= {Path(name): Path(name) for name in re.findall(r"(/\S+) \(0x", listed)}
    with tarfile.open(path, "w") as archive:
        for name, source in files.items():
            archive.add(source.resolve(), str(name).lstrip("/"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "root.tar"
    if missing := [name for name in ("ldd", *PROGRAMS) if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)}")
    rootfs(path)
    return path


@pytest.fixture(scope="module")
def program(root: Path) -> str:
    """The one that runs containers here."""
    reasons: list[str] = []
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            reasons.append(f"no {name}")
            continue
        try:
            with root.open("rb") as archive:
                subprocess.run([name, "import", "-", "birl-test:1"], stdin=archive, check=True, capture_output=True)
            words = [name, "run", "--rm", "--network=none", "--memory=64m", "birl-test:1", "sh", "-c", "exit 7"]
            ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        if ended.returncode == 7:
            return name
        reasons.append(f"{name} runs no container: {ended.stderr.strip()[-200:]}")
    pytest.skip("; ".join(reasons))


def written(place: Path, root: Path | None) -> Path:
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 30\n[environment]\nmemory_mb = 256\n[environment.env]\nNAME = 'a b'\n",
        "instruction.md": "Write word.txt in capitals into hello.txt.\n",
        "environment/Dockerfile": DOCKER,
        "environment/word.txt": "hello\n",
        "tests/test.sh": TESTS,
        "solution/solve.sh": "tr a-z A-Z < word.txt > hello.txt\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    if root is not None:
        shutil.copy(root, place / "environment/root.tar")
    return place


@pytest.fixture
def folder(tmp_path: Path, root: Path) -> Path:
    return written(tmp_path / "tasks/hello", root)


def names(program: str) -> list[str]:
    words = [program, "ps", "-a", "--format", "{{.Names}}"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if f"-{os.getpid()}-" in name]


def play(folder: Path, answers: Sequence[str], program: str, **options: Any) -> tuple[Trajectory, str]:
    """No container is left behind the episode."""

    def ended() -> None:
        assert names(program) == []

    return harbor_play.play(folder, answers, ended, sandbox=program, **options)


def test_work_is_kept_in_the_tasks_own_image_and_tested(folder: Path, program: str) -> None:
    look = ran('echo "$PWD $LEVEL $NAME"; cat twice.txt; ls -A /tests /logs; exit 3')
    work = ran("sleep 99 > /dev/null 2>&1 & echo $! > /pid; tr a-z A-Z < word.txt > hello.txt")
    told, prompt = play(
        folder, [look, work, ran("cat hello.txt; kill -0 $(cat /pid) && echo it runs"), "Done."], program
    )
    assert (told.outcome, told.reward, told.parts["harbor/calls"]) == (Outcome.OK, 1.0, 3.0), told.detail
    assert "/srv/work 2 a b\nhello\nhello\n" in prompt and "test.sh" not in prompt
    assert "(exit code 3)" in prompt and "HELLO\nit runs" in prompt


FORGERIES = {
    "a reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "a process": "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &",
}


@pytest.mark.parametrize("how", FORGERIES)
def test_what_is_left_behind_is_no_reward(folder: Path, program: str, how: str) -> None:
    told, _ = play(folder, [ran(FORGERIES[how]), "Done."], program, prove="false")
    assert (told.outcome, told.reward) == (Outcome.OK, 0.0), told.detail


def test_processes_last_to_the_tests_where_they_are_kept(folder: Path, program: str) -> None:
    (folder / "tests/test.sh").write_text("echo 0 > /logs/verifier/reward.txt; sleep 2\n")
    serve = "(while :; do echo 1 2> /dev/null > /logs/verifier/reward.txt; sleep 0.1; done) > /dev/null 2>&1 &"
    for processes, reward in (("keep", 1.0), ("end", 0.0)):
        told, _ = play(folder, [ran(serve), "Done."], program, prove="false", processes=processes)
        assert (told.outcome, told.reward) == (Outcome.OK, reward), told.detail


def test_a_command_that_takes_too_long_ends_with_all_that_it_started(folder: Path, program: str) -> None:
    calls = [ran("echo kept > kept; sleep 99"), ran("cat kept; yes | tail -c 9000"), ran("cat kept"), "Done."]
    told, prompt = play(folder, calls, program, seconds="3", prove="false")
    assert told.outcome is Outcome.OK and "it took longer than 3 s, and all processes were ended" in prompt
    assert prompt.rstrip().endswith("<tool_response>\nkept\n</tool_response><|im_end|>\n<|im_start|>assistant")


def test_a_task_that_its_solution_does_not_solve_is_refused(folder: Path, program: str) -> None:
    (folder / "solution/solve.sh").write_text("no-such-program\n")
    with pytest.raises(BirlError, match=r"its solution is worth 0 here, .*no-such-program: command not found"):
        play(folder, [], program)
    (folder / "environment/Dockerfile").write_text(DOCKER + "RUN no-such-program\n")
    with pytest.raises(BirlError, match=r"environment/Dockerfile: \w+ build: "):
        play(folder, [], program)
    assert names(program) == []


def test_containers_of_killed_runs_are_removed(folder: Path, program: str) -> None:
    async def left() -> list[str]:
        machine = await Containers.open(program, memory_mb=64, network=False, keep=False, workers=1)
        gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
        name = await machine.begin(read(folder, "refuse", True))
        old = name.replace(f"-{os.getpid()}-", f"-{gone}-")
        await machine.call("rename", name, old, what="a container")
        again = await Containers.open(program, memory_mb=64, network=False, keep=False, workers=1)
        known = (await again.call("ps", "-a", "--format", "{{.Names}}", what="containers")).split()
        await machine.close()
        return [name for name in known if name == old]

    assert asyncio.run(left()) == []


def test_what_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = written(tmp_path / "tasks/hello", None)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(BirlError, match=r"env\.sandbox=podman: there is no program podman in PATH"):
        play(place, [], "podman")
    (tmp_path / "bin/docker").write_text("#!/bin/sh\necho 'is the daemon running?' >&2\nexit 1\n")
    (tmp_path / "bin/docker").chmod(0o755)
    with pytest.raises(BirlError, match=r"cannot be used: docker ps: is the daemon running\?"):
        play(place, [], "docker")
    with pytest.raises(BirlError, match=r"env\.network is for containers"):
        Config(network=True)
    with pytest.raises(BirlError, match=r"env\.build=skip: env\.sandbox=docker builds the image"):
        Config(sandbox="docker", build="skip")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[environment]\ngpus = 1", "environment.gpus=1: is not supported by env=harbor"),
        ("[environment]\nos = 'windows'", "environment.os='windows': is not supported"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment_mode='separate': is not supported"),
        ("[verifier.env]\nKEY = 'x'", "verifier.env={'KEY': 'x'}: is not supported"),
        ("[environment]\nmemory_mb = -1", "environment.memory_mb=-1: must be a number above 0"),
        ("[environment]\ncpus = 'two'", "environment.cpus='two': must be"),
        ("[environment]\ndocker_image = '--privileged'", "docker_image='--privileged': must be text"),
        ("[environment]\nworkdir = 3", "environment.workdir=3: must be text"),
        ("[environment.env]\nKEY = '${HOME}'", "variables of this machine are not handed to a task"),
        ("environment = 3", "environment=3: must be a table"),
    ],
)
def test_a_wrong_task_is_refused_by_its_key(tmp_path: Path, text: str, words: str) -> None:
    place = written(tmp_path / "tasks/hello", None)
    (place / "task.toml").write_text(text)
    with pytest.raises(BirlError, match=re.escape(words)):
        read_all(place.parent, "refuse", True)

"""Harbor's task folders in the sandbox: what its container would have, tests that nobody saw, and never a false 0."""

import asyncio
import os
import shlex
import shutil
from pathlib import Path

import pytest

from birl.cli import main
from birl.envs.harbor import Config, Harbor
from birl.envs.harbor_folder import read
from birl.errors import BirlError
from birl.sandbox.open import tried
from birl.types import Outcome
from tests.envs.harbor_play import play, ran

TESTS = """#!/bin/bash
if [ "$(cat /app/hello.txt 2>/dev/null)" = HELLO ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
DOCKER = "# an image\nFROM debian:12\nWORKDIR /app\nCOPY word.txt ./\nENV LEVEL=2 \\\n    NAME='a b'\n"


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    trial = asyncio.run(tried("zygote"))
    if not trial.python:
        assert not os.environ.get("CI"), trial.reason
        pytest.skip(trial.reason)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one task, as Harbor's own command makes it."""
    files = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n[agent]\ntimeout_sec = 20.0\n',
        "instruction.md": "<!-- a canary string -->\nWrite word.txt in capitals into hello.txt.\n",
        "environment/Dockerfile": DOCKER,
        "environment/word.txt": "hello\n",
        "tests/test.sh": TESTS,
        "solution/solve.sh": "tr a-z A-Z < /app/word.txt > hello.txt\n",
    }
    for name, text in files.items():
        path = tmp_path / "tasks" / "hello" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tasks" / "hello"


def test_work_is_kept_from_call_to_call_and_tested(folder: Path) -> None:
    look = ran('pwd; cat word.txt; echo "$LEVEL $NAME"; ls -A /tests /logs; exit 3')
    told, prompt = play(
        folder, [look, ran("sleep 99 & tr a-z A-Z < word.txt > hello.txt"), ran("cat hello.txt"), "Done."]
    )
    assert (told.outcome, told.reward, told.parts["harbor/calls"]) == (Outcome.OK, 1.0, 3.0), told.detail
    assert "user\nWrite word.txt in capitals into hello.txt.<" in prompt
    assert "app\nhello\n2 a b\n" in prompt and "(exit code 3)" in prompt and "test.sh" not in prompt
    assert prompt.endswith("<tool_response>\nHELLO\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


#: a state that brings tests of its own
MADE = """import tarfile as T,io
def p(t,n,b):
 i=T.TarInfo(n);i.size=len(b);t.addfile(i,io.BytesIO(b))
a=io.BytesIO();t=T.open(fileobj=a,mode='w')
p(t,'tests/test.sh',b'echo 1 > /logs/verifier/reward.txt');p(t,'logs/verifier/x',b'');t.close()
t=T.open('/tmp/f.tar','w');p(t,'more.tar',a.getvalue());p(t,'app/x',b'');t.close()
"""
FORGERIES = {
    "a reward": "mkdir -p /tmp/logs/verifier; echo 1 > /tmp/logs/verifier/reward.txt",
    "tests": "mkdir -p /tmp/tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tmp/tests/test.sh",
    "a link": "mkdir /tmp/mine; ln -s mine /tmp/tests; ln -s mine /tmp/logs",
    "a process": "(while true; do mkdir -p /tmp/logs/verifier; echo 1 > /tmp/logs/verifier/reward.txt; done) & disown",
    "the archive": "rm -f /tmp/*.py /tmp/*.tar; kill -9 -1",
    "an archive of its own": f"python3 -c {shlex.quote(MADE)}; cp /tmp/f.tar /tmp/state.tar; kill -9 $PPID",
    "a late archive": f"python3 -c {shlex.quote(MADE)}; setsid bash -c 'while :; do cp /tmp/f.tar /tmp/.x; "
    "mv /tmp/.x /tmp/state.tar; done' > /dev/null 2>&1 & sleep 1",
    # and no verdict is evaded
    "closed tests": "mkdir -p /tmp/tests/x; touch /tmp/tests/test.sh; chmod 000 /tmp/tests/x; chmod 555 /tmp/tests",
    "a folder for the reward": "mkdir -p /tmp/logs/verifier/reward.txt/x; chmod 555 /tmp/logs",
    "a file for a folder": "rm -rf /tmp/tests /tmp/logs; touch /tmp/tests /tmp/logs",
    "no archive": "echo x > /tmp/state.tar; kill -9 $PPID",
    "a full disk": "head -c 99999999 /dev/zero > /tmp/app/big",
    "no folder": "cd /tmp; rm -rf app; touch app",
    "a closed folder": "chmod 000 /tmp/app",
    "a pipe": "mkfifo /tmp/app/hello.txt",
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_reward_cannot_be_forged(folder: Path, how: str) -> None:
    told, _ = play(folder, [ran(FORGERIES[how]), "Done."])
    assert (told.outcome, told.reward) == (Outcome.OK, 0.0), told.detail


def test_variables_and_the_folder_are_the_containers(folder: Path) -> None:
    """References to variables were kept as text, and those of task.toml left out."""
    (folder / "environment/Dockerfile").write_text(
        "FROM x\r\nARG TOP=/app\nENV PATH=${TOP}/bin:$PATH \\\r\n  AT=$UNSET.\nCOPY\tword.txt $TOP/bin/\n"
        "WORKDIR $TOP/bin\n"
    )
    told, prompt = play(folder, [ran('pwd; cat word.txt; echo "$PATH $AT"'), "Done."], prove="false")
    assert told.outcome is Outcome.OK, told.detail
    assert "app/bin\nhello\n/app/bin:/usr/local/bin:/usr/bin:/bin .\n" in prompt
    (folder / "task.toml").write_text("[environment]\nworkdir = '/workspace'\nenv = {LEVEL = 7}\n")
    _, prompt = play(folder, [ran('pwd; echo "$LEVEL"'), "Done."], prove="false")
    assert "workspace\n7\n" in prompt and "File exists" not in prompt


def test_a_folder_is_copied_with_links_within_it(folder: Path) -> None:
    (folder / "environment/sub").mkdir()
    (folder / "environment/sub/Dockerfile").write_text("FROM y\n")
    (folder / "environment/own.txt").symlink_to("word.txt")
    (folder / "environment/out.txt").symlink_to("/etc/passwd")
    (folder / "environment/Dockerfile").write_text("FROM x\nCOPY . .\n")
    _, prompt = play(folder, [ran("cat own.txt sub/Dockerfile; ls"), "Done."], prove="false")
    assert "tool_response>\nhello\nFROM y\nown.txt\nsub\nword.txt\n<" in prompt


def test_programs_can_be_run(folder: Path) -> None:
    shutil.copy("/bin/true", folder / "environment/word.txt")
    _, prompt = play(folder, [ran("./word.txt && echo it ran"), "Done."], prove="false")
    assert "tool_response>\nit ran\n<" in prompt


def test_what_goes_wrong_is_told(folder: Path) -> None:
    calls = [ran("sleep 99"), ran("yes | head -c 9000"), ran("kill -9 -1"), ran(""), "Done."]
    told, prompt = play(folder, calls, seconds="1", longest="100")
    assert told.outcome is Outcome.OK and told.parts["harbor/calls"] == 4
    for said in ("it took longer than 1 s", "more characters)", "its files are lost", "bash needs command, as text"):
        assert said in prompt


@pytest.mark.parametrize(
    ("script", "reward", "detail"),
    [
        ('echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json', 0.5, ""),
        ("echo '{\"score\": 0.25}' > /logs/verifier/reward.json", 0.25, ""),
        ("head -c 20000000 /dev/zero | tee /dev/stderr; echo 1 > /logs/verifier/reward.txt", 1.0, ""),
        ("echo .5 > /logs/verifier/reward.txt; exit 3", 0.5, ""),  # as bc writes it
        ("echo 0 > /logs/verifier/reward.txt; sleep 99", None, "wrote no number .*: it took longer than 1 s"),
        ("echo pytest: command not found >&2", None, "wrote no number .*: pytest: command not found"),
        ("echo none > /logs/verifier/reward.txt; exit 4", None, "wrote no number .*: exit code 4"),
        ("sleep 99", None, "wrote no number .*: it took longer than 1 s"),
    ],
)
def test_tests_without_a_number_are_no_reward(folder: Path, script: str, reward: float | None, detail: str) -> None:
    (folder / "tests/test.sh").write_text(script)
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 1\n")
    told, _ = play(folder, ["Done."], prove="false")
    if reward is not None:
        assert (told.outcome, told.reward) == (Outcome.OK, reward)
    else:
        assert told.outcome is Outcome.ENV_ERROR
        with pytest.raises(BirlError, match=f"hello/tests/test.sh {detail}"):
            raise BirlError(told.detail)


def test_a_task_that_its_solution_does_not_solve_here_is_refused(folder: Path) -> None:
    (folder / "solution/solve.sh").write_text("no-such-program\n")
    with pytest.raises(
        BirlError, match=r"tasks/hello: its solution is worth 0 here, .*no-such-program: command not found"
    ):
        play(folder, [])


WRONG = [
    ("tests/test.sh", None, "it has no tests/test.sh"),
    ("instruction.md", None, "it has no instruction.md"),
    ("task.toml", "[verifier", "task.toml: Expected"),
    ("task.toml", "[verifier]\ntimeout_sec = -1", "timeout_sec=-1: must be"),
    ("environment/docker-compose.yaml", "services:\n", "several containers"),
    ("environment/Dockerfile", "FROM x\nRUN apt-get install jq", "RUN apt-get install jq: .*env.build=skip"),
    ("environment/Dockerfile", "FROM x\nCOPY gone.txt .", "COPY gone.txt: there is no such file"),
    ("environment/Dockerfile", "FROM x\nCOPY ../../../x .", "there is no such file"),
    ("environment/Dockerfile", "FROM x\nWORKDIR /home/me", "/home/me: the sandbox has /app, "),
    ("environment/Dockerfile", "FROM x\nWORKDIR /app/../etc", "/app/../etc: the sandbox has"),
    ("environment/Dockerfile", "FROM x\nONBUILD x", "ONBUILD x: it is not known what that does"),
    ("environment/Dockerfile", "FROM x\nCOPY --from=y a b", "COPY --from=y a b: it is not known"),
    ("environment/Dockerfile", "FROM x\nENV A=${B:-c}", r"\$\{B:-c\}: it is not known what that does"),
    ("task.toml", "[environment]\nworkdir = '/etc'", "task.toml: /etc: the sandbox has /app, "),
    ("task.toml", "[environment]\nenv = 3", "environment.env=3: must be a table"),
    ("environment/Dockerfile", "FROM x\nCOPY", "Dockerfile: COPY: it cannot be read"),
    ("environment/Dockerfile", "FROM x\nENV", "Dockerfile: ENV: it cannot be read"),
    ("environment/Dockerfile", "FROM x\nENV A='b", "Dockerfile: ENV A='b: it cannot be read"),
    ("task.toml", "verifier = 3", "verifier=3: must be a table"),
    ("task.toml", "a = " + "[" * 100_000, "task.toml"),
    ("steps/one/instruction.md", "x", "it has several steps"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_what_the_sandbox_cannot_do_is_refused_by_name(folder: Path, name: str, text: str | None, said: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BirlError, match=said):
        play(folder, [])


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "environment", "task.toml"])
def test_links_out_of_a_task_are_not_followed(folder: Path, name: str, tmp_path: Path) -> None:
    """A folder from elsewhere would have the model read files of this machine."""
    (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(BirlError, match=r"is a link to .*secret, outside the folder"):
        play(folder, [])


def test_a_pipe_that_would_be_copied_is_not_read(folder: Path) -> None:
    (folder / "environment/word.txt").unlink()
    os.mkfifo(folder / "environment/word.txt")
    with pytest.raises(OSError, match="a named pipe, not a regular file"):
        read(folder, "skip")


def test_text_that_is_none_is_told(folder: Path) -> None:
    (folder / "instruction.md").write_bytes(b"\xff\xfe")
    with pytest.raises(BirlError, match=r"instruction\.md"):
        play(folder, [])


def test_tasks_of_the_same_name_have_their_own_files(folder: Path, tmp_path: Path) -> None:
    """tasks/hello for training, held/hello for validation."""
    other = shutil.copytree(folder, tmp_path / "held" / "hello")
    (other / "environment/word.txt").write_text("other")

    async def both() -> list[bytes]:
        keys = {"tasks": str(folder.parent), "validation_tasks": str(other.parent), "workers": 1, "prove": False}
        place = await Harbor.shared(Config(**keys))
        try:
            return [await place.machine.begin(one) for some in place.folders.values() for one in some]
        finally:
            await place.close()

    first, second = asyncio.run(both())
    assert b"hello" in first and b"other" in second


def test_lines_of_a_build_run_in_the_sandbox(folder: Path) -> None:
    (folder / "environment/Dockerfile").write_text(DOCKER + "RUN mkdir -p data && \\\n    echo 7 > data/seven\n")
    told, prompt = play(folder, [ran("cat data/seven"), "Done."], build="run")
    assert told.outcome is Outcome.OK and "tool_response>\n7\n<" in prompt
    told, prompt = play(folder, [ran("cat data/seven"), "Done."], build="skip")
    assert "No such file" in prompt
    (folder / "environment/Dockerfile").write_text(DOCKER + "RUN false\n")
    with pytest.raises(BirlError, match="Dockerfile: RUN false: exit code 1"):
        play(folder, [], build="run")


def test_its_solutions_are_right_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--validate", "env=harbor", f"env.validation_tasks={folder.parent}", "threads=1"]
    assert main(words) == 0, capsys.readouterr()

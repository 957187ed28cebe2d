import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from birl.cli import COMMANDS, completing, main
from birl.config.keys import documentation
from birl.config.schema import RL


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run([sys.executable, "-m", "birl", "completion", shell], capture_output=True, check=True)
        (folder / shell).write_bytes(done.stdout)
    return folder


def bash(script: Path, line: str, cwd: Path) -> list[str]:
    """What bash would put in place of the last word of `line`, as readline calls it."""
    code = f"""
source {script}
COMP_LINE={_quoted(line)} COMP_POINT=${{#COMP_LINE}}
_birl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, cwd=cwd, timeout=20)
    assert not done.stderr, done.stderr
    return [word for word in done.stdout.split("\n") if word]


def _quoted(text: str) -> str:
    return "'" + text + "'"


def test_bash(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("")
    ask = lambda line: bash(scripts / "bash", line, tmp_path)  # noqa: E731
    assert {word.strip() for word in ask("birl ")} == set(COMMANDS)
    assert ask("birl che") == ["checkpoints "]
    assert ask("birl rl track.con") == ["track.console="]
    assert ask("birl rl track.console=l") == ["live "]
    assert [w.strip() for w in ask("birl rl track.tensorboard=")] == ["true", "false"]
    assert "grpo " in ask("birl rl algorithm=gr")
    assert ask("birl rl env=count") == ["countdown "]
    assert ask("birl rl data.train=da") == ["data/"] and ask("birl rl data.train=data/") == ["data/train.jsonl "]
    assert ask("birl rl rec") == ["recipe.yaml "]
    assert ask("birl rl optimizer.lr=") == []
    assert ask("birl rl --dry") == ["--dry-run "] and ask("birl sft --val") == []
    assert ask("birl dpo preference.lo") == ["preference.loss="] and ask("birl rl preference.lo") == []
    assert ask("birl reproduce gpu/tinyz") == ["gpu/tinyzero_countdown "]
    assert ask("birl reproduce --s") == ["--seed "] and ask("birl checkpoints x --") != []  # of the command's help
    assert ask("birl diff da") == ["data/"] and ask("birl doctor da") == []
    assert [w.strip() for w in ask("birl launch local ")] == ["sft", "rm", "dpo", "rl"]
    assert ask("birl launch slu") == ["slurm "] and ask("birl launch slurm rl track.console=pl") == ["plain "]
    assert ask("birl cache cl") == ["clear "] and ask("birl completion z") == ["zsh "]


def test_every_key_and_command_is_there(scripts: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        text = (scripts / shell).read_text()
        assert all(command in text for command in COMMANDS)
        assert all(key in text for key in documentation(RL))


def test_without_recipes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(completing, "OWN", tmp_path)
    assert main(["completion", "bash"]) == 0
    assert "reproduce" in capsys.readouterr().out


def test_bash_reads_the_script_as_posix_mode_does_not(scripts: Path) -> None:
    subprocess.run(["bash", "-n", str(scripts / "bash")], check=True, timeout=20)


def typed(command: list[str], keys: str, cwd: Path, wanted: str) -> str:
    """What a terminal shows while somebody types."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ.update(TERM="xterm", PS1="> ", HOME=str(cwd), COLUMNS="100")
        os.execvp(command[0], command)
    shown, end = "", time.monotonic() + 20
    sent = False
    while time.monotonic() < end and wanted not in shown.replace("\r", ""):
        if select.select([terminal], [], [], 0.3)[0]:
            try:
                shown += os.read(terminal, 65536).decode("utf-8", "replace")
            except OSError:
                break
        elif not sent:  # it has said all that it says by itself
            os.write(terminal, keys.encode())
            sent = True
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown


def test_bash_in_a_terminal(scripts: Path, tmp_path: Path) -> None:
    keys = f"source {scripts / 'bash'}\nbirl rl track.cons\tli\t"
    assert "track.console=live" in typed(["bash", "--norc", "-i"], keys, tmp_path, "track.console=live")


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_in_a_terminal(scripts: Path, tmp_path: Path) -> None:
    keys = f"autoload -Uz compinit; compinit -u; source {scripts / 'zsh'}\nbirl rl track.cons\tli\t"
    assert "ole=live" in typed(["zsh", "-f", "-i"], keys, tmp_path, "ole=live")  # zsh draws only what is new


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("birl che", {"checkpoints"}),
        ("birl rl track.con", {"track.console="}),
        ("birl rl track.console=l", {"track.console=live"}),
        ("birl rl data.train=da", {"data.train=data/"}),
        ("birl launch slu", {"slurm"}),
        ("birl rl optimizer.lr=", set()),
    ],
)
def test_fish(scripts: Path, tmp_path: Path, line: str, answers: set[str]) -> None:
    (tmp_path / "data").mkdir()
    code = f"source {scripts / 'fish'}; complete -C {_quoted(line)}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=30,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert {one.split("\t")[0] for one in done.stdout.splitlines()} == answers, done.stderr


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"], ["bsh"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


def test_help_says_where_the_script_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--help"]) == 0
    out = capsys.readouterr().out
    assert ".bashrc" in out and ".zshrc" in out and "fish/completions" in out

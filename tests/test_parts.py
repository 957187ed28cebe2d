"""Each part can be deleted, and the rest works; each that may be the user's comes from a file."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from birl.config.decided import ENGINES
from birl.envs.open import BUILT_IN
from birl.launch.launcher import WHERE
from birl.server.dialects import DIALECTS
from birl.track.sink import KINDS
from tests.train.test_rl import log, run

ROOT = Path(__file__).parents[1]


def files(*places: str) -> list[str]:
    """Of modules of birl, beside the package; a module's folder where it is the only one who uses it."""
    found = []
    for place in places:
        place = "birl.envs.browser" if place.startswith("birl.envs.browser") else place
        path = place.replace(".", "/")
        found.append(path if (ROOT / path).is_dir() else f"{path}.py")
    return found


def launched(where: str) -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "birl/launch").glob(f"{where}*.py"))


#: "kind name" -> its files, from the tables
PARTS: dict[str, list[str]] = {
    **{f"engine {name}": files(kind.module) for name, kind in ENGINES.items() if kind.module},
    **{f"launcher {where}": launched(where) for where in WHERE},
    **{f"tracker {name}": files(kind.sink.partition(":")[0]) for name, kind in KINDS.items()},
    **{f"env {name}": files(place.partition(":")[0]) for name, place in BUILT_IN.items()},
    **{f"dialect {name}": files(*places) for name, places in DIALECTS.items()},
    "transport nccl": ["birl/weights/broadcast.py"],
    "transport ipc": ["birl/weights/lending.py"],
}
ALL = sorted({name for part in PARTS.values() for name in part})


def loop(tiny: Path, tmp_path: Path, *words: str) -> list[str]:
    """The demo's loop, one step of it."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n' * 4)
    keys = (f"data.train={tmp_path}/a.jsonl", "steps=1", "rollout.prompts=2", "rollout.group_size=2", "threads=1")
    return ["rl", f"model.path={tiny}", f"run={tmp_path}/run", *keys, "rollout.max_tokens=8", "resume=never", *words]


def asked(part: str, tiny: Path, tmp_path: Path) -> list[str]:
    """A command that needs the part; empty where none does without more."""
    kind, name = part.split()
    command = loop(tiny, tmp_path, f"run={tmp_path}/{name}")
    if kind == "tracker" and find_spec(name) is None:
        return []  # its package is asked for first
    if kind == "launcher":
        return ["launch", name, *command, "--dry-run"]
    key = {"engine": f"engine.kind={name}", "tracker": f"track.{name}=offline", "env": f"env.kind={name}"}.get(kind)
    python = [f"engine.python={sys.executable}"] if kind == "engine" else []  # else its package is asked for first
    return [*command, key, *python] if key else []


def without(tiny: Path, tmp_path: Path, jobs: list[tuple[list[str], list[list[str]]]]) -> list[list[tuple[int, str]]]:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "birl", copy / "birl", ignore=shutil.ignore_patterns("__pycache__"))
    program = [sys.executable, "-P", str(ROOT / "tests/without.py"), str(copy), json.dumps(jobs)]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_demo_runs_without_any_part_and_each_is_missed_by_name(tiny: Path, tmp_path: Path) -> None:
    asking = {part: words for part in PARTS if (words := asked(part, tiny, tmp_path))}
    jobs = [(ALL, [loop(tiny, tmp_path), *asking.values()])]
    (((code, text), *refused),) = without(tiny, tmp_path, jobs)
    assert code == 0, text
    for part, (code, text) in zip(asking, refused, strict=True):
        assert code == 2 and "Traceback" not in text, (part, text)
        assert re.search("this installation of birl (has no birl|is without it)", text, re.IGNORECASE), (part, text)


def test_the_demo_runs_without_each_part(tiny: Path, tmp_path: Path) -> None:
    jobs = [(gone, [loop(tiny, tmp_path, f"run={tmp_path}/{i}")]) for i, gone in enumerate(PARTS.values())]
    for part, ((code, text),) in zip(PARTS, without(tiny, tmp_path, jobs), strict=True):
        assert code == 0, (part, text)


def test_nothing_but_its_table_names_a_part() -> None:
    """Modules that are in the package whatever is deleted import no part, neither at once nor in a function."""
    places = {name.removesuffix(".py").replace("/", ".") for name in ALL}
    assert all(find_spec(place) for place in places)
    kept = [p for p in (ROOT / "birl").rglob("*.py") if not any(p.is_relative_to(ROOT / name) for name in ALL)]
    wrong = {}
    for path in kept:
        tree = ast.parse(path.read_bytes())
        hints = {id(node) for block in ast.walk(tree) if is_hint(block) for node in ast.walk(block)}
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in hints]
        names = {name for node in nodes for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names))}
        wrong |= {path.relative_to(ROOT).as_posix(): names & places} if names & places else {}
    assert not wrong


def is_hint(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


OWN = """
import torch
from birl.algorithms.surrogates import Surrogate
from birl.types import Feedback, Message

class World:
    def __init__(self, task): self.task = task
    async def start(self): return (Message(role="user", content="What is 1 + 2?"),)
    async def step(self, reply): return Feedback(messages=(), reward=0.5, done=True)
    async def close(self): pass

def short(completions, prompts, **columns):
    return [1 - len(c) / 100 for c in completions]

def plain(logp, old_logp, advantages, sample):
    ratio = (logp - old_logp).exp()
    return Surrogate(-ratio * advantages, ratio, torch.zeros_like(ratio))

def centred(rewards, group):
    return rewards - rewards.mean()
"""


def test_one_of_each_kind_comes_from_a_file(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    words = [
        f"env.kind={file}:World",
        f"reward.functions={file}:short",
        f"engine.kind={ROOT}/examples/engine_class.py:Transformers",
    ]
    words += [f"algorithm.surrogate={file}:plain", f"algorithm.advantage={file}:centred"]
    run(tiny, tmp_path, *words, "rollout.prompts=2")
    assert [s["outcome/ok"] + s["outcome/truncated"] for s in log(tmp_path)] == [8, 8]

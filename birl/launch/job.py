"""What a run consists of: roles, each some processes with what one of them needs. Derived from the configuration alone;
where they run is up to a launcher (`launcher.py`). Imports nothing heavy."""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.decided import LAUNCHED, SERVERS
from birl.config.load import load, load_with_choices, run_folder
from birl.config.schema import TRAINING
from birl.config.schema.kinds import Count
from birl.errors import BirlError


@dataclass(kw_only=True)
class Keys:
    """What all launchers ask for; a launcher adds keys of its own in a subclass."""

    name: str = ""
    """Of the job. Empty: the name of the run folder."""
    nodes: Count = 1
    """Machines. The ranks of the learner and the engines are spread over them evenly."""
    gpus: float = 0.0
    """GPUs of each rank of the learner, and of each engine for each of its tensor and pipeline parallel ranks."""
    cpus: int = 1
    """CPU cores of each process."""
    memory_gb: float = 0.0
    """Memory of each process [GiB]. 0: whatever the launcher gives."""
    restarts: int = 3
    """How often the job is started again after it failed; it goes on from its newest checkpoint."""
    env: list[str] = field(default_factory=list)
    """Names of environment variables that the processes get, such as HF_TOKEN. Their values are never written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """`count` processes that run `command`, each with the named resources.

    Example: Role(name="engine", count=2, command=("python", "-m", "birl.launch.engine", "rl", ...), gpus=1, cpus=4)
    """

    name: str  # learner | engine
    count: int
    command: tuple[str, ...]
    gpus: float = 0.0
    cpus: int = 1
    memory_gb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`words`: the configuration as it was typed, `run` its folder, `engines` the name under which engines of the job
    register (`engines/names.py`), empty where it has none of its own. The first role is the learner: its ranks find one
    another by RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT where there are several.

    Example: job = derive("rl", ["recipe.yaml", "engine.kind=vllm", "engine.count=2"], Keys(gpus=1))
    """

    name: str
    command: str
    words: tuple[str, ...]
    run: Path
    roles: tuple[Role, ...]
    engines: str = ""
    env: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """What the words say, an instance of TRAINING[command]; loaded anew each time."""
        return load(TRAINING[self.command], list(self.words))

    @property
    def learner(self) -> Role:
        return self.roles[0]

    @property
    def engine(self) -> Role | None:
        return self.roles[1] if len(self.roles) > 1 else None


def derive(command: str, words: Sequence[str], keys: Keys, python: str = sys.executable) -> Job:
    """The job that `birl COMMAND WORDS` would be. Raises `BirlError` for whatever `birl COMMAND` would refuse.

    Engines that the run would start as its children become a role of their own, which registers under a name and which
    the learner attaches to; an embedded engine stays in the learner."""
    if command not in TRAINING:
        raise BirlError(f"birl launch starts {', '.join(TRAINING)}, not {command!r}")
    config, choices = load_with_choices(TRAINING[command], list(words))
    run = Path(run_folder(config, choices))
    name = keys.name or run.name
    own = {"cpus": keys.cpus, "memory_gb": keys.memory_gb}
    told, ranks = placed(words, run), config.parallel.size
    learner = Role(name="learner", count=ranks, command=(python, "-m", "birl", command, *told), gpus=keys.gpus, **own)
    job = Job(name=name, command=command, words=tuple(words), run=run, roles=(learner,), env=tuple(keys.env))
    if not isinstance(config, schema.RL) or config.engine.kind not in SERVERS or config.engine.attach:
        return job
    engine = config.engine
    place = registered(name, run)
    attach = f"engine.attach=[{place}]"
    load(TRAINING[command], [*words, attach])  # what a run with engines of its own may and this one may not
    learner = replace(learner, command=(*learner.command, attach))
    role = Role(
        name="engine",
        count=engine.count,
        command=(python, "-m", "birl.launch.engine", f"--name={place}", command, *told),
        gpus=keys.gpus * engine.tensor_parallel * engine.pipeline_parallel,
        **own,
    )
    return replace(job, roles=(learner, role), engines=place)


def placed(words: Sequence[str], run: Path) -> list[str]:
    """The words of a run in this folder, with `run=` once."""
    return [*(word for word in words if not word.startswith("run=")), f"run={run}"]


def given(names: Sequence[str]) -> dict[str, str]:
    """The environment variables with these names (`launch.env`). Raises `BirlError` where one is not set here."""
    if missing := [name for name in names if name not in os.environ]:
        raise BirlError(f"launch.env: {', '.join(missing)} is not set here. Set it, or take it out of the list.")
    return {name: os.environ[name] for name in names}


def registered(name: str, run: Path) -> str:
    """The name that the engines of a job register under; two jobs that are called the same have folders of their
    own."""
    word = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60]
    return f"{LAUNCHED}{word}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]}"

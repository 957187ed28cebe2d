"""A job: its roles, each with the number of processes and the resources of one. Derived from the configuration only; a
launcher decides where they run (`launcher.py`). Imports nothing heavy."""

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
    """Keys that all launchers have; subclasses add more."""

    name: str = ""
    """Name of the job. Empty: the name of the run folder."""
    nodes: Count = 1
    """Number of machines. The learner's ranks and the engines are spread evenly over them."""
    gpus: float = 0.0
    """GPUs of each learner rank, and of each engine per tensor and pipeline parallel rank."""
    cpus: int = 1
    """CPU cores of each process."""
    memory_gb: float = 0.0
    """Memory of each process [GiB]. 0: the launcher's default."""
    restarts: int = 3
    """Restarts of the job after a failure; it resumes from its newest checkpoint."""
    env: list[str] = field(default_factory=list)
    """Names of environment variables to pass to the processes, such as HF_TOKEN. Their values are never written to
    files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """`count` processes that run `command`, each with these resources.

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
    """`words`: the configuration as typed; `run`: its folder; `engines`: name under which the job's engines register
    (`engines/names.py`), empty if it has none. The first role is the learner; several ranks of it rendezvous by RANK,
    LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

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
        """The configuration of the words, an instance of TRAINING[command]; loaded at each call."""
        return load(TRAINING[self.command], list(self.words))

    @property
    def learner(self) -> Role:
        return self.roles[0]

    @property
    def engine(self) -> Role | None:
        return self.roles[1] if len(self.roles) > 1 else None


def derive(command: str, words: Sequence[str], keys: Keys, python: str = sys.executable) -> Job:
    """The job for `birl COMMAND WORDS`. Raises `BirlError` for everything that `birl COMMAND` refuses.

    Engines that the run would start as children become a separate role: they register under a name, and the learner
    attaches to them. An embedded engine stays in the learner."""
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
    load(TRAINING[command], [*words, attach])  # refuses what only a run with children may have
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
    """The words of a run in this folder, with one `run=`."""
    return [*(word for word in words if not word.startswith("run=")), f"run={run}"]


def given(names: Sequence[str]) -> dict[str, str]:
    """Environment variables with these names (`launch.env`). Raises `BirlError` if one is not set here."""
    if missing := [name for name in names if name not in os.environ]:
        raise BirlError(f"launch.env: {', '.join(missing)} is not set here. Set it, or take it out of the list.")
    return {name: os.environ[name] for name in names}


def registered(name: str, run: Path) -> str:
    """Name under which a job's engines register; it depends on the folder, so that jobs of the same name differ."""
    word = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60]
    return f"{LAUNCHED}{word}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]}"

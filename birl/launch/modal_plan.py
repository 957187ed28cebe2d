"""Plan of a job in Modal's cloud: the app's settings, and the command of each container.

`Settings` are needed by the app's definition: on the machine that deploys it, and in each container, which imports the
same module. They are passed in one environment variable as JSON, with names of secrets only."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field

from birl.config.decided import weights_method
from birl.errors import BirlError
from birl.launch import job as jobs
from birl.launch import package
from birl.launch.job import Job, Role
from birl.launch.plan import typed

VARIABLE = "BIRL_MODAL"
ROOT = "/birl"  # mount point of the volume
HERE = "/root/work"  # working directory of commands, with files of the user's folder
SOURCE = "/root/birl"  # this package, unless `package` names another source for pip
LARGEST = 8  # GPUs of one container, at most
LONGEST = 24 * 3600  # s, Modal's limit for a function

SAVING = 1200  # s of a container's life that are reserved for saving


@dataclass(kw_only=True)
class Keys(jobs.Keys):
    gpus: float = 1.0
    """GPUs of each learner rank, and of each engine. 0: none."""
    gpu: str = "A100"
    """GPU type of the learner, as Modal names it: T4, L4, A10G, L40S, A100, A100-80GB, H100, H200, B200."""
    engine_gpu: str = "A10G"
    """GPU type of the engines."""
    learner: Literal["modal", "here"] = "modal"
    """Location of the learner: modal | here (only the engines run in the cloud; `birl rl` runs on this machine with
    their addresses, and computes the rewards)."""
    engines: Literal["apart", "inside"] = "apart"
    """Location of the engines: apart (each in its own container; engine.kind=birl) | inside (in the learner's
    container, on its GPUs, started by `birl rl`)."""
    volume: str = "birl"
    """Modal volume for run folders and downloaded models; created if it does not exist."""
    secrets: list[str] = field(default_factory=list)
    """Names of Modal secrets whose variables are passed to the processes."""
    files: list[str] = field(default_factory=list)
    """Further files and folders to upload, besides those that the configuration names."""
    package: str = ""
    """What pip installs as birl, such as birl==0.1.0. Empty: the source of this installation."""
    packages: list[str] = field(default_factory=list)
    """Further packages for pip, such as reasoning-gym."""
    vllm: str = ""
    """vLLM version for a separate environment in the image, as for pip: vllm==0.32.0. For launch.engines=inside."""
    hours: Annotated[float, Field(gt=0, le=(LONGEST - SAVING) // 3600)] = 23.0
    """Maximum lifetime of a container [h]; then the run saves and continues in a new one (launch.restarts)."""
    idle: float = 30.0
    """Idle time after which an engine without requests ends [min]."""
    stop_timeout: float = 900.0
    """Timeout of `birl stop` waiting for the run to save; then the containers are ended [s]."""
    environment: str = ""
    """Modal environment. Empty: the client's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of one container. `gpu` in Modal's form, "A100:2"; empty: none. `memory_mb` 0: Modal's default.

    Example: Machine(gpu="A100:2", cpus=8, memory_mb=65536)
    """

    gpu: str = ""
    cpus: float = 1.0
    memory_mb: int = 0

    def words(self) -> dict[str, Any]:
        """Arguments of `app.function`."""
        return {"gpu": self.gpu or None, "cpu": self.cpus, "memory": self.memory_mb or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one app. `files`: pairs of a local path and a path in the containers. `env`: names of variables whose
    values the deploying process has, `secrets`: names of secrets that Modal has. `package`: what pip installs instead
    of this package's own source; `requirements` of that source, and packages that are installed `alone`, without
    theirs; `packages`: further ones; `vllm`: of an environment of its own, /opt/vllm; `browser`: whether BrowserGym
    gets one, too.

    Example: Settings(app="birl-demo", learner=Machine(gpu="A100"), engine=Machine(gpu="A10G"), env=("HF_TOKEN",))
    """

    app: str = "birl"
    volume: str = "birl"
    environment: str = ""
    learner: Machine = Machine(gpu="A100")
    engine: Machine = Machine(gpu="A10G")
    engines: int = 1
    seconds: int = LONGEST
    restarts: int = 3
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    package: str = ""
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    vllm: str = ""
    browser: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from this process's environment; else the defaults."""
    return typed(Settings, environ.get(VARIABLE) or "{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalPlan:
    """`work`: fields of `modal_container.ContainerWork` but the command. `here`: the learner runs on this machine.

    Example: plan = prepare(derive("rl", words, keys), keys)
    """

    settings: Settings
    learner: list[str]
    engine: list[str]
    work: dict[str, Any]
    here: bool

    def at(self, addresses: Sequence[str]) -> list[str]:
        """The learner's command on this machine, for engines at these addresses."""
        kept = [word for word in self.learner if not word.startswith("engine.attach=")]
        return ["birl", *kept[3:], f"engine.attach=[{','.join(addresses)}]"]


def prepare(job: Job, keys: Keys) -> ModalPlan:
    """The plan of a job. Raises `BirlError` for what Modal cannot do, with the key and what to write instead."""
    check(keys)
    config = job.config
    inside = job.engine is not None and keys.engines == "inside"
    engine = None if inside else job.engine
    vllm = package.engine(job, keys.vllm) if inside else ""
    beside = job.engine.gpus * job.engine.count if job.engine and inside and not config.engine.sleep else 0.0
    if engine is not None:
        check_engines(config)
    elif keys.learner == "here":
        raise BirlError("launch.learner=here: the job has no engines that could be elsewhere; set engine.kind=birl")
    learner = [*told(job.learner, inside), *(["weights.method=direct"] if engine is not None else [])]
    learner += ["engine.python=/opt/vllm/bin/python"] if vllm else []
    needs = package.needs(config)
    own = package.requirements(needs.extras)
    own = [package.requirement(keys.package, needs.extras)] if keys.package else own
    env = [*keys.env, *(["BIRL_TOKEN"] if engine is not None else [])]
    settings = Settings(
        app=app_name(job.name),
        volume=keys.volume,
        environment=keys.environment,
        learner=machine(job.learner, keys.gpu, all_ranks=True, more=beside),
        engine=machine(engine, keys.engine_gpu) if engine is not None else Machine(),
        engines=engine.count if engine is not None else 0,
        seconds=int(keys.hours * 3600),
        restarts=keys.restarts,
        env=tuple(dict.fromkeys(env)),
        secrets=tuple(keys.secrets),
        files=tuple(files(job, keys.files)),
        package=keys.package,
        requirements=tuple(own),
        alone=needs.alone,
        packages=(*needs.packages, *keys.packages),
        browser=needs.browser,
        vllm=vllm,
    )
    work = {
        "run": str(job.run),
        "place": f"{ROOT}/runs/{job.name}",
        "engines": job.engines if engine is not None else "",
        "count": settings.engines,
        "seconds": keys.hours * 3600,
        "idle": keys.idle * 60,
    }
    return ModalPlan(
        settings=settings,
        learner=learner,
        engine=told(engine, False) if engine is not None else [],
        work=work,
        here=keys.learner == "here",
    )


def check(keys: Keys) -> None:
    if keys.nodes != 1:
        raise BirlError(
            f"launch.nodes={keys.nodes}: all ranks of a learner are in one container, with at most {LARGEST} GPUs; "
            "leave it at 1. Engines have containers of their own anyway."
        )
    if keys.learner == "here" and keys.engines == "inside":
        raise BirlError("launch.learner=here: engines cannot be inside of its container then; set launch.engines=apart")
    if keys.vllm and keys.engines != "inside":
        raise BirlError(f"launch.vllm={keys.vllm}: only launch.engines=inside reads it")


def check_engines(config: Any) -> None:
    if config.engine.kind != "birl":
        raise BirlError(
            f"engine.kind={config.engine.kind}: takes weights from a folder that it shares with the learner, and "
            "containers of Modal share none. Set engine.kind=birl, or launch.engines=inside for one container."
        )
    if config.weights.method not in ("auto", "direct"):
        raise BirlError(
            f"weights.method={weights_method(config)}: containers of Modal share no folder or network for it; "
            "leave it at auto (which is direct here), or set launch.engines=inside"
        )


def told(role: Role, inside: bool) -> list[str]:
    """The command in a container, whose Python is `python`. With engines `inside`, the learner starts them itself."""
    python, *words = role.command
    words = [w for w in words if not (inside and w.startswith("engine.attach="))]
    return ["python" if python == sys.executable else python, *words]


def machine(role: Role, kind: str, all_ranks: bool = False, more: float = 0.0) -> Machine:
    """Resources of a container with one process of the role, or with all of them; `more`: GPUs of others."""
    ranks = role.count if all_ranks else 1
    gpus = role.gpus * ranks + more
    if gpus != int(gpus) or gpus > LARGEST:
        raise BirlError(
            f"launch.gpus: the {role.name} would need {gpus:g} GPUs in one container, but Modal has whole ones, at "
            f"most {LARGEST}. Lower parallel.* or launch.gpus."
        )
    if gpus and not re.fullmatch(r"[A-Za-z0-9-]+!?", kind):
        raise BirlError(f"launch.{'' if all_ranks else 'engine_'}gpu={kind}: name one kind, such as A100 or H100")
    gpu = f"{kind}:{gpus:g}" if gpus > 1 else kind if gpus else ""
    return Machine(gpu=gpu, cpus=role.cpus * ranks, memory_mb=int(role.memory_gb * ranks * 1024))


def app_name(name: str) -> str:
    """A valid app name for Modal: letters, digits, - _ and ., at most 64."""
    return ("birl-" + re.sub(r"[^A-Za-z0-9._-]+", "-", name))[:64].rstrip("-")


def files(job: Job, further: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Local files that processes need, with their paths in the containers. Raises `BirlError`."""
    for path in further:
        if not Path(path).exists():
            raise BirlError(f"launch.files: there is no {path} here")
    for path in dict.fromkeys([*package.local(job), *further]):
        pure = PurePosixPath(path)
        if ".." in pure.parts:
            raise BirlError(f"{path}: is outside of this folder; name it by its whole path, or copy it")
        if Path(path).absolute().is_relative_to(job.run.absolute()):
            raise BirlError(f"{path}: is in the run folder, which is on the volume there; move it elsewhere")
        yield str(Path(path).absolute()), str(pure if pure.is_absolute() else PurePosixPath(HERE) / pure)

"""What the app of a job needs to know where it is defined: on the machine that deploys it, and again in each container,
which imports the same module. It travels in one environment variable as JSON; no secret is in it, only names."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "BIRL_MODAL"
ROOT = "/birl"  # where the volume is
HERE = "/root/work"  # where commands run, and where files of the user's folder are
SOURCE = "/root/birl"  # this package, unless `package` names what pip installs
LARGEST = 8  # GPUs that one container can have
LONGEST = 24 * 3600  # s that Modal lets a function run


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one container gets. `gpu` in Modal's words, "A100:2"; empty: none. `memory_mb` 0: Modal's default.

    Example: Machine(gpu="A100:2", cpus=8, memory_mb=65536)
    """

    gpu: str = ""
    cpus: float = 1.0
    memory_mb: int = 0

    def words(self) -> dict[str, Any]:
        """As `app.function` takes it."""
        return {"gpu": self.gpu or None, "cpu": self.cpus, "memory": self.memory_mb or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one app. `files`: pairs of a place here and a place in the containers. `env`: names of variables whose values
    the deploying process has, `secrets`: names of secrets that Modal has. `package`: what pip installs instead of this
    package's own source; `requirements` of that source, and packages that are installed `alone`, without theirs;
    `packages`: further ones; `vllm`: of an environment of its own, /opt/vllm; `browser`: whether
    BrowserGym gets one, too.

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
    """As this process was configured; else the defaults."""
    result = json.loads(environ.get(VARIABLE) or "{}")
    for name in ("learner", "engine"):
        if name in result:
            result[name] = Machine(**result[name])
    for name in ("env", "secrets", "packages", "requirements", "alone"):
        result[name] = tuple(result.get(name, ()))
    result["files"] = tuple((here, there) for here, there in result.get("files", ()))
    return Settings(**result)

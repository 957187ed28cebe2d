"""`birl plan`: the memory that a run would need, from the model's config.json alone, and its table."""

import json
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from birl.config import schema
from birl.config.decided import total_steps
from birl.config.load import load
from birl.errors import BirlError
from birl.learner.export import resolved
from birl.learner.open import check_device
from birl.models.device import choose
from birl.models.load import context_limit, skeleton
from birl.parallel.grid import grid_of
from birl.parallel.machine import free_memory, peak_memory
from birl.plan import run_memory as memory
from birl.plan import sizes
from birl.plan.cluster import cluster_of
from birl.plan.rank_memory import USABLE
from birl.plan.run_memory import GIB, Phases
from birl.track.units import counted
from birl.train.parts import Parts
from birl.visible import visible

PROMPT = 128  # tokens of a prompt, unless data.max_prompt_tokens is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU that a plan is for. `memory` [bytes], of which it may use `USABLE`."""

    name: str
    memory: int


def card_of(config: schema.RL, kind: str = "") -> Card | None:
    """The GPU of the named kind (`birl/plan/cluster.py`), else the one of model.device on this machine; None for a CPU.
    Raises `BirlError`."""
    if kind:
        return Card(name=kind, memory=int(USABLE * cluster_of(kind, 1, key="device").memory))
    device = choose(config.model.device)
    if device.type == "cpu":
        return None
    facts = torch.cuda.get_device_properties(device)
    return Card(name=facts.name, memory=int(USABLE * facts.total_memory))


def run(words: list[str], kind: str = "", *, as_json: bool = False, available: float | None = None) -> dict[str, Any]:
    """Print the plan for a configuration of `birl rl`, on a GPU of that `kind` if given; `available` [GiB] replaces the
    free memory."""
    config = load(schema.RL, ["data.train=unread.jsonl", *words])  # the configuration needs data; it is not read
    card = card_of(config, kind)
    check_device(config, torch.device("cuda" if card else "cpu"))
    folder = resolved(config.model.path, weights=False, say=lambda text: print(text, file=sys.stderr))
    prompt = config.data.max_prompt_tokens or PROMPT
    result = plan(skeleton(folder), config, prompt=prompt, available=available, card=card)
    print(json.dumps(result, indent=1) if as_json else "\n".join(render(result, config)))
    return result


def check(config: schema.RL, kind: str = "") -> None:
    """Before anything is loaded: raises `BirlError` if a GPU cannot hold the trained model, at any batch size."""
    card = card_of(config, kind)
    if card is None:
        return
    model = skeleton(resolved(config.model.path, weights=False))
    smallest = sizes.Load(microbatch=1, several=False, sequences=1, group=1, prompt=1, longest=2)
    phases = memory.predict(model, replace(config, engine=replace(config.engine, max_batch=1)), smallest, card.memory)
    needs = max(sum(s for name, s in c.items() if name != "between blocks") for c in phases.values())
    if needs > card.memory:
        raise BirlError(
            f"model.path={config.model.path}: weights, gradient and AdamW's state need {needs / GIB:.1f} GiB of each "
            f"GPU, and {card.name} has {card.memory / GIB:.1f} usable. Split them (parallel.fsdp), set "
            "optimizer.offload=cpu, lora.rank or with it lora.quantize=nf4, or take a smaller model."
        )


def dry_run(config: schema.RL, parts: Parts, kind: str = "") -> dict[str, Any]:
    """`birl rl --dry-run`: print the first prompt as the model gets it, and the plan for the run's prompts, on a GPU of
    that `kind` if given."""
    chat = parts.chat
    task = next(parts.stream(0))
    prompt = chat.render(task.prompt)
    longest = max(len(chat.render(t[i].prompt)) for t in parts.train for i in range(len(t)))
    result = plan(parts.policy.model, config, prompt=longest, card=card_of(config, kind))
    total = total_steps(config, sum(map(len, parts.train)))
    steps = counted(total, "step") if total else "an unknown number of steps"
    text, most = visible(chat.decode(prompt)), 4 * min(shutil.get_terminal_size().columns, 120)
    print(
        f"Would train {config.model.path} for {steps} of "
        f"{counted(config.rollout.prompts, 'prompt')} x {counted(config.rollout.group_size, 'answer')}.",
        f"\nFirst prompt ({task.place}, answer {task.answer!r}):",
        textwrap.indent((text if len(text) <= most else f"{text[:most]} ...").rstrip("\n"), "  ") + "\n",
        *render(result, config),
        sep="\n",
    )
    return {"memory": result, "prompt_tokens": len(prompt), "steps": total}


def plan(
    model: nn.Module, config: schema.RL, *, prompt: int, available: float | None = None, card: Card | None = None
) -> dict[str, Any]:
    """The plan. `prompt`: tokens of the longest prompt."""
    context = min(config.model.max_length or context_limit(model), context_limit(model))
    answer = config.rollout.max_tokens
    if answer >= context:
        raise BirlError(f"rollout.max_tokens={answer} leaves no room for a prompt in the context of {context} tokens.")
    longest = min(prompt + max(answer, config.validation.max_tokens), context)
    step = sizes.load_of(config, min(prompt, context - answer), longest)
    free = (card.memory if card else usable()) if available is None else int(available * GIB)
    size = free if card else 0
    phases = memory.predict(model, config, step, size)
    return {
        "model": config.model.path,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step": asdict(step),
        "phases": phases,
        "device": card.name if card else "cpu",
        "peak": memory.peak(phases, size),
        "available": free,
        "largest": memory.largest(model, config, step, free, size) if free else {},
    }


def usable() -> int:
    """Free memory plus that of this process, which the prediction includes [bytes]. 0 if unknown."""
    free = free_memory(torch.device("cpu"))
    return free + int(peak_memory() * GIB) if free else 0


def render(plan: dict[str, Any], config: schema.RL) -> list[str]:
    """The lines that `birl plan` and `birl rl --dry-run` print."""
    step, rollout, ranks = plan["step"], config.rollout, grid_of(config).size
    lines = [
        f"{plan['model']}: {plan['parameters'] / 1e6:,.1f} million parameters, {config.model.dtype}, {plan['device']}",
        f"A step: {rollout.prompts} prompts of up to {step['prompt']} tokens x {rollout.group_size} answers of up to "
        f"{rollout.max_tokens}; {step['sequences']} sequences at once, micro-batches of up to {step['microbatch']:,} "
        "tokens.",
        *([f"{ranks} processes; the figures are those of one."] if ranks > 1 else []),
        "",
        *table(plan["phases"]),
        "",
        f"{'peak':<28}{plan['peak'] / GIB:10.2f} GiB",
    ]
    if not plan["available"]:
        return lines
    lines.append(f"{'available':<28}{plan['available'] / GIB:10.2f} GiB")
    if plan["peak"] > plan["available"]:
        lines.append("This does not fit.")
    elif plan["device"] == "cpu" and ranks * plan["peak"] > plan["available"]:
        lines.append(f"Fewer than {ranks} processes fit on this machine.")
    tokens, batch = plan["largest"].values()
    return [
        *lines,
        "",
        "What would still fit, each key alone:",
        f"  learner.tokens_per_microbatch={tokens}" if tokens else "  no learner.tokens_per_microbatch",
        f"  engine.max_batch={batch} sequences of {step['longest']} tokens" if batch else "  no engine.max_batch",
    ]


def table(phases: Phases) -> list[str]:
    """Purposes as rows, phases as columns [GiB]."""
    purposes = list(dict.fromkeys(name for column in phases.values() for name in column))
    last = purposes.pop(purposes.index("between blocks"))
    rows = [f"{'GiB':<28}" + "".join(f"{phase:>12}" for phase in phases)]
    for name in [*purposes, last]:
        sizes = [column.get(name, 0) for column in phases.values()]
        if any(sizes):
            rows.append(f"{name:<28}" + "".join(f"{size / GIB:12.2f}" if size else " " * 12 for size in sizes).rstrip())
    totals = "".join(f"{sum(column.values()) / GIB:12.2f}" for column in phases.values())
    return [*rows, f"{'together':<28}{totals}"]

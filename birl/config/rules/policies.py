"""What several policies, each with a LoRA of its own in the embedded engine, go together with."""

import re
from collections.abc import Callable, Iterator

from birl.config.decided import CRITIC
from birl.config.schema import RL
from birl.config.words import setting

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

#: what is told behind the key, with {c} as the configuration -> when
REFUSED: dict[str, Callable[[RL], object]] = {
    "each policy has a LoRA of its own over model.path; set lora.rank=16": lambda c: c.lora.rank == 0,
    "policies add their matrices to the base instead of merging them, which lora.dora=true needs; set "
    "lora.dora=false": lambda c: c.lora.dora,
    "adding to a quantised base (lora.quantize={c.lora.quantize}) is not built; set lora.quantize=none": lambda c: (
        c.lora.quantize != "none"
    ),
    "only engine.kind=embedded samples from several adapters, not engine.kind={c.engine.kind}": lambda c: (
        c.engine.kind != "embedded"
    ),
    "is not built for several learner processes; leave out parallel.*": lambda c: (
        max(c.parallel.ddp, c.parallel.fsdp, c.parallel.cp, c.parallel.tp) > 1
    ),
    "keeps no weights of older versions to compare with, so there is none for "
    "rollout.max_staleness={c.rollout.max_staleness}; set 0": lambda c: c.rollout.max_staleness > 0,
    "one critic (algorithm.advantage={c.algorithm.advantage}) would judge all of them; set "
    "algorithm.advantage=relative": lambda c: c.algorithm.advantage in CRITIC,
    "a greedy episode is no baseline for a single policy's turns; take another algorithm.baseline": lambda c: (
        c.algorithm.baseline == "greedy"
    ),
    "algorithm.teacher=self would teach them with one another's average; name a model, or none": lambda c: (
        c.algorithm.teacher == "self"
    ),
    "experts' routes are not replayed under adapters; set algorithm.router_replay=none": lambda c: (
        c.algorithm.router_replay != "none"
    ),
    "a replay samples anew with the base alone; set debug.resample=false": lambda c: c.debug.resample,
    "adapters are small, and optimizer.offload=cpu is not built for them; set none": lambda c: (
        c.optimizer.offload != "none"
    ),
}


def told(c: RL) -> Iterator[str]:
    """A single policy without a league is the run's ordinary one, under a name."""
    for name in c.policies:
        if not NAME.fullmatch(name):
            yield f"policies: {name!r} is no name; use letters, digits, and . _ - behind the first."
    if len(set(c.policies)) < len(c.policies):
        yield f"{setting(c, 'policies')}: two of them have one name; name each differently."
    if len(c.policies) > 1 or (c.policies and c.league.every):
        key = "policies" if len(c.policies) > 1 else "league.every"
        yield from (f"{setting(c, key)}: {why.format(c=c)}." for why, holds in REFUSED.items() if holds(c))

"""Rules about runs of several processes."""

from birl.config.schema import RL, Stage
from birl.config.words import without_effect


def parallel_problems(config: RL | Stage) -> list[str]:
    keys, found = config.parallel, []
    if keys.ddp * keys.fsdp * keys.cp * keys.tp == 1:
        found += without_effect(config, "parallel.timeout", "there is only one process; set parallel.fsdp, say")
    if keys.tp == 1:
        found += without_effect(config, "parallel.sequence", "parallel.tp=1")
    return found

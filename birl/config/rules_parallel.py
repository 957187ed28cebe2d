"""Rules about runs of several processes."""

from birl.config.schema import RL, Stage
from birl.config.words import without_effect


def parallel_problems(config: RL | Stage) -> list[str]:
    keys, found = config.parallel, []
    if keys.ddp * keys.fsdp * keys.cp * keys.tp == 1:
        found += without_effect(config, "parallel.timeout", "there is only one process; set parallel.fsdp, say")
    if keys.tp == 1:
        found += without_effect(config, "parallel.sequence", "parallel.tp=1")
    if keys.cp == 1:
        found += without_effect(config, "parallel.context", "parallel.cp=1 splits no row; set parallel.cp=2, say")
    if isinstance(config, RL) and config.weights.method == "nccl" and keys.fsdp * keys.cp * keys.tp > 1:
        found.append(
            "weights.method=nccl: broadcasts whole weights from one process, and parallel.fsdp, cp or tp leave each "
            "with parts of them. Set weights.method=direct or reload."
        )
    return found

"""Rules about mixture-of-experts models. Standard library only."""

from birl.config.schema import RL, Stage
from birl.config.words import said


def experts_problems(config: RL | Stage) -> list[str]:
    keys, found = config.parallel, []
    ranks = keys.fsdp * keys.cp
    if keys.ep > 1 and ranks % keys.ep:
        found.append(
            f"parallel.ep={keys.ep}: must divide parallel.fsdp x parallel.cp = {keys.fsdp} x {keys.cp} = {ranks}, the "
            "processes that experts are shared out among."
        )
    if keys.ep > 1 and keys.tp > 1:
        found.append(f"parallel.ep={keys.ep}: does not go together with parallel.tp={keys.tp}; set one of them to 1.")
    if config.learner.router_aux_coef > 0:
        found += _whole_rows(config, "learner.router_aux_coef")
    if isinstance(config, RL) and config.algorithm.router_replay != "none":
        found += _whole_rows(config, "algorithm.router_replay") + _replay(config)
    return found


def _whole_rows(config: RL | Stage, key: str) -> list[str]:
    split = [axis for axis in ("cp", "tp") if getattr(config.parallel, axis) > 1]
    return [
        f"{said(config, key)}: reads the routers of whole rows, which parallel.{axis}={getattr(config.parallel, axis)} "
        f"splits; set parallel.{axis}=1."
        for axis in split
    ]


def _replay(config: RL) -> list[str]:
    """The routes are in the memory of the run alone."""
    key, found = said(config, "algorithm.router_replay"), []
    if config.engine.kind != "embedded":
        found.append(
            f"{key}: only engine.kind=embedded says which experts it used, not engine.kind={config.engine.kind}."
        )
    if config.debug.replay:
        found.append(f"{key}: a record holds no routes; debug.replay={config.debug.replay} needs router_replay=none.")
    if config.track.record:
        found.append(f"{key}: track.record=true could not be replayed, as a record holds no routes; use one.")
    return found

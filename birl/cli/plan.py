"""`birl plan`: memory of a training, with --simulate and --cluster."""

from collections.abc import Sequence
from math import inf

from birl.config.load import load
from birl.config.schema import RL
from birl.flags import JSON, Flag, taken
from birl.hub import check_model, is_model
from birl.plan.cluster import split_device


def gib(text: str) -> float:
    """Parse a finite number above 0. Raises ValueError."""
    if not 0 < float(text) < inf:
        raise ValueError
    return float(text)


MEMORY = Flag(name="--memory", value="GIB", takes="a number of GiB, as in `birl plan --memory 16`", read=gib)
MEASURED = Flag(name="--measured", value="FILE", takes="a file, as in `birl plan --simulate --measured async.json`")
SIMULATE, CLUSTER = Flag(name="--simulate"), Flag(name="--cluster")


def run(words: Sequence[str]) -> int:
    """Run `birl plan`. Raises `BirlError`."""
    named = {word.partition("=")[0] for word in words}
    if named & {SIMULATE.name, MEASURED.name}:
        from birl.plan import simulate_command

        flags, words = taken("plan --simulate", words, (SIMULATE, MEASURED, JSON))
        simulate_command.run(words, measured=flags.get(MEASURED.name, ""), as_json=JSON.name in flags)
    elif CLUSTER.name in named:
        from birl.plan import cluster_command

        flags, words = taken("plan --cluster", words, (CLUSTER, JSON))
        cluster_command.run(words, as_json=JSON.name in flags)
    else:
        flags, words = taken("plan", words, (MEMORY, JSON, SIMULATE, CLUSTER))
        words = [f"model={word}" if is_model(word) else word for word in words]
        words, kind = split_device(words)
        check_model("model.path", load(RL, ["data.train=unread.jsonl", *words]).model.path, whole=False)
        from birl.plan import run as plan

        plan.run(words, kind, as_json=JSON.name in flags, available=flags.get(MEMORY.name))
    return 0

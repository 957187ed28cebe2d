"""Jobs of `--multirun`."""

import itertools
import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from birl.errors import BirlError, first_line


def sweep(overrides: list[str]) -> list[list[str]]:
    """The jobs of `--multirun`: every combination of `key=a,b`, `key=range(0,3)` and `key=choice(a,b)`."""
    return [list(job) for job in itertools.product(*(_values(argument) for argument in overrides))]


def swept_keys(overrides: list[str]) -> list[str]:
    """The keys that `sweep` varies."""
    return [argument.partition("=")[0] for argument in overrides if len(_values(argument)) > 1]


def job_names(jobs: list[list[str]], swept: list[str]) -> list[str]:
    """Folder names of the jobs, from their swept values: `lr=1e-5,seed=1`."""
    names: list[str] = []
    last = [key.rpartition(".")[2] for key in swept]
    for job in jobs:
        values = [word.partition("=")[::2] for word in job]
        parts = []
        for key, value in values:
            if key in swept:
                short = key.rpartition(".")[2]
                short = short if last.count(short) == 1 else key
                parts.append(f"{short}={re.sub(r'[^A-Za-z0-9_.+-]+', '_', value)[-60:].strip('_')}")
        name = ",".join(parts)
        names.append(f"{name}-{len(names)}" if name in names else name)
    return names


def _values(argument: str) -> list[str]:
    """One word per value. A text that Hydra's grammar cannot read is one value; `load` accepts it or reports it."""
    if "=" not in argument:
        return [argument]
    try:
        override: Override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return [argument]
    if override.is_discrete_sweep():
        try:
            values = list(override.sweep_string_iterator())
        except HydraException as error:
            raise BirlError(f"{argument}: {first_line(error)}. Use a list, range(...) or choice(...)") from None
        if not values:
            raise BirlError(f"{argument}: this sweep is empty")
        return [f"{override.get_key_element()}={value}" for value in values]
    if override.is_sweep_override():
        raise BirlError(
            f"{argument}: has no list of values to try; use {override.key_or_group}=a,b or range(...) or choice(...)"
        )
    return [argument]

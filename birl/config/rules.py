"""All rules that several keys are in."""

from birl.config.rules_algorithm import algorithm_problems
from birl.config.rules_engine import asynchronous_problems, engine_problems
from birl.config.rules_experts import experts_problems
from birl.config.rules_parallel import parallel_problems
from birl.config.rules_run import (
    _data,
    _environment,
    _eval,
    _files,
    _lora,
    _model,
    _optimizer,
    _own,
    _rewards,
    _run,
    _sampling,
    _sizes,
    _validation,
)
from birl.config.rules_stages import stage_problems
from birl.config.schema import Config, Eval, Serve, Stage


def rules(config: Config) -> list[str]:
    found = [*_own(config), *_files(config.model)]
    if isinstance(config, Serve):
        return found + ["host is empty: name an address, as in host=127.0.0.1."] * (not config.host.strip())
    found += _model(config)
    found += [] if isinstance(config, Eval) else experts_problems(config)
    if isinstance(config, Stage):
        found += [*_data(config), *stage_problems(config), *parallel_problems(config)]
        return [*found, *_optimizer(config, 1), *_lora(config), *_run(config)]
    found += [*_environment(config), *_rewards(config), *_validation(config), *engine_problems(config)]
    if isinstance(config, Eval):
        return found + _eval(config)
    return [
        *found,
        *_data(config),
        *_sampling(config),
        *asynchronous_problems(config),
        *algorithm_problems(config),
        *parallel_problems(config),
        *_sizes(config),
        *_optimizer(config, config.algorithm.updates_per_batch * config.algorithm.passes),
        *_lora(config),
        *_run(config),
    ]

"""The embedded engine as several policies: one engine, one base, and the adapter of the policy that replies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from birl.engine.engine import EmbeddedEngine
from birl.models.low_rank import AdapterWeights
from birl.types import PAST, Completion, Engine, SamplingParams

if TYPE_CHECKING:  # loaded by the runs that have them
    from birl.learner.policies import Policies


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """Implements `birl.types.Engine` for one policy. `adapter`: what it adds to the base at the time of a question."""

    engine: EmbeddedEngine
    adapter: Callable[[], AdapterWeights]

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        return await self.engine.generate(prompt_ids, params, session, adapter=self.adapter())

    async def close(self) -> None:
        """The engine is the others', too."""


def engines_of(names: Sequence[str], engine: Engine, policies: "Policies | None", draw: int) -> Mapping[str, Engine]:
    """An engine for each policy by name and, where a league keeps earlier versions, for the one of them that a group
    draws. `policies` None: the engine's weights are those of the only one."""
    if policies is None:
        return dict.fromkeys(names, engine)
    assert isinstance(engine, EmbeddedEngine), "no other has adapters"
    result: dict[str, Engine] = {name: PolicyEngine(engine, partial(policies.adapter, name)) for name in names}
    for name, versions in policies.past.items():
        if versions:
            result[name + PAST] = PolicyEngine(engine, partial(policies.adapter, name, draw % len(versions)))
    return result

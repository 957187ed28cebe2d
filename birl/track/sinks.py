"""Which trackers there are: the key that asks for each, its package and its class."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from birl.errors import BirlError
from birl.track.sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A tracker that `track.NAME=offline` or `online` asks for. `extra`: of birl's, which installs its package."""

    name: str
    title: str
    sink: str

    @property
    def install(self) -> str:
        return f'pip install "birl[{self.name}]"'

    def problem(self, mode: str) -> str:
        """What has to be done before this mode works; empty: nothing."""
        if mode == "off" or find_spec(self.name) is not None:
            return ""
        return f"track.{self.name}={mode}: {self.title} is not installed: {self.install} (or track.{self.name}=off)"

    def make(self) -> Sink:
        module, _, name = self.sink.partition(":")
        return getattr(import_module(module), name)()


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="wandb", title="Weights & Biases", sink="birl.track.wandb:WandbRun"),
        Kind(name="mlflow", title="MLflow", sink="birl.track.mlflow:MlflowRun"),
        Kind(name="trackio", title="Trackio", sink="birl.track.trackio:TrackioRun"),
        Kind(name="swanlab", title="SwanLab", sink="birl.track.swanlab:SwanlabRun"),
    )
}


def wanted(track: Any) -> dict[str, Kind]:
    """The trackers that a configuration asks for. Raises `BirlError` where a package is missing."""
    modes = {name: getattr(track, name) for name in KINDS}
    problems = [KINDS[name].problem(mode) for name, mode in modes.items()]
    if any(problems):
        raise BirlError("\n".join(f"{problem}." for problem in problems if problem))
    return {name: KINDS[name] for name, mode in modes.items() if mode != "off"}

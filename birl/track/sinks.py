"""Which trackers there are: the key that asks for each, its package and its class."""

from collections.abc import Mapping
from dataclasses import dataclass

from birl.named import module
from birl.track.sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A tracker that `track.NAME=offline` or `online` asks for."""

    name: str
    title: str
    sink: str

    def make(self) -> Sink:
        place, _, name = self.sink.partition(":")
        return getattr(module(f"track.{self.name}", place), name)()


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="wandb", title="Weights & Biases", sink="birl.track.wandb:WandbRun"),
        Kind(name="mlflow", title="MLflow", sink="birl.track.mlflow:MlflowRun"),
        Kind(name="trackio", title="Trackio", sink="birl.track.trackio:TrackioRun"),
        Kind(name="swanlab", title="SwanLab", sink="birl.track.swanlab:SwanlabRun"),
    )
}

"""Where a run's figures go beside its own files: one small interface, and what every tracker gets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from birl.named import module

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a tracker has to know of a run. `mode`: offline (into the run folder, without network) or online. `id`: the
    same for every process that goes on with the run. `config` is without secrets. `step`: finished steps. `resumed`: an
    earlier process has sent figures under this id."""

    run: Path
    mode: str
    id: str
    config: Mapping[str, object]
    step: int = 0
    resumed: bool = False


class Sink(Protocol):
    """A tracker such as W&B. Everything is called on one thread, `start` first; whatever is raised is the tracker's
    failure, not the run's. A `BirlError` of `start` is the user's to mend, and ends the run before its first step."""

    def start(self, start: Start) -> None: ...
    def log(self, step: int, figures: Figures) -> None: ...
    def samples(self, step: int, samples: list[dict[str, Any]]) -> None: ...
    def close(self, summary: Figures, failed: bool) -> None: ...


_SECRET = re.compile(
    r"(?:token|password|passwd|secret|api_?key|access_?key|credentials?|authorization)$", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_IN_URL = re.compile(r"([?&][^=&#\s]*(?:token|password|secret|key|signature)=)[^&#\s]*", re.IGNORECASE)
HIDDEN = "(hidden)"


def public(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what opens doors: texts of keys that end in token, password and the like, and the user
    names, passwords and keys within addresses.

    Example: public({"env.api_key": "abc", "reward.judge": "http://me:pw@host/v1"}) ==
    {"env.api_key": "(hidden)", "reward.judge": "http://(hidden)@host/v1"}
    """
    return {key: _public(key, value) for key, value in config.items()}


def _public(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _public(str(inner), one) for inner, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(key, one) for one in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET.search(key):
        return HIDDEN
    return _SECRET_IN_URL.sub(rf"\1{HIDDEN}", _USER_IN_URL.sub(f"{HIDDEN}@", value))


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

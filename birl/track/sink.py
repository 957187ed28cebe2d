"""Interface of experiment trackers, and the data that every tracker gets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from birl.named import module

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Data of a run for a tracker at its start. `mode`: offline (into the run folder, without network) or online. `id`:
    the same for every process of the run. `config` is without secrets. `step`: finished steps. `resumed`: an earlier
    process has sent figures under this id."""

    run: Path
    mode: str
    id: str
    config: Mapping[str, object]
    step: int = 0
    resumed: bool = False


class Sink(Protocol):
    """A tracker such as W&B. All calls come from one thread, `start` first; an exception is a failure of the tracker,
    not of the run. A `BirlError` of `start` is for the user to fix, and ends the run before its first step."""

    def start(self, start: Start) -> None: ...
    def log(self, step: int, figures: Figures) -> None: ...
    def samples(self, step: int, samples: list[dict[str, Any]]) -> None: ...
    def close(self, summary: Figures, failed: bool) -> None: ...


_NAME = r"(?:token|password|passwd|secret|api[-_]?key|access[-_]?key|credentials?|authorization)"
_SECRET = re.compile(rf"{_NAME}$", re.IGNORECASE)
#: --api-key=abc and API_KEY=abc in a command, and --api-key abc, also as two elements of a list in YAML
_IN_COMMAND = re.compile(rf"([\w-]*{_NAME}=|--[\w-]*{_NAME}['\"]?\s+(?:- )?)[^\s&#]+", re.IGNORECASE)
_LINE = re.compile(rf"^(\s*[\w.-]*{_NAME}:\s+)(?!''|\"\"|null\b)\S.*$", re.IGNORECASE | re.MULTILINE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_IN_URL = re.compile(r"([?&][^=&#\s]*(?:token|password|secret|key|signature)=)[^&#\s]*", re.IGNORECASE)
HIDDEN = "(hidden)"


def public(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without secrets: texts of keys and options that end in token, password etc., and user names,
    passwords and keys in URLs. Bytes of a file's name that are no text are escaped.

    Example: public({"env.api_key": "abc", "reward.judge": "http://me:pw@host/v1"}) ==
    {"env.api_key": "(hidden)", "reward.judge": "http://(hidden)@host/v1"}
    """
    return {key: _public(key, value) for key, value in config.items()}


def _public(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _public(str(inner), one) for inner, one in value.items()}
    if isinstance(value, (list, tuple)):
        before = [key, *(str(one) if str(one).startswith("--") else key for one in value)]
        return [_public(name, one) for name, one in zip(before, value, strict=False)]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _SECRET.search(key) else _within(value.encode("utf-8", "backslashreplace").decode())


def hidden(text: str) -> str:
    """Hide secrets in a configuration in YAML, as `public` does."""
    return _within(_LINE.sub(rf"\1{HIDDEN}", text))


def _within(text: str) -> str:
    for pattern in (_SECRET_IN_URL, _IN_COMMAND):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _USER_IN_URL.sub(f"{HIDDEN}@", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A tracker that is enabled by `track.NAME=offline` or `online`."""

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

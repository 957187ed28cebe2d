"""MLflow. Offline: a database in the run folder; online: the server of MLFLOW_TRACKING_URI."""

import math
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.track.sink import Figures, Start

EXPERIMENT = "birl"
# MLflow waits two minutes for each of eight tries; a run keeps the figures and tries again itself.
IMPATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
PARAMETERS, METRICS, CHARACTERS = 100, 1000, 6000  # MLflow's limits of a call, and of a text
LONGEST = 250  # characters of a name


class MlflowRun:
    """One MLflow run, which a resumed training continues; it is found by its tag `birl.id`."""

    def start(self, start: Start) -> None:
        for name, value in {**IMPATIENT, **QUIET}.items():
            os.environ.setdefault(name, value)
        self._store = _store(start)
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=self._store)
        experiment = self._experiment(start)
        result = self._client.search_runs([experiment], f"tags.`birl.id` = '{start.id}'") if start.resumed else []
        if result:
            self._id = result[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"birl.id": start.id, "mlflow.source.name": "birl"}
        self._id = self._client.create_run(experiment, run_name=start.run.name, tags=tags).info.run_id
        parameters = [self._entities.Param(_name(key), str(value)[:CHARACTERS]) for key, value in start.config.items()]
        for first in range(0, len(parameters), PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS])

    def _experiment(self, start: Start) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        result = self._client.get_experiment_by_name(name)
        if result:
            return result.experiment_id
        # Beside the database; MLflow would create a folder in the current one.
        _, local, path = self._store.partition("sqlite:///")
        place = Path(path).resolve().with_name("artifacts").as_uri() if local else None
        return self._client.create_experiment(name, artifact_location=place)

    def log(self, step: int, figures: Figures) -> None:
        now = int(1000 * time.time())
        # MLflow's stores refuse NaN and infinity, or store them differently
        known = {name: value for name, value in figures.items() if math.isfinite(value)}
        metrics = [self._entities.Metric(_name(name), value, now, step) for name, value in known.items()]
        for first in range(0, len(metrics), METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + METRICS])

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._client.log_dict(self._id, {"step": step, "samples": samples}, f"samples/step-{step:06d}.json")

    def close(self, summary: Figures, failed: bool) -> None:
        for name, value in summary.items():
            self._client.set_tag(self._id, _name(f"birl.{name}"), f"{value:g}")
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _store(start: Start) -> str:
    if start.mode == "offline":
        folder = start.run.resolve() / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}"
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise BirlError(
            "track.mlflow=online: where to is missing: export MLFLOW_TRACKING_URI=http://HOST:5000, or "
            "sqlite:////PATH/mlflow.db for a store that several runs share. track.mlflow=offline writes into the run "
            "folder."
        )
    return uri


def _name(name: str) -> str:
    """A metric name that MLflow accepts: without the character of `pass@1`, and a plain path: a source may be a URL."""
    plain = "".join(char if char.isalnum() or char in "/_-. " else "_" for char in name)
    return "/".join(part if part.strip(".") else f"_{part}" for part in plain.split("/"))[:LONGEST].rstrip("/")

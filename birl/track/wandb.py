"""Weights & Biases, when asked for. Offline keeps everything in the run folder until `wandb sync`."""

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birl.errors import BirlError
from birl.track.log import writing


class WandbRun:
    """One W&B run that a resumed training goes on writing to: its id lies in the run folder.

    Example: WandbRun(run, "offline", config={"seed": 0}, resume=False).log(1, {"reward/mean": 0.2})
    """

    def __init__(self, run: Path, mode: str, config: Mapping[str, object], resume: bool) -> None:
        wandb = module()
        try:
            self._run = wandb.init(
                project="birl",
                name=run.name,
                id=_run_id(run, resume),
                dir=str(run),
                mode=mode,
                config=dict(config),
                resume="allow" if resume and mode == "online" else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            reason = str(error).rstrip(".")
            raise BirlError(
                f"track.wandb={mode}: {reason}. Run `wandb login` first, or use track.wandb=offline, then `wandb sync`."
            ) from error
        self._wandb = wandb

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        columns = ["prompt", "completion", "answer", "score", "source"]
        table = self._wandb.Table(columns=columns, data=[[str(s.get(c, "")) for c in columns] for s in samples])
        self._run.log({"validation/samples": table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def module() -> Any:
    """The wandb package, or the error that says how to get it."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise BirlError('track.wandb needs a package: pip install "birl[wandb]" (or track.wandb=off)') from error


def _run_id(run: Path, resume: bool) -> str:
    path = run / "wandb_id"
    if not (resume and path.exists()):
        with writing(path):
            path.write_text(secrets.token_hex(8))
    return path.read_text().strip()

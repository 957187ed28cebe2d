"""Weights & Biases. Offline: everything is in RUN/wandb until `wandb sync`."""

import importlib
import os
from typing import Any

from birl.errors import BirlError
from birl.track.sink import Figures, Start

SETTINGS = {
    "console": "off",
    "silent": True,
    # Without the command line, which may contain secrets that `config` leaves out.
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "x_transaction_log_flush_interval": 1.0,  # seconds of metrics that a kill loses
    "login_timeout": 5,  # seconds
    "init_timeout": 30.0,
}


class WandbRun:
    """One W&B run, which a resumed training continues."""

    def start(self, start: Start) -> None:
        if start.mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else W&B sends error reports, even offline
        self._wandb = wandb = importlib.import_module("wandb")
        known = wandb.Settings.model_fields
        try:
            self._run = wandb.init(
                project="birl",
                name=start.run.name,
                id=start.id,
                dir=str(start.run),
                mode=start.mode,
                config=dict(start.config),
                resume="allow" if start.resumed and start.mode == "online" else None,
                settings=wandb.Settings(**{key: value for key, value in SETTINGS.items() if key in known}),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = str(error).rstrip(".")
            raise BirlError(
                f"track.wandb={start.mode}: {reason}. Run `wandb login` first, or use track.wandb=offline, then "
                "`wandb sync`."
            ) from error

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        columns = ["prompt", "completion", "answer", "score", "source"]
        table = self._wandb.Table(columns=columns, data=[[str(s.get(c, "")) for c in columns] for s in samples])
        self._run.log({"validation/samples": table}, step=step)

    def close(self, summary: Figures, failed: bool) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=1 if failed else 0)

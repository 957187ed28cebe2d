"""Trackio. Offline: a database in the run folder; online: as Trackio is configured: its shared folder on this machine,
or the Space or server of TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

import os
from importlib import import_module
from typing import Any

from birl.track.sink import Figures, Start

PROJECT = "birl"
ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_WEBHOOK_URL")


class TrackioRun:
    """One Trackio run, which a resumed training continues; it is found by its name."""

    def start(self, start: Start) -> None:
        offline = start.mode == "offline"
        if offline:
            # Trackio reads its folder setting once, on import.
            os.environ["TRACKIO_DIR"] = str(start.run.resolve() / "trackio")
        trackio, inner = import_module("trackio"), import_module("trackio.run")
        for module in (trackio, inner, import_module("trackio.utils")):
            vars(module)["print"] = lambda *words, **options: None  # its lines would mix with those of the run
        elsewhere = {}
        if offline:
            elsewhere = {name: os.environ.pop(name) for name in ELSEWHERE if name in os.environ}
            vars(inner)["_get_default_namespace"] = lambda: None  # it would ask the hub for the user name
        try:
            self._run = trackio.init(
                project=PROJECT,
                # Runs in the shared folder may have the same name but must stay separate.
                name=start.run.name if offline else f"{start.run.name}-{start.id[:6]}",
                config=dict(start.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        finally:
            os.environ.update(elsewhere)

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Not sent: Trackio's tables would store the answers as separate files."""

    def close(self, summary: Figures, failed: bool) -> None:
        self._run.finish()

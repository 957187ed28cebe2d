"""SwanLab. Offline: everything is in RUN/swanlab until `swanlab sync`."""

from contextlib import suppress
from importlib import import_module
from typing import Any

from birl.errors import BirlError
from birl.track.sink import Figures, Start

PROJECT = "birl"
# SwanLab's collection of data on machine, repository and terminal, and its questions, are turned off.
SETTINGS = {
    "interactive": False,
    "probe": {**dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False)},
    "terminal": {"proxy_type": "none"},
    "integration": {"webhook": {"url": None}},
}


class SwanlabRun:
    """One SwanLab experiment, which a resumed training continues."""

    def start(self, start: Start) -> None:
        self._swanlab = swanlab = import_module("swanlab")
        online = start.mode == "online"
        if not online:
            with suppress(ImportError, AttributeError):  # its lines would mix with those of the run
                import_module("swanlab.sdk.internal.pkg.console").c.quiet = True
        folder = start.run / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = swanlab.init(
                project=PROJECT,
                name=start.run.name,
                id=start.id[:21],
                resume="allow",
                config=dict(start.config),
                log_dir=str(folder),
                mode=start.mode,
                settings=swanlab.Settings(**SETTINGS),
            )
        except RuntimeError as error:
            if not online or "API key" not in str(error):
                raise
            raise BirlError(
                "track.swanlab=online: not logged in. Run `swanlab login` first, or use track.swanlab=offline, "
                "then `swanlab sync`."
            ) from error

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        texts = [self._swanlab.Text("\n".join(f"{k}: {v}" for k, v in sample.items())) for sample in samples]
        self._run.log({"validation/samples": texts}, step=step)

    def close(self, summary: Figures, failed: bool) -> None:
        self._run.finish()

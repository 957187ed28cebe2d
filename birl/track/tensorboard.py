"""TensorBoard events, written in TensorBoard's record format, without torch, TensorFlow or a thread."""

import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from birl.track.log import writing
from birl.track.sink import Figures, Start
from birl.visible import visible


class TensorBoard:
    """One event file in RUN/tensorboard, written synchronously: a full disk is an error of the run. Readers drop all
    earlier events of the folder that are after the step at which the run resumed."""

    def __init__(self, start: Start) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._protos, folder = _protos("event", "summary", "tensor", "tensor_shape"), start.run / "tensorboard"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / _name(folder)
            self._file = self.path.open("xb", buffering=0)
        self._records = RecordWriter(self._file)
        purge_step, session = start.step + 1 if start.resumed else 0, self._protos["SessionLog"]
        self._write(purge_step, file_version="brain.Event:2")
        self._write(purge_step, session_log=session(status=session.START))

    def log(self, step: int, figures: Figures) -> None:
        self._summary(step, [{"tag": name, "simple_value": value} for name, value in figures.items()])

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """A few validation samples as a Markdown table."""
        rows = [[str(sample.get(key, "")) for key in ("prompt", "completion", "answer", "score")] for sample in samples]
        lines = ["| prompt | completion | answer | score |", "| --- | --- | --- | --- |"]
        markdown = "\n".join(lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows])
        plugin = {"plugin_data": {"plugin_name": "text"}}
        shape = self._protos["TensorShapeProto"](dim=[{"size": 1}])
        data = [markdown.encode("utf-8", "replace")]
        tensor = self._protos["TensorProto"](dtype="DT_STRING", string_val=data, tensor_shape=shape)
        self._summary(step, [{"tag": "validation/samples", "metadata": plugin, "tensor": tensor}])

    def _summary(self, step: int, values: list[dict[str, Any]]) -> None:
        self._write(step, summary=self._protos["Summary"](value=values))

    def _write(self, step: int, **what: Any) -> None:
        event = self._protos["Event"](step=step, wall_time=time.time(), **what)
        with writing(self.path):
            self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


def _protos(*names: str) -> dict[str, Any]:
    """Message types of these protobuf files, by name, because they exist only at run time."""
    modules = [import_module(f"tensorboard.compat.proto.{name}_pb2") for name in names]
    return {key: value for module in modules for key, value in vars(module).items()}


def _name(folder: Path) -> str:
    """Name of the event file. Readers take the files in order of their names. Two starts may share a second, hence a
    counter; the clock of a resuming machine may be behind, hence no time before that of an existing file."""
    names = [file.name for file in folder.glob("*tfevents*")]
    before = [int(stamp[1]) for name in names if (stamp := re.search(r"tfevents\.(\d{1,10})\.", name))]
    return f"events.out.tfevents.{max(int(time.time()), *before, 0):010d}.birl.{len(names):04d}"


def _cell(text: str) -> str:
    text = visible(text)[:2000]
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", " ⏎ ")

"""TensorBoard events, written with TensorBoard's own record format and without torch, TensorFlow or a thread."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from birl.track.log import writing
from birl.track.visible import visible


class EventFile:
    """One event file in `folder`. A reader forgets all earlier events of the folder from `purge_step` on.

    Example: events = EventFile(run / "tensorboard", purge_step=21); events.scalars(21, {"reward/mean": 0.5})
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = Event
        self._summary: Any = Summary
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / _name(folder)
            self._file = open(self.path, "xb", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(purge_step, file_version="brain.Event:2")
        self._write(purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, summary=self._summary(value=values))

    def text(self, step: int, tag: str, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

        content = TextPluginData(version=0).SerializeToString()
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=content)
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor: Any = TensorProto(dtype="DT_STRING", string_val=[markdown.encode("utf-8", "replace")], tensor_shape=shape)
        value = self._summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._write(step, summary=self._summary(value=[value]))

    def _write(self, step: int, **what: Any) -> None:
        event = self._event(step=step, wall_time=time.time(), **what)
        with writing(self.path):
            self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


def _name(folder: Path) -> str:
    """Readers go through the files in the order of their names, and two starts may share a second: hence the counter."""
    return f"events.out.tfevents.{int(time.time()):010d}.birl.{len(list(folder.glob('*tfevents*'))):04d}"


def samples_table(samples: list[dict[str, Any]]) -> str:
    """A few validation samples as a Markdown table."""
    rows = [[str(sample.get(key, "")) for key in ("prompt", "completion", "answer", "score")] for sample in samples]
    lines = ["| prompt | completion | answer | score |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows])


def _cell(text: str) -> str:
    return visible(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", " ⏎ ")[:2000]

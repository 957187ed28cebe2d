"""Runs in .venv-trackers: writes a small run with one real tracker, or reads back what that tracker holds.

python -m tests.track.tracker_process write NAME MODE RUN FIRST LAST [killed | read | patient]
"""

import glob
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from birl.track import outbox
from tests.track import runs

CONFIG = {
    "seed": 0,
    "optimizer.lr": 1e-5,
    "env.api_key": "very-secret",
    "reward.judge": "http://me:very-secret@host/v1",
}


def write(name: str, mode: str, run: str, first: str, last: str, how: str = "") -> None:
    """Steps FIRST to LAST; FIRST above 1 goes on from the checkpoint of step 5. killed: ends as by kill -9, when
    everything under way has arrived."""
    folder, begin = Path(run), int(first)
    if how != "patient":
        outbox.PATIENCE["online"] = 3.0
    guard(folder.with_suffix(".network"))
    tracker = runs.tracker(folder, report=False, **{name: mode})
    tracker.config = dict(CONFIG)
    heard: list[str] = []
    tracker.message = heard.append  # pyright: ignore
    offsets = None if begin == 1 else json.loads((folder / "offsets.json").read_text())
    tracker.rewind(offsets, begin - 1)
    for step in range(begin, int(last) + 1):
        runs.train(tracker, step, step)
        if step == 5:
            (folder / "offsets.json").write_text(json.dumps(tracker.offsets()))
    if how == "killed":
        while any(box._queue for box in tracker._boxes):
            time.sleep(0.1)
        time.sleep(2)  # for the threads and processes of the tracker itself
        os._exit(9)
    began = time.monotonic()
    tracker.finish({})
    told = reading(name, folder) if how == "read" else {}
    print("TOLD " + json.dumps(told | {"waited": time.monotonic() - began, "heard": heard}))
    sys.stdout.flush()
    if mode == "online":
        os._exit(0)  # what W&B does when the interpreter ends is not ours


def guard(noted: Path) -> None:
    """Note every connection to another machine, and refuse it."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            with noted.open("a") as file:
                file.write(f"{address}\n")
            raise ConnectionRefusedError(f"no network: {address}")
        connect(self, address)

    socket.socket.connect = refuse  # type: ignore[method-assign]


def reading(name: str, run: Path) -> dict[str, Any]:
    readers = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio, "swanlab": read_swanlab}
    return readers[name](run)


def read_wandb(run: Path) -> dict[str, Any]:
    """W&B has no reader of its own files any more; SwanLab's converter has one."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    points, ids, config, summary = [], [], {}, {}
    for file in sorted(glob.glob(str(run / "wandb" / "offline-run-*" / "*.wandb"))):
        with WBDataStoreReader() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                if record.HasField("run"):
                    ids.append(record.run.run_id)
                    config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                for item in record.summary.update:
                    summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                if "reward/mean" in row:
                    points.append([int(record.history.step.num), json.loads(row["reward/mean"])])
    return {"points": points, "runs": sorted(set(ids)), "config": config, "summary": summary}


def read_mlflow(run: Path) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    found = client.search_runs([client.get_experiment_by_name("birl").experiment_id])
    points = [[m.step, m.value] for one in found for m in client.get_metric_history(one.info.run_id, "reward/mean")]
    files = [file.path for file in client.list_artifacts(found[0].info.run_id, "samples")]
    return {
        "points": points,
        "runs": [one.info.run_id for one in found],
        "config": found[0].data.params,
        "summary": found[0].data.tags,
        "status": found[0].info.status,
        "files": files,
    }


def read_trackio(run: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(run / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    names = SQLiteStorage.get_runs("birl")
    logs = [row for name in names for row in SQLiteStorage.get_logs("birl", name)]
    points = [[row["step"], row["reward/mean"]] for row in logs if "reward/mean" in row]
    return {"points": points, "runs": list(names), "config": SQLiteStorage.get_run_config("birl", names[0])}


def read_swanlab(run: Path) -> dict[str, Any]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points, ids, config = [], set(), {}
    for file in sorted(glob.glob(str(run / "swanlab" / "run-*" / "*.swanlab"))):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            ids |= {record.start.id} - {""}
            if record.scalar.key == "reward/mean":
                points.append([int(record.scalar.step), record.scalar.value.number])
        text = (Path(file).parent / "files" / "config.yaml").read_text()
        config |= {key: item["value"] for key, item in yaml.safe_load(text).items()}
    return {"points": points, "runs": sorted(ids), "config": config}


if __name__ == "__main__":
    write(*sys.argv[2:])

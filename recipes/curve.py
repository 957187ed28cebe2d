"""A run folder as a small CSV that is worth committing: python recipes/curve.py RUN > curve.csv"""

import csv
import json
import sys
from pathlib import Path

COLUMNS = ("step", "seconds", "reward", "held_out", "length", "entropy", "grad_norm", "tokens_generated")


def curve(run: Path) -> list[dict[str, object]]:
    """One row for each step, step 0 being the untrained model. `seconds` adds up what the steps took."""
    read = lambda name: [json.loads(line) for line in (run / name).read_text().splitlines()]  # noqa: E731
    held_out = {v["step"]: v["validation/all/score"] for v in read("validation.jsonl")}
    rows, seconds = [dict.fromkeys(COLUMNS, "") | {"step": 0, "held_out": held_out.get(0, "")}], 0.0
    for m in read("metrics.jsonl"):
        seconds += m["time/step"]
        figures = (m["step"], round(seconds, 1), m["reward/mean"], held_out.get(m["step"], ""), m["length/mean"])
        entropy = "" if m["entropy"] is None else round(m["entropy"], 4)  # null: nothing was trained in this step
        rest = (entropy, round(m["grad_norm"], 4), int(m["tokens/generated"]))
        rows.append(dict(zip(COLUMNS, (*figures, *rest), strict=True)))
    return rows


if __name__ == "__main__":
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve(Path(sys.argv[1])))

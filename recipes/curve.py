"""A run folder as a small CSV that is worth committing: python recipes/curve.py RUN > curve.csv"""

import csv
import json
import sys
from pathlib import Path

COLUMNS = ("step", "seconds", "reward", "loss", "held_out", "length", "entropy", "grad_norm", "tokens_generated")
HELD_OUT = ("validation/all/score", "validation/accuracy", "validation/nll")


def curve(run: Path) -> list[dict[str, object]]:
    """One row for each step, step 0 being the untrained model. `seconds` adds up what the steps took. Where validation
    has several sources, each has a column `held_out/SOURCE` behind the others. Of `birl sft`, `rm` and `dpo` there are
    step, seconds, loss, held_out (accuracy of pairs, else the loss of a token) and grad_norm."""
    read = lambda name: [json.loads(line) for line in (run / name).read_text().splitlines()]  # noqa: E731
    held_out = {v["step"]: scores(v) for v in read("validation.jsonl")}
    rows: list[dict[str, object]] = [{"step": 0, **held_out.get(0, {})}]
    seconds = 0.0
    for m in read("metrics.jsonl"):
        seconds += m["time/step"]
        row: dict[str, object] = {"step": m["step"], "seconds": round(seconds, 1)}
        if "reward/mean" in m:
            row |= {"reward": m["reward/mean"], "length": m["length/mean"]}
            row["entropy"] = "" if m["entropy"] is None else round(m["entropy"], 4)  # null: nothing was trained
            row["tokens_generated"] = int(m["tokens/generated"])
        else:
            row["loss"] = round(m["loss"], 4)
        rows.append({**row, "grad_norm": round(m["grad_norm"], 4), **held_out.get(m["step"], {})})
    return rows


def scores(validation: dict[str, float]) -> dict[str, object]:
    names = [name for name in validation if name.startswith("validation/") and name.endswith("/score")]
    sources = [name.split("/", 1)[1].removesuffix("/score") for name in names if name != "validation/all/score"]
    one = next(name for name in HELD_OUT if name in validation)
    each = {f"held_out/{source}": validation[f"validation/{source}/score"] for source in sources}
    return {"held_out": validation[one], **(each if len(each) > 1 else {})}


if __name__ == "__main__":
    rows = curve(Path(sys.argv[1]))
    found = dict.fromkeys(name for row in rows for name in row)
    columns = [*(name for name in COLUMNS if name in found), *(name for name in found if name not in COLUMNS)]
    writer = csv.DictWriter(sys.stdout, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)

"""`birl rl --contamination`: which rows of data.validation does data.train have as well?"""

from birl.config import schema
from birl.data.contamination import RUN, copies
from birl.data.tasks import load_tasks
from birl.errors import BirlError

SHOWN = 20  # rows that are printed


def run(config: schema.RL) -> int:
    """Print the result. 0 where no validation row is in the training data, else 1. Raises `BirlError`."""
    for key in ("train", "validation"):
        if not getattr(config.data, key):
            raise BirlError(f"--contamination compares two sets of rows: name the other, as in data.{key}=my.jsonl.")
    train, validation = (load_tasks(config.data, which, chat=True) for which in ("train", "validation"))
    result = copies(train, validation)
    same = sum(copy.share == 1 for copy in result)
    print(
        f"{len(result)} of {sum(map(len, validation))} validation rows are in the training data: {same} as they are, "
        f"{len(result) - same} in part (at least half of their own words, in runs of {RUN})."
    )
    for copy in result[:SHOWN]:
        print(f"  {copy}")
    if len(result) > SHOWN:
        print(f"  and {len(result) - SHOWN} more")
    return 1 if result else 0

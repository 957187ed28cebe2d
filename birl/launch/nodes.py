"""python -m birl.launch.nodes COUNT SECONDS: returns when a Ray cluster has so many machines, and fails when it has not
in time. For the head of a cluster whose machines come one by one."""

import sys
import time
from importlib import import_module
from typing import Any

LOOK = 2.0  # seconds between two looks


def wait(count: int, seconds: float) -> int:
    """How many there are; fewer than `count` after so long."""
    ray: Any = import_module("ray")

    until = time.monotonic() + seconds
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    try:
        while (there := sum(bool(node["Alive"]) for node in ray.nodes())) < count and time.monotonic() < until:
            time.sleep(LOOK)
        return there
    finally:
        ray.shutdown()


def main() -> int:
    count, seconds = int(sys.argv[1]), float(sys.argv[2])
    there = wait(count, seconds)
    if there < count:
        print(f"birl: {there} of {count} machines came within {seconds:g} s (launch.wait)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

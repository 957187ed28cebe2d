"""The one thread that computes."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch


def compute_thread(threads: int = 0) -> ThreadPoolExecutor:
    """One thread for everything that computes, the engine and the learner alike: they alternate, so a second would only
    make a second pool of OpenMP threads that fight for the same cores. `threads` 0: as many as this process may use."""
    count = threads or cores()
    return ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=torch.set_num_threads, initargs=(count,))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

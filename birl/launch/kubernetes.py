"""Pods of a Kubernetes cluster as the machines of a SkyPilot task (`skypilot.py`).

birl launch kubernetes rl recipe.yaml launch.accelerators=H100:8 launch.nodes=2 launch.volume=runs --dry-run
"""

from dataclasses import dataclass

from birl.launch import skypilot
from birl.launch.job import Job
from birl.launch.launcher import Handle
from birl.launch.skypilot import logs as logs
from birl.launch.skypilot import render as render
from birl.launch.skypilot import status as status
from birl.launch.skypilot import stop as stop


@dataclass(kw_only=True)
class Keys(skypilot.Keys):
    infra: str = "k8s"
    """Cluster, in SkyPilot's notation: k8s/CONTEXT selects a context of your kubeconfig. k8s: the current context."""


def submit(job: Job, keys: Keys) -> Handle:
    """Start the job. Raises `BirlError`."""
    return skypilot.submit(job, keys, "kubernetes")

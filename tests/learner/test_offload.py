"""Gradients on their way to CPU memory. That no bit changes: `test_optimizer.py`."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from birl.data.pack import pack
from birl.learner.learner import Learner, Stats
from birl.learner.optimizer import Gradients, MasterWeights
from birl.models import attention
from tests.data.test_pack import groups
from tests.learner.test_learner import reinforce
from tests.tiny import tiny_model


def test_gradients_come_to_the_cpu_beside_the_backward_pass() -> None:
    """A copy that is under way keeps nobody waiting but the step, and sums are in the order of the micro-batches."""
    model = tiny_model(heads=4, kv_heads=2)
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, dtype=torch.bfloat16, offload=True)
    samples = groups(4)
    learner.forward_backward(pack(samples, [0.1] * len(samples), 10_000)[0], reinforce, Stats())
    masters = learner.masters
    assert isinstance(masters, MasterWeights)
    sent = masters.gradients
    assert sent is not None and len(sent.under_way) == 1
    learner.masters.gather()
    assert not sent.under_way and all(t.grad is not None for t in learner.masters.tensors.values())

    waited: list[int] = []
    gradients, master = Gradients(), torch.zeros(1)
    for number, value in enumerate((1.0, 2.0**-9, 2.0**-9)):
        event: Any = SimpleNamespace(query=lambda: False, synchronize=partial(waited.append, number))
        gradients.under_way.append((torch.tensor([value], dtype=torch.bfloat16), master, event))
    gradients.arrive(wait=False)
    assert master.grad is None and not waited
    gradients.arrive()
    assert waited == [0, 1, 2] and master.grad is not None and master.grad.tolist() == [1 + 2.0**-8]  # in float32

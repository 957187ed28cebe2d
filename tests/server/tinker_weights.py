"""Runs in .venv-tinker: what a run learned, as a whole model and as a PEFT adapter, made by the cookbook's `weights`.

Words: the model's folder, a folder for both. Says log-probs of the run's data. The head learns nothing: the cookbook
merges none into a model whose head is its embedding.
"""

import json
import sys
import warnings

import tinker
from tinker import types
from tinker_cookbook import weights

warnings.simplefilter("ignore")
model, out = sys.argv[1:]
IDS = list(range(5, 30))
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]),
    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * len(IDS[1:])},
)
client = tinker.ServiceClient().create_lora_training_client("model", rank=4, seed=3, train_unembed=False).result()
for _ in range(3):
    client.forward_backward([DATUM], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.02)).result()
(learned,) = client.forward([DATUM], "cross_entropy").result().loss_fn_outputs
adapter = weights.download(tinker_path=client.save_weights_external("out").result().path, output_dir=f"{out}/adapter")
weights.build_hf_model(base_model=model, adapter_path=adapter, output_path=f"{out}/merged", dtype="float32")
weights.build_lora_adapter(base_model=model, adapter_path=adapter, output_path=f"{out}/peft")
print("TOLD", json.dumps(learned["logprobs"].tolist()))

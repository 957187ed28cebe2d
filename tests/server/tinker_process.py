"""Runs in .venv-tinker: Tinker's own client, as its users call it, against a server; says what it saw as JSON."""

import json
import os
import warnings
from typing import Any

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore", FutureWarning)


def datum(ids: list[int], **inputs: Any) -> types.Datum:
    own = inputs or {"weights": [1.0] * (len(ids) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **own}
    )


DATA = [datum(list(range(5, 30))), datum([9, 8, 7, 6, 9, 8, 7, 6])]
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def training(service: tinker.ServiceClient) -> dict[str, Any]:
    client = service.create_lora_training_client("model", rank=8, seed=1, train_unembed=False).result()
    info = client.get_info()
    losses = []
    for _ in range(4):
        asked = client.forward_backward(DATA, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.02)).result()
        losses.append(asked.result().metrics["loss:sum"])
    state = client.save_state("here").result().path
    other = service.create_training_client_from_state_with_optimizer(state).result()
    client.load_state(state).result()
    same = [c.forward(DATA, "cross_entropy").result().metrics["loss:sum"] for c in (client, other)]
    width = torch.tensor([[6, 7, 0, 0], [7, 0, 0, 8]])
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_torch_sparse(width), "weights": width.float()},
    )
    wide = client.forward([sparse], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    return {"rank": info.lora_rank, "losses": losses, "same": same, "wide": wide.shape}


def policies(service: tinker.ServiceClient) -> dict[str, Any]:
    """Every loss, on what was sampled; its log-probs beside the sampler's."""
    client = service.create_lora_training_client("model", rank=4).result()
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    sampled = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=8, seed=5)).result().sequences
    data = []
    for sequence in sampled:
        ids, n = [5, 6, 7, *sequence.tokens], len(sequence.tokens)
        inputs = {"logprobs": [0.0, 0.0, *(sequence.logprobs or ())], "advantages": [0.0, 0.0, *[1.0] * n]}
        one = datum(ids, **inputs)
        name = sequence.sequence_id
        data.append(
            one.with_provenance(
                model_input=[
                    types.PromptProvenanceSpan(sequence_id=name, length=3),
                    types.SampledProvenanceSpan(sequence_id=name, length=n - 1),
                ],
                loss_fn_inputs=[
                    types.PromptProvenanceSpan(sequence_id=name, offset=1, length=2),
                    types.SampledProvenanceSpan(sequence_id=name, length=n),
                ],
            )
        )
    result = {}
    for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"):
        result[loss] = client.forward_backward(data, loss).result().metrics["loss:sum"]
    learned = client.forward(data, "importance_sampling").result().loss_fn_outputs
    gaps = [
        abs(a - b)
        for output, sequence in zip(learned, sampled, strict=True)
        for a, b in zip(output["logprobs"].tolist()[2:], sequence.logprobs or (), strict=True)
    ]

    def squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.stack([p.square().sum() for p in logprobs]).sum()
        return total, {"squares": total.item()}

    custom = client.forward_backward_custom(data, squares).result().metrics
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    return {"losses": result, "gap": max(gaps), "custom": custom}


def sampling(service: tinker.ServiceClient) -> dict[str, Any]:
    sampler = service.create_sampling_client(base_model="model").result()
    end = types.SamplingParams(max_tokens=6, seed=1)
    every = sampler.sample(
        PROMPT, 2, end, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
        prompt_alt_tokens_k=4,
        target_prompt_logprobs=types.TensorData.from_torch(torch.tensor([[6, -1], [7, 9]])),
    ).result()  # fmt: skip
    one = sampler.sample(
        types.ModelInput.from_ints([5]), 1, end, include_prompt_logprobs=True, topk_prompt_logprobs=3,
        prompt_alt_tokens_k=4, target_prompt_logprobs=types.TensorData(data=[], dtype="int64", shape=[0, 2]),
    ).result()  # fmt: skip
    assert one.prompt_alt_tokens is not None and one.target_prompt_logprobs is not None
    last = sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result()
    stop = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=50, seed=1, stop=[every.sequences[0].tokens[2]]))
    greedy = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=5, temperature=0)).result() for _ in range(2)]
    assert every.prompt_alt_tokens is not None and every.target_prompt_logprobs is not None
    return {
        "lengths": [len(s.tokens) for s in every.sequences],
        "prompt": every.prompt_logprobs,
        "top": every.topk_prompt_logprobs,
        "top_sampled": [len(t or ()) for t in every.sequences[0].topk_logprobs or ()],
        "alternatives": every.prompt_alt_tokens.tokens.shape,
        "targets": every.target_prompt_logprobs.to_torch().tolist(),
        "last": last,
        "one": [
            one.prompt_logprobs,
            one.topk_prompt_logprobs,
            one.prompt_alt_tokens.tokens.shape,
            list(one.target_prompt_logprobs.to_torch().shape),
        ],
        "stopped": [stop.result().sequences[0].stop_reason, len(stop.result().sequences[0].tokens)],
        "greedy": [g.sequences[0].tokens for g in greedy],
        "ids": len({s.sequence_id for s in every.sequences}),
    }


def errors(service: tinker.ServiceClient) -> dict[str, str]:
    """What is not offered, and what is wrong: the type that the client raises, and the reason."""
    client = service.create_lora_training_client("model", rank=4).result()
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=3)])
    sampler = service.create_sampling_client(base_model="model").result()
    cases: dict[str, Any] = {
        "loss": lambda: client.forward_backward([DATA[0]], "custom").result(),
        "nan": lambda: client.forward_backward([datum([5, 6], weights=[float("nan")])], "cross_entropy").result(),
        "model": lambda: service.create_lora_training_client("gpt").result(),
        "optimizer": lambda: client.optim_step(types.DimuonParams(learning_rate=1e-3)).result(),
        "path": lambda: service.create_sampling_client(model_path="tinker://no/weights/where").result(),
        "name": lambda: client.save_state("../up").result(),
        "picture": lambda: sampler.sample(picture, 1, types.SamplingParams(max_tokens=1)).result(),
        "long": lambda: sampler.sample(types.ModelInput.from_ints([5] * 600), 1, types.SamplingParams()).result(),
    }
    result = {}
    for name, case in cases.items():
        try:
            case()
            result[name] = "nothing"
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    result["goes_on"] = str(client.forward(DATA, "cross_entropy").result().metrics["loss:sum"])
    return result


def lists(service: tinker.ServiceClient) -> dict[str, Any]:
    client = service.create_lora_training_client("model", rank=4, user_metadata={"who": "me"}).result()
    path = client.save_weights_for_sampler("ready").result().path
    export = client.save_weights_external("out").result().path
    rest = tinker.RestClient()
    run = rest.get_training_run(client.model_id).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    names = [c.checkpoint_id for c in rest.list_checkpoints(client.model_id).result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = [c.checkpoint_id for c in rest.list_checkpoints(client.model_id).result().checkpoints]
    models = [m.model_name for m in rest.get_server_capabilities().result().supported_models]
    return {"who": run.user_metadata, "rank": info.lora_rank, "names": names, "left": left, "models": models,
            "export": export}  # fmt: skip


if __name__ == "__main__":
    with tinker.ServiceClient() as all_of_it:
        for part in (training, policies, sampling, errors, lists):
            print("TOLD " + json.dumps({part.__name__: part(all_of_it)}), flush=True)
    os._exit(0)  # the client's daemon thread may compute while the interpreter ends, which has aborted once

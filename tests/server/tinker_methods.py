"""Runs in .venv-tinker: every public method of Tinker's own client, once; says what it saw as JSON.

Words: the folder of the model, whose path is its name, too; the key of another tenant.
"""

import functools
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from tests.server.tinker_quotas import error

warnings.simplefilter("ignore")
CLASSES = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)
ASKED = types.ModelInput.from_ints([5, 6, 7])
SHORT = types.SamplingParams(max_tokens=3, seed=1)
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
]


def watched(called: set[str]) -> set[str]:
    """Names of all public methods that are not deprecated; `called` gets those that are called from now on."""

    def watch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def method(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return call(*args, **kwargs)

        return method

    names = set()
    for each in CLASSES:
        for key, value in list(vars(each).items()):
            own = value.__func__ if isinstance(value, staticmethod) else value
            if key.startswith("_") or not callable(own) or hasattr(own, "__deprecated__"):
                continue
            name = f"{each.__name__}.{key}"
            names.add(name)
            setattr(each, key, staticmethod(watch(name, own)) if own is not value else watch(name, own))
    return names


def training(service: tinker.ServiceClient, name: str, other: str) -> dict[str, Any]:
    client = service.create_lora_training_client(name, rank=4, seed=3, user_metadata={"who": "me"}).result()

    def squared(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (logprobs.square() * weights).sum()
        return loss, {"custom/squared:sum": loss}

    handle = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
    custom = client.forward_backward_custom(DATA, handle).result().metrics
    given = client.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    client.forward_backward(DATA, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    state = client.save_state("state", ttl_seconds=7200, user_metadata={"step": "1"}).result().path
    again = client.save_state("state", overwrite=True).result().path
    taken = error(lambda: client.save_state("state").result())
    with_optimizer = service.create_training_client_from_state_with_optimizer(state).result()
    without = service.create_training_client_from_state(state, user_metadata={"from": "state"}).result()
    moved = []
    for each in (client, with_optimizer, without):
        each.forward_backward(DATA, "cross_entropy").result()
        each.optim_step(types.AdamParams(learning_rate=0.01)).result()
        moved.append(each.forward(DATA, "cross_entropy").result().metrics["loss:sum"])
    weights = client.save_weights_for_sampler("weights", ttl_seconds=7200).result().path
    sampled = client.create_sampling_client(weights).result().sample(ASKED, 1, SHORT).result().sequences[0].tokens
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    bob = tinker.ServiceClient(api_key=other)
    rest, hidden = tinker.RestClient(), error(lambda: bob.create_training_client_from_state(state).result())
    rest.publish_checkpoint_from_tinker_path(state).result()
    bob.create_training_client_from_state(state).result()
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    return {
        "custom": [custom["loss:sum"], custom["custom/squared:sum"], float(given.square().sum())],
        "same path": state == again, "taken": taken, "moved": moved,
        "same sampled": sampled == inflight.sample(ASKED, 1, SHORT).result().sequences[0].tokens,
        "hidden": [hidden, error(lambda: bob.create_training_client_from_state(state).result())],
        "tokenizers": [len(c.get_tokenizer()) for c in (client, inflight)],
        "urls": [c.get_console_url() is not None for c in (service, client)],
        "telemetry": [c.get_telemetry() is not None for c in (service, client, inflight, rest, tinker.AdminClient())],
        "state": state, "weights": weights, "run": client.model_id, "base": client.get_info().model_data.model_name,
    }  # fmt: skip


def sampling(service: tinker.ServiceClient, name: str) -> dict[str, Any]:
    sampler = service.create_sampling_client(base_model=name).result()
    copies = [
        tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle()),
        pickle.loads(pickle.dumps(sampler)),
        tinker.SamplingClient.create(service.holder, base_model=name).result(),
    ]
    tokens = [c.sample(ASKED, 1, SHORT).result().sequences[0].tokens for c in (sampler, *copies)]
    sampler.on_queue_state_change(tinker.lib.api_future_impl.QueueState.ACTIVE, None)
    scored = sampler.compute_logprobs(ASKED).result()
    about = tinker.RestClient().get_sampler(sampler._sampling_session_id).result()
    return {"tokens": tokens, "scored": len(scored), "base": [sampler.get_base_model(), about.base_model]}


def lists(session: str, told: dict[str, Any]) -> dict[str, Any]:
    rest, run = tinker.RestClient(), told["run"]
    rest.set_checkpoint_ttl_from_tinker_path(told["weights"], None).result()
    rest.set_checkpoint_ttl_from_tinker_path(told["state"], 3600).result()
    every = {c.checkpoint_id: c for c in rest.list_checkpoints(run).result().checkpoints}
    pages = [rest.list_user_checkpoints(limit=1, offset=i).result() for i in (0, 1)]
    runs = rest.list_training_runs(limit=2).result()
    about = rest.get_session(session).result()
    one = rest.get_training_run_by_tinker_path(told["state"]).result()
    request = types.SessionSearchRequest(display_name="TEST methods", user_metadata={"who": "me"}, limit=1)
    first = rest.search_sessions(request).result()
    second = rest.search_sessions(request.model_copy(update={"cursor": first.next_cursor})).result()
    finished = types.ClientFinishedSessionStatusQuery(reasons=["interrupted"])
    closed = rest.search_sessions(request.model_copy(update={"statuses": [finished]})).result()
    stranger = types.UserSearchOwner(owner_urns=["urn:birl:user:bob"])
    rest.delete_checkpoint(run, "sampler_weights/weights").result()
    left = [c.checkpoint_id for c in rest.list_checkpoints(run).result().checkpoints]
    usage = tinker.AdminClient().get_current_checkpoint_storage_usage().result().data
    return {
        "expires": {name: c.expires_at is not None for name, c in every.items() if "session-" not in name},
        "sizes": [all(c.size_bytes for c in every.values()), usage[0].checkpoint_count, usage[0].size_bytes > 0],
        "pages": [[len(p.checkpoints), p.cursor.total_count] for p in pages],
        "runs": [len(runs.training_runs), runs.cursor.total_count],
        "session": [run in about.training_run_ids, about.display_name, about.user_metadata],
        "one": [one.training_run_id == run, rest.get_training_run(run).result().user_metadata],
        "capabilities": rest.get_server_capabilities().result().supported_models[0].trainable,
        "rank": rest.get_weights_info_by_tinker_path(told["state"]).result().lora_rank,
        "listed": session in rest.list_sessions().result().sessions,
        "found": [[s.session_id == session for s in page.sessions] for page in (first, second)],
        "last page": second.next_cursor is None,
        "closed": [[s.session_id != session, s.status.reason.type] for s in closed.sessions],
        "counted": [s.checkpoints_count for s in first.sessions + second.sessions if s.session_id == session],
        "stranger": len(rest.search_sessions(request.model_copy(update={"owner": stranger})).result().sessions),
        "left": [name for name in left if "session-" not in name],
    }  # fmt: skip


def full(service: tinker.ServiceClient, name: str) -> Any:
    """What `create_lora_training_client` sends, without an adapter: no method of the client asks for it."""
    holder = service.holder

    async def ask() -> Any:
        request = types.CreateModelRequest(session_id=holder.get_session_id(), model_seq_id=999, base_model=name)
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            future = await client.models.create(request=request)
        kind = types.CreateModelResponse
        return await _APIFuture(kind, holder, future, request_start_time=0.0, request_type="CreateModel")

    return holder.run_coroutine_threadsafe(ask()).result()


def refused(service: tinker.ServiceClient, session: str, name: str, told: dict[str, Any]) -> dict[str, str]:
    rest, admin, path, key = tinker.RestClient(), tinker.AdminClient(), told["state"], "tml-some-other-tenants-key"
    project = tinker.ServiceClient(project_id="project")
    client = service.create_lora_training_client(name, rank=4).result()
    dimuon = types.DimuonOptimizerConfig()
    day = ("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z")
    cases: dict[str, Callable[[], Any]] = {
        "full": lambda: full(service, name),
        "dimuon": lambda: service.create_lora_training_client(name, rank=4, optimizer=dimuon).result(),
        "dimuon from state": lambda: service.create_training_client_from_state(path, optimizer=dimuon).result(),
        "token": lambda: service.create_training_client_from_state(path, weights_access_token=key).result(),
        "token in place": lambda: client.load_state_with_optimizer(path, weights_access_token=key).result(),
        "copy": lambda: project.copy_weights(path).result(),
        "copy to a project": lambda: rest.copy_weights(path, "project").result(),
        "project": lambda: rest.assign_session_project(session, "project").result(),
        "trace": lambda: rest.export_session_trace(session).result(),
        "audit": lambda: admin.get_audit_log().result(),
        "billing": lambda: admin.get_billing_usage(*day).result(),
        "encrypted": lambda: client.save_weights_external("out", age_encryption_recipients=["age1x"]).result(),
        "urls": lambda: rest.get_external_weights_urls(path).result(),
        "whoami": lambda: rest.whoami().result(),
    }  # fmt: skip
    return {case: error(call) for case, call in cases.items()}


def main(name: str, other: str) -> dict[str, Any]:
    called: set[str] = set()
    names = watched(called)
    about: dict[str, Any] = {"display_name": "methods of a test", "user_metadata": {"who": "me"}}
    with tinker.ServiceClient(**about) as service:
        session = service.holder.get_session_id()
        closed = tinker.ServiceClient(**about)
        closed.create_sampling_client(base_model=name).result()
        closed.close("interrupted").result()
        told = training(service, name, other)
        result = {"training": told, "sampling": sampling(service, name), "lists": lists(session, told)}
        result["refused"] = refused(service, session, name, told)
        export = service.create_lora_training_client(name, rank=4).result().save_weights_external("out").result()
        urls = tinker.RestClient().get_external_weights_urls(export.path).result().urls
        tinker.RestClient().delete_checkpoint_from_tinker_path(export.path).result()
    return result | {"urls": sorted(urls), "not called": sorted(names - called), "names": len(names)}


if __name__ == "__main__":
    os.environ.pop("TINKER_PROJECT_ID", None)
    print("TOLD " + json.dumps(main(*sys.argv[1:])), flush=True)
    sys.exit(0)

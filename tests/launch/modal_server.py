"""A stand-in for Modal's servers on this machine's loopback: Modal's own client speaks to it, and cannot tell. It keeps
apps, secrets, dicts, queues, files and calls in memory, and runs every call in a process, a "container", which gets
what the real one would get: the files that were uploaded, and the variables of its secrets.

Needs the extra `modal`. What is not implemented is refused, and listed in `refused`.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

from tests.launch.modal_cloud import Call, Cloud

Answer = Callable[[Cloud, Any], Any]


def _app_create(cloud: Cloud, asked: Any) -> Any:
    app = cloud.id("ap", asked.description)
    cloud.apps[app] = "initializing"
    return api_pb2.AppCreateResponse(app_id=app, app_page_url="https://modal.test")


def _app_by_name(cloud: Cloud, asked: Any) -> Any:
    app = cloud.ids.get(("ap", asked.name), "")
    living = cloud.apps.get(app, "") == "deployed"
    return api_pb2.AppGetByDeploymentNameResponse(app_id=app if living else "", environment_name="main")


def _app_publish(cloud: Cloud, asked: Any) -> Any:
    cloud.apps[asked.app_id] = "deployed"
    return api_pb2.AppPublishResponse(url="https://modal.test", deployed_at=time.time())


def _app_stop(cloud: Cloud, asked: Any) -> Any:
    cloud.apps[asked.app_id] = "stopped"
    cloud.close()


def _lifecycle(cloud: Cloud, asked: Any) -> Any:
    states = {"deployed": api_pb2.APP_STATE_DEPLOYED, "stopped": api_pb2.APP_STATE_STOPPED}
    about = api_pb2.AppLifecycle(app_state=states[cloud.apps[asked.app_id]])
    return api_pb2.AppGetLifecycleResponse(lifecycle=about)


def _handle(cloud: Cloud, name: str, methods: Any = ()) -> Any:
    found = api_pb2.FunctionHandleMetadata(
        function_name=name,
        function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION,
        definition_id=f"de-{name}",
        supported_input_formats=[api_pb2.DATA_FORMAT_PICKLE],
        supported_output_formats=[api_pb2.DATA_FORMAT_PICKLE],
        max_object_size_bytes=2**21,
    )
    for method in methods:
        found.method_handle_metadata[method].CopyFrom(_handle(cloud, f"{name}.{method}"))
        found.method_handle_metadata[method].use_method_name = method
    return found


def _precreate(cloud: Cloud, asked: Any) -> Any:
    methods = list(asked.method_definitions)
    about = _handle(cloud, asked.function_name, methods)
    return api_pb2.FunctionPrecreateResponse(function_id=cloud.id("fu", asked.function_name), handle_metadata=about)


def _function(cloud: Cloud, asked: Any) -> Any:
    function = asked.function
    number = cloud.id("fu", function.function_name)
    cloud.functions[number] = function
    about = _handle(cloud, function.function_name, list(function.method_definitions))
    return api_pb2.FunctionCreateResponse(
        function_id=number, function=function, function_data=_data(function), handle_metadata=about
    )


def _data(function: Any) -> Any:
    ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=function)
    return api_pb2.FunctionData(function_name=function.function_name, ranked_functions=[ranked])


def _function_get(cloud: Cloud, asked: Any) -> Any:
    """By name, of the app that is deployed."""
    number = cloud.ids.get(("fu", asked.object_tag), "")
    if ("ap", asked.app_name) not in cloud.ids or number not in cloud.functions:
        raise GRPCError(Status.NOT_FOUND, f"no {asked.object_tag} in {asked.app_name}")
    about = _handle(cloud, asked.object_tag, list(cloud.functions[number].method_definitions))
    return api_pb2.FunctionGetResponse(
        function_id=number, function=_data(cloud.functions[number]), handle_metadata=about
    )


def _class(cloud: Cloud, asked: Any) -> Any:
    return api_pb2.ClassCreateResponse(class_id=cloud.id("cs"), handle_metadata=api_pb2.ClassHandleMetadata())


def _class_get(cloud: Cloud, asked: Any) -> Any:
    return api_pb2.ClassGetResponse(class_id=cloud.id("cs"), handle_metadata=api_pb2.ClassHandleMetadata())


def _image(cloud: Cloud, asked: Any) -> Any:
    number = cloud.id("im", asked.image.SerializeToString().hex())
    cloud.images[number] = asked.image
    return api_pb2.ImageGetOrCreateResponse(image_id=number)


def _joined(cloud: Cloud, asked: Any) -> Any:
    done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
    return [api_pb2.ImageJoinStreamingResponse(result=done, eof=True)]


def _missing(cloud: Cloud, asked: Any) -> Any:
    missing = [digest for digest in asked.sha256_hex_hashes if digest not in cloud.blobs]
    return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)


def _file(cloud: Cloud, asked: Any) -> Any:
    assert not asked.data_blob_id, "larger files go another way, which is not implemented"
    cloud.blobs[asked.sha256_hex] = asked.data
    return api_pb2.MountPutFileResponse(exists=True)


def _mount(cloud: Cloud, asked: Any) -> Any:
    number = cloud.id("mo", asked.deployment_name)
    cloud.mounts[number] = {file.filename: file.sha256_hex for file in asked.files}
    return api_pb2.MountGetOrCreateResponse(mount_id=number)


def _secret(cloud: Cloud, asked: Any) -> Any:
    number = cloud.id("st", asked.deployment_name)
    cloud.secrets.setdefault(number, {}).update(asked.env_dict)
    return api_pb2.SecretGetOrCreateResponse(secret_id=number)


def _dict_update(cloud: Cloud, asked: Any) -> Any:
    cloud.dicts[asked.dict_id].update({entry.key: entry.value for entry in asked.updates})
    return api_pb2.DictUpdateResponse(created=True)


def _dict_get(cloud: Cloud, asked: Any) -> Any:
    value = cloud.dicts[asked.dict_id].get(asked.key)
    return api_pb2.DictGetResponse(found=value is not None, value=value)


def _queue_put(cloud: Cloud, asked: Any) -> Any:
    cloud.queues[asked.queue_id, asked.partition_key].extend(asked.values)


async def _queue_get(cloud: Cloud, asked: Any) -> Any:
    queue = cloud.queues[asked.queue_id, asked.partition_key]
    deadline = time.monotonic() + asked.timeout
    while not queue and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return api_pb2.QueueGetResponse(values=[queue.pop(0) for _ in range(min(asked.n_values, len(queue)))])


def _map(cloud: Cloud, asked: Any) -> Any:
    (item,) = asked.pipelined_inputs
    number = cloud.id("fc")
    call = Call(id=number, function=asked.function_id, method=item.input.method_name, args=item.input.args)
    cloud.calls[number] = call
    if cloud.run:
        cloud.start(call)
    told = api_pb2.FunctionPutInputsResponseItem(idx=0, input_id=cloud.id("in"))
    return api_pb2.FunctionMapResponse(function_call_id=number, pipelined_inputs=[told])


async def _outputs(cloud: Cloud, asked: Any) -> Any:
    call = cloud.calls[asked.function_call_id]
    deadline = time.monotonic() + asked.timeout
    while call.result is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    if call.result is None:
        return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
    item = api_pb2.FunctionGetOutputsItem(result=call.result, data_format=api_pb2.DATA_FORMAT_PICKLE)
    return api_pb2.FunctionGetOutputsResponse(outputs=[item], idxs=[0], last_entry_id="1")


def _cancel(cloud: Cloud, asked: Any) -> Any:
    call = cloud.calls[asked.function_call_id]
    call.cancelled = True
    call.kill()


def _batch(cloud: Cloud, **more: Any) -> Any:
    items = [api_pb2.TaskLogs(data=line, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT) for line in cloud.logs]
    return api_pb2.TaskLogsBatch(items=items, entry_id=str(len(items)), **more)


def _logs(cloud: Cloud, asked: Any) -> Any:
    return api_pb2.AppFetchLogsResponse(batches=[_batch(cloud)])


async def _stream(cloud: Cloud, asked: Any) -> Any:
    """Lines as they come, until the app is stopped."""
    shown = int(asked.last_entry_id or 0)
    deadline = time.monotonic() + asked.timeout
    while time.monotonic() < deadline and len(cloud.logs) <= shown:
        await asyncio.sleep(0.02)
    new = [api_pb2.TaskLogs(data=x, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT) for x in cloud.logs[shown:]]
    return [api_pb2.TaskLogsBatch(items=new, entry_id=str(shown + len(new)))]


def _read(cloud: Cloud, asked: Any) -> Any:
    file = cloud.volume / asked.path
    if not file.is_file():
        raise GRPCError(Status.NOT_FOUND, f"no such file: {asked.path}")
    size = file.stat().st_size
    return api_pb2.VolumeGetFile2Response(get_urls=[f"{cloud.files}/{asked.path}"], size=size, start=0, len=size)


def _tunnel(cloud: Cloud, asked: Any) -> Any:
    return api_pb2.TunnelStartResponse(host="engine.modal.test", port=443)


ANSWERS: dict[str, Answer] = {
    "ClientHello": lambda cloud, asked: api_pb2.ClientHelloResponse(image_builder_version="2025.06"),
    "EnvironmentGetOrCreate": lambda cloud, asked: api_pb2.EnvironmentGetOrCreateResponse(
        environment_id="en-1",
        metadata=api_pb2.EnvironmentMetadata(
            name="main", settings=api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        ),
    ),
    "AppGetByDeploymentName": _app_by_name,
    "AppCreate": _app_create,
    "AppGetLayout": lambda cloud, asked: api_pb2.AppGetLayoutResponse(),
    "AppGetLifecycle": _lifecycle,
    "AppHeartbeat": lambda cloud, asked: None,
    "AppPublish": _app_publish,
    "AppClientDisconnect": lambda cloud, asked: None,
    "AppStop": _app_stop,
    "AppFetchLogs": _logs,
    "AppGetLogs": _stream,
    "FunctionPrecreate": _precreate,
    "FunctionCreate": _function,
    "FunctionGet": _function_get,
    "ClassCreate": _class,
    "ClassGet": _class_get,
    "ImageGetOrCreate": _image,
    "ImageJoinStreaming": _joined,
    "MountBatchedCheckExistence": _missing,
    "MountPutFile": _file,
    "MountGetOrCreate": _mount,
    "VolumeGetOrCreate": lambda cloud, asked: api_pb2.VolumeGetOrCreateResponse(
        volume_id=cloud.id("vo", asked.deployment_name), version=api_pb2.VOLUME_FS_VERSION_V1
    ),
    "VolumeCommit": lambda cloud, asked: api_pb2.VolumeCommitResponse(),
    "VolumeReload": lambda cloud, asked: None,
    "VolumeGetFile2": _read,
    "SecretGetOrCreate": _secret,
    "DictGetOrCreate": lambda cloud, asked: api_pb2.DictGetOrCreateResponse(
        dict_id=cloud.id("di", asked.deployment_name)
    ),
    "DictUpdate": _dict_update,
    "DictGet": _dict_get,
    "DictClear": lambda cloud, asked: cloud.dicts[asked.dict_id].clear(),
    "QueueGetOrCreate": lambda cloud, asked: api_pb2.QueueGetOrCreateResponse(
        queue_id=cloud.id("qu", asked.deployment_name)
    ),
    "QueuePut": _queue_put,
    "QueueGet": _queue_get,
    "FunctionMap": _map,
    "FunctionGetOutputs": _outputs,
    "FunctionCallCancel": _cancel,
    "TunnelStart": _tunnel,
    "TunnelStop": lambda cloud, asked: api_pb2.TunnelStopResponse(exists=True),
}


def _method(cloud: Cloud, name: str) -> Any:
    async def method(self: Any, stream: Any) -> None:
        asked = await stream.recv_message()
        cloud.asked.append((name, asked))
        if name not in ANSWERS:
            cloud.refused.append(name)
            raise GRPCError(Status.UNIMPLEMENTED, name)
        found = ANSWERS[name](cloud, asked)
        if asyncio.iscoroutine(found):
            found = await found
        for message in found if isinstance(found, list) else [Empty() if found is None else found]:
            await stream.send_message(message)

    return method


@contextmanager
def running(folder: Path, **about: Any) -> Iterator[Cloud]:
    """The servers, for as long as it lasts."""
    cloud = Cloud(folder=folder, **about)
    cloud.volume.mkdir(parents=True)
    names = api_grpc.ModalClientBase.__abstractmethods__
    kind = type("Servers", (api_grpc.ModalClientBase,), {name: _method(cloud, name) for name in names})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    files = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(cloud.volume)))
    threading.Thread(target=files.serve_forever, daemon=True).start()
    cloud.files = f"http://127.0.0.1:{files.server_address[1]}"

    async def start() -> Server:
        server = Server([kind()])
        await server.start("127.0.0.1", 0)
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    assert server._server is not None
    cloud.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
    try:
        yield cloud
    finally:
        cloud.close()
        files.shutdown()
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

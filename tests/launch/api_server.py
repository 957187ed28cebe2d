"""A Kubernetes API server for kubectl, as small as it can be: it knows ConfigMaps, Secrets, pods and RayJobs, keeps
what it is given, and says that every RayJob runs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KINDS = {
    "v1": {"configmaps": "ConfigMap", "secrets": "Secret", "pods": "Pod"},
    "ray.io/v1": {"rayjobs": "RayJob"},
}
RUNNING = {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running", "rayClusterName": "demo-abcde"}
SCHEMA = b"\x0a\x032.0"  # an OpenAPI document without a kind, as protobuf


class Handler(BaseHTTPRequestHandler):
    objects: dict[str, dict[str, Any]]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, data: Any, status: int = 200) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        kind = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf" if data is SCHEMA else "application/json"
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        version = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        if path == "/api":
            self.reply({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            known = {"groupVersion": "ray.io/v1", "version": "v1"}
            groups = [{"name": "ray.io", "versions": [known], "preferredVersion": known}]
            self.reply({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif path == "/openapi/v2":
            self.reply(SCHEMA)
        elif version in KINDS:
            verbs = ["create", "delete", "get", "list", "patch"]
            several = [
                {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
                for name, kind in KINDS[version].items()
            ]
            self.reply({"kind": "APIResourceList", "groupVersion": version, "resources": several})
        elif path in self.objects:
            self.reply(self.objects[path])
        else:
            self.nothing()

    def do_POST(self) -> None:
        made = self.read()
        if made["kind"] == "RayJob":
            made["status"] = RUNNING
        self.objects[f"{self.path.partition('?')[0]}/{made['metadata']['name']}"] = made
        self.reply(made, 201)

    def do_PATCH(self) -> None:
        self.read()
        self.reply(self.objects[self.path.partition("?")[0]])

    def do_DELETE(self) -> None:
        self.read()
        if self.objects.pop(self.path.partition("?")[0], None) is None:
            return self.nothing()
        self.reply({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def read(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")

    def nothing(self) -> None:
        self.reply({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}, 404)


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
    """The file for KUBECONFIG, and what the server keeps, by path."""
    objects: dict[str, dict[str, Any]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"objects": objects}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "double", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "double", "context": {"cluster": "double", "user": "nobody"}}],
        "current-context": "double",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    try:
        yield file, objects
    finally:
        server.shutdown()
        server.server_close()

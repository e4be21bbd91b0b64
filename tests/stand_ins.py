"""Who docker and kubectl talk to where nothing is to run: an engine and a cluster that keep what they are asked for."""

import contextlib
import io
import json
import os
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ENGINE_API = "1.41"  # of Docker 20.10; a newer client keeps to it


class StandIn:
    """A server on a free port that answers every request by its `answer`."""

    def __init__(self) -> None:
        async def endpoint(request: Request) -> Response:
            return self.answer(request, await request.body())

        methods = ["GET", "HEAD", "POST", "PATCH"]
        app = Starlette(routes=[Route("/{path:path}", endpoint, methods=methods)])
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"

    @contextlib.contextmanager
    def serving(self) -> Iterator["StandIn"]:
        """Answer meanwhile, in a thread of its own; what comes before it is up waits in the socket."""
        thread = threading.Thread(target=self.server.run, args=([self.socket],))
        thread.start()
        try:
            yield self
        finally:
            self.server.should_exit = True
            thread.join()

    def environment(self, home: Path) -> dict[str, str]:
        """Point a client at it that has nothing else set up."""
        return {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "KUBE"))} | {
            "HOME": str(home)
        }

    def answer(self, request: Request, body: bytes) -> Response:
        raise NotImplementedError


class Engine(StandIn):
    """Takes every build for done, keeps every container's configuration, and starts none."""

    REFUSAL = "this engine starts nothing"

    def __init__(self) -> None:
        super().__init__()
        self.builds: list[dict[str, Any]] = []
        self.containers: list[dict[str, Any]] = []

    def environment(self, home: Path) -> dict[str, str]:
        # BuildKit's protocol is another one: the builder of old sends the context in one request.
        return super().environment(home) | {"DOCKER_HOST": f"tcp://{self.address}", "DOCKER_BUILDKIT": "0"}

    def answer(self, request: Request, body: bytes) -> Response:
        path = request.url.path
        if path.endswith("/build"):
            with tarfile.open(fileobj=io.BytesIO(body)) as context:
                files = context.getnames()
            query = dict(request.query_params)
            arguments = json.loads(query.get("buildargs", "{}"))
            self.builds.append({"files": files, "tag": query["t"], "arguments": arguments})
            return Response(json.dumps({"stream": "Successfully built\n"}), media_type="application/json")
        if path.endswith("/containers/create"):
            self.containers.append(json.loads(body))
            return JSONResponse({"message": self.REFUSAL}, 500)
        return Response("OK", headers={"Api-Version": ENGINE_API, "Ostype": "linux"})


class Cluster(StandIn):
    """Holds what is created to Kubernetes' own schema, as a cluster does, and keeps it."""

    # Kind by its group and version, as paths have them, with its name there.
    KINDS: ClassVar = {
        "api/v1": ("Service", "services"),
        "apis/apps/v1": ("Deployment", "deployments"),
        "apis/autoscaling/v2": ("HorizontalPodAutoscaler", "horizontalpodautoscalers"),
        "apis/serving.kserve.io/v1alpha1": ("ServingRuntime", "servingruntimes"),
    }
    WITHOUT_SCHEMA = ("ServingRuntime",)  # KServe's, whose types are in .judges

    def __init__(self) -> None:
        super().__init__()
        self.created: list[dict[str, Any]] = []

    def environment(self, home: Path) -> dict[str, str]:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": f"http://{self.address}"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "nobody"}}],
            "users": [{"name": "nobody", "user": {}}],
            "current-context": "here",
        }
        (home / "kubeconfig").write_text(json.dumps(config))
        return super().environment(home) | {"KUBECONFIG": str(home / "kubeconfig")}

    def answer(self, request: Request, body: bytes) -> Response:
        path = request.url.path.strip("/")
        if request.method == "POST":
            return self.create(json.loads(body), request.query_params.get("fieldValidation"))
        if path == "openapi/v2":
            return Response(b"")  # an empty document, in which an older client finds nothing to hold a manifest to
        told = self.discovery().get(path)
        return status(404, "NotFound", f"no {path}") if told is None else JSONResponse(told)

    def discovery(self) -> dict[str, Any]:
        """What tells a client which kinds there are, and that the cluster looks at their fields itself."""
        groups = [path.split("/")[1:] for path in self.KINDS if path.startswith("apis/")]
        versions = {group: {"groupVersion": f"{group}/{version}", "version": version} for group, version in groups}
        told: dict[str, Any] = {
            "version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
            "api": {"kind": "APIVersions", "versions": ["v1"]},
            "apis": {
                "kind": "APIGroupList",
                "groups": [
                    {"name": group, "versions": [version], "preferredVersion": version}
                    for group, version in versions.items()
                ],
            },
            "openapi/v3": {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in self.KINDS}},
        }
        for path, (kind, name) in self.KINDS.items():
            group, version = ["", *path.split("/")[1:]][-2:]
            verbs = ["create", "get", "patch"]
            resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            of = {"group": group, "version": version, "kind": kind}
            patch = {"x-kubernetes-group-version-kind": of, "parameters": [{"name": "fieldValidation", "in": "query"}]}
            told[path] = {
                "kind": "APIResourceList",
                "groupVersion": f"{group}/{version}".strip("/"),
                "resources": [resource],
            }
            told[f"openapi/v3/{path}"] = {"openapi": "3.0.0", "paths": {f"/{path}/{name}": {"patch": patch}}}
        return told

    def create(self, document: dict[str, Any], validation: str | None) -> Response:
        if document["kind"] not in self.WITHOUT_SCHEMA:
            try:
                kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
            except kubernetes_validate.ValidationError as error:
                return status(400, "BadRequest", error.message)
        self.created.append(document | {"fieldValidation": validation})
        return JSONResponse(document, 201)


def status(code: int, reason: str, message: str) -> Response:
    """What a cluster answers where it does not do what was asked."""
    told = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}
    return JSONResponse(told | {"message": message}, code)

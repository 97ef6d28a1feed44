"""A W&B server for tests: enough of its API for runs, media, artifacts with lineage, resume, sync and reports."""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "novelists"
Operation = Callable[["Server", dict[str, Any]], dict[str, Any]]


@contextmanager
def serving() -> Iterator["Server"]:
    """Serve until the block ends."""
    server = Server()
    try:
        yield server
    finally:
        server.die()


@dataclass
class Run:
    """What the server knows of one run."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    used: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history in the order of its lines."""
        return [self.history[line] for line in sorted(self.history)]

    @property
    def axes(self) -> dict[str, str]:
        """Each metric pattern and the metric it is drawn over (in the config, by number: 1 name, 2 glob, 5 axis)."""
        metrics = self.config["_wandb"]["value"]["m"]
        return {m.get("1") or m["2"]: metrics[int(m["5"]) - 1]["1"] for m in metrics if "5" in m}


@dataclass
class Artifact:
    """A version of an artifact: who made it, and its names."""

    id: str
    collection: str
    kind: str
    version: int
    digest: str
    aliases: list[str]
    metadata: dict[str, Any]
    made_by: str
    files: list[str] = field(default_factory=list)
    committed: bool = False


class Server:
    """The server's memory; `failing` and `refused` make errors, `die` and `revive` take it off the network and back."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.artifacts: list[Artifact] = []
        self.uploads: dict[str, bytes] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.refused: set[str] = set()
        self.port = 0
        self.revive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def revive(self) -> None:
        self.failing = False
        self.http = QuietServer(("127.0.0.1", self.port), type("Bound", (Handler,), {"memory": self}))
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def die(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.failing = True  # connections that are still open get errors


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news; a fault of this server is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    memory: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.read_body()
        if self.memory.failing:
            self.answer({"error": "out of order"}, status=500)
        elif self.path.endswith("/file_stream"):
            self.answer(take_stream(self.memory.runs[self.path.split("/")[-2]], json.loads(body)))
        elif self.path == "/graphql":
            request = json.loads(body)
            found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
            operation = found[1] if found else ""
            self.memory.requests.append(operation)
            handle = OPERATIONS.get(operation)
            if operation in self.memory.refused:
                self.answer({"errors": [{"message": f"{operation} refused"}]})
            elif handle:
                self.answer({"data": handle(self.memory, request.get("variables") or {})})
            else:
                self.answer({"errors": [{"message": f"no such operation: {operation}"}]})
        else:
            self.answer({})

    def do_PUT(self) -> None:
        body = self.read_body()
        if not self.memory.failing:
            self.memory.uploads[self.path] = body
        self.answer({}, status=500 if self.memory.failing else 200)

    def do_GET(self) -> None:
        self.answer({}, status=500 if self.memory.failing else 200)

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def take_stream(run: Run, body: dict[str, Any]) -> dict[str, Any]:
    for name, chunk in (body.get("files") or {}).items():
        for number, line in enumerate(chunk["content"]):
            if name == "wandb-history.jsonl":
                run.history[chunk["offset"] + number] = json.loads(line)
            elif name == "wandb-summary.json":
                run.summary = json.loads(line)
    if body.get("complete"):
        run.exit_code = body.get("exitcode")
    return {"exitcode": None, "limits": {}}


def upsert_run(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    inserted = variables["name"] not in memory.runs
    run = memory.runs.setdefault(variables["name"], Run(variables["name"]))
    run.fields |= {key: value for key, value in variables.items() if value is not None}
    run.config |= json.loads(variables.get("config") or "{}")
    return {"upsertBucket": {"bucket": run_answer(run), "inserted": inserted}}


def run_answer(run: Run) -> dict[str, Any]:
    return {
        "id": run.name,
        "name": run.name,
        "displayName": run.fields.get("displayName"),
        "config": json.dumps(run.config),
        "summaryMetrics": json.dumps(run.summary),
        "project": project_answer(run.fields.get("project")),
        "historyLineCount": len(run.history),
        "historyTail": json.dumps([json.dumps(row) for row in run.rows[-1:]]),
        "eventsLineCount": 0,
        "eventsTail": "[]",
        "logLineCount": 0,
        "tags": run.fields.get("tags") or [],
        "wandbConfig": '{"t": {}}',  # without it the core thinks that the run never began
    }


def project_answer(name: str | None) -> dict[str, Any]:
    return {"id": "project", "internalId": "1", "name": name, "entity": {"id": "entity", "name": ENTITY}}


def resume_status(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    run = memory.runs.get(variables["name"])
    return {"model": project_answer(variables["project"]) | {"bucket": run_answer(run) if run else None}}


def find_run(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    run = memory.runs.get(variables["name"])
    return {"project": {"run": run_answer(run) | {"projectId": "1", "state": "finished"} if run else None}}


def create_run_files(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    files = [{"name": name, "uploadUrl": f"{memory.url}/run/{variables['run']}/{name}"} for name in variables["files"]]
    return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}


def create_artifact(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    given = variables["input"]
    collection = (
        given["artifactCollectionNames"][0] if given.get("artifactCollectionNames") else given["artifactCollectionName"]
    )
    versions = [artifact for artifact in memory.artifacts if artifact.collection == collection]
    same = next((artifact for artifact in versions if artifact.digest == given["digest"]), None)
    artifact = same or Artifact(
        id=f"artifact-{len(memory.artifacts)}",
        collection=collection,
        kind=given["artifactTypeName"],
        version=len(versions),
        digest=given["digest"],
        aliases=[],
        metadata=json.loads(given.get("metadata") or "{}"),
        made_by=given["runName"],
    )
    if not same:
        memory.artifacts.append(artifact)
    for alias in given.get("aliases") or []:
        for other in versions:
            if alias["alias"] in other.aliases:
                other.aliases.remove(alias["alias"])
        artifact.aliases.append(alias["alias"])
    state = "COMMITTED" if artifact.committed else "PENDING"
    sequence = {"latestArtifact": {"id": versions[-1].id} if versions else None}
    return {"createArtifact": {"artifact": {"id": artifact.id, "state": state, "artifactSequence": sequence}}}


def manifest(operation: str) -> Operation:
    def answer(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
        identity = variables.get("artifactManifestID") or f"manifest-of-{variables['artifactID']}"
        file = {"id": "file", "uploadUrl": f"{memory.url}/{identity}", "uploadHeaders": []}
        return {operation: {"artifactManifest": {"id": identity, "file": file}}}

    return answer


def create_artifact_files(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    edges = []
    for given in variables["input"]["artifactFiles"]:
        identity, name = given["artifactID"], given["name"]
        by_id(memory, identity).files.append(name)
        node = {"storagePath": name, "uploadUrl": f"{memory.url}/{identity}/{name}", "uploadHeaders": []}
        edges.append({"node": node | {"uploadMultipartUrls": None, "artifact": {"id": identity}}})
    return {"createArtifactFiles": {"files": {"edges": edges}}}


def commit_artifact(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    artifact = by_id(memory, variables["artifactID"])
    artifact.committed = True
    return {"commitArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}


def use_artifact(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    given = variables.get("input") or variables  # the client and its core spell it differently
    artifact = by_id(memory, given["artifactID"])
    memory.runs[given["runName"]].used.append(artifact.collection)
    return {"useArtifact": {"artifact": {"id": artifact.id}}}


def find_artifact(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    collection, _, wanted = variables["name"].partition(":")
    for artifact in memory.artifacts:
        if artifact.collection == collection and wanted in [*artifact.aliases, f"v{artifact.version}"]:
            return {"project": {"artifactCollectionMembership": membership(artifact, variables["project"])}}
    return {"project": {"artifactCollectionMembership": None}}


def artifact_by_id(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    return {"artifact": membership(by_id(memory, variables["id"]), "triptych")["artifact"]}


def membership(artifact: Artifact, project: str) -> dict[str, Any]:
    collection = {"__typename": "ArtifactSequence", "name": artifact.collection, "project": project_answer(project)}
    common = {"versionIndex": artifact.version, "createdAt": "2026-01-01T00:00:00Z"}
    answer = common | {
        "__typename": "Artifact",
        "id": artifact.id,
        "artifactSequence": collection,
        "artifactType": {"name": artifact.kind},
        "description": None,
        "metadata": json.dumps(artifact.metadata),
        "ttlDurationSeconds": -2,
        "ttlIsInherited": True,
        "tags": [],
        "historyStep": None,
        "state": "COMMITTED",
        "size": 1,
        "digest": artifact.digest,
        "digestAlgorithm": "MANIFEST_MD5",
        "commitHash": "",
        "fileCount": len(artifact.files),
        "updatedAt": None,
        "aliases": [],
    }
    identity = {"__typename": "ArtifactCollectionMembership", "id": f"membership-of-{artifact.id}"}
    return identity | common | {"aliases": [], "artifactCollection": collection, "artifact": answer}


def by_id(memory: Server, identity: str) -> Artifact:
    return next(artifact for artifact in memory.artifacts if artifact.id == identity)


def viewer(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    return {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}


def find_project(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    return {"project": project_answer(variables["projectName"])}


def list_projects(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    node = project_answer("triptych") | {
        "entityName": ENTITY,
        "createdAt": "2026-01-01T00:00:00Z",
        "isBenchmark": False,
        "user": None,
    }
    page = {"edges": [{"node": node, "cursor": "1"}], "pageInfo": {"endCursor": None, "hasNextPage": False}}
    return {"models": page}


def upsert_report(memory: Server, variables: dict[str, Any]) -> dict[str, Any]:
    identity = variables.get("id") or f"report-{len(memory.reports)}"
    memory.reports[identity] = variables
    project = {"id": "project", "name": variables["projectName"], "entityName": variables["entityName"]}
    view = variables | {"id": identity, "project": project, "updatedAt": None}
    return {"upsertView": {"view": view, "inserted": True}}


OPERATIONS: dict[str, Operation] = {
    "UpsertBucket": upsert_run,
    "RunResumeStatus": resume_status,
    "CreateRunFiles": create_run_files,
    "CreateArtifact": create_artifact,
    "CreateArtifactManifest": manifest("createArtifactManifest"),
    "UpdateArtifactManifest": manifest("updateArtifactManifest"),
    "CreateArtifactFiles": create_artifact_files,
    "CommitArtifact": commit_artifact,
    "UseArtifact": use_artifact,
    "ArtifactMembershipByName": find_artifact,
    "ArtifactByID": artifact_by_id,
    "Run": find_run,
    "Viewer": viewer,
    "GetDefaultEntity": viewer,
    "ProjectInternalId": find_project,
    "GetProjects": list_projects,
    "upsertView": upsert_report,
}

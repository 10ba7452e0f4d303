"""As much of a W&B server, on loopback, as taking runs and a saved view needs; it notes what it was sent."""

import contextlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef0123456789abcdef01234567"
ENTITY = "somebody"


@dataclass
class Received:
    """What clients sent: runs as they were started, their history by id, views as they were saved."""

    url: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    history: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    views: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def wandb_server(silent_after_runs: int | None = None) -> Iterator[Received]:
    """Serve until the block ends; once so many runs were started, take requests and never answer."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if len(received.runs) == silent_after_runs:
                over.wait()
                return
            if self.path == "/graphql":
                self._reply({"data": _answer(json.loads(body), received)})
                return
            stream = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
            if stream:
                lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
                received.history[stream[1]] += [json.loads(line) for line in lines]
            self._reply({})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply({})

        def _reply(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Received(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield received
        finally:
            over.set()
            server.shutdown()
            thread.join()


def _answer(request: dict[str, Any], received: Received) -> dict[str, Any]:
    """Return the data of a GraphQL answer, told apart by the field that the query asks for."""
    query, given = request["query"], request.get("variables") or {}
    if "upsertBucket(" in query:
        return {"upsertBucket": {"bucket": _run(given, received), "inserted": True}}
    if "createRunFiles(" in query:
        files = [{"name": name, "uploadUrl": f"{received.url}/upload"} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
    if "createArtifact(" in query:
        sequence = {"id": "sequence", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": "it", "state": "COMMITTED", "artifactSequence": sequence}}}
    if "upsertView(" in query:
        received.views.append(given)
        return {"upsertView": {"view": {"id": "view", "name": given["name"]}, "inserted": True}}
    if "artifactType" in query:
        return {"project": {"artifact": None}}
    if "viewer" in query:
        return {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}}
    return {}


def _run(given: dict[str, Any], received: Received) -> dict[str, Any]:
    """A run is sent once as it starts, with its group, and maybe once more as it ends, without."""
    if given.get("groupName"):
        received.runs.append(given)
    project = {"id": "project", "name": given["project"], "entity": {"id": "entity", "name": ENTITY}}
    return {"id": given["name"], "name": given["name"], "config": "{}", "historyLineCount": 0, "project": project}

"""A server on this machine that speaks as much of Hugging Face's protocol as kempner needs: to
create a model, to upload and commit, and to download again; with every fault that a test asks for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 1000
"""Bytes from which a file goes by LFS."""

Files = dict[str, bytes]
Answer = tuple[int, Any, dict[str, str]]
"""Status, body and headers."""


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, Files] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def commit(self, branch: str, files: Files) -> str:
        told = "".join(f"{name} {hashlib.sha1(files[name]).hexdigest()}" for name in sorted(files))
        name = hashlib.sha1(f"{len(self.commits)} {told}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None


@dataclass(frozen=True)
class Fault:
    """What happens to a request in place of its answer: `status` is answered, or `body` in the
    place of what would have been; with `cut` the connection breaks after that many bytes of the
    answer, or, of an upload, of what is sent."""

    status: int | None = None
    body: bytes | None = None
    cut: int | None = None


@dataclass
class Hub:
    """What the server has, does and was asked for. `faults` are met by the next requests of a kind:
    create, branch, info, tree, resolve, yaml, preupload, batch, upload, verify, commit."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str | None = None
    """What one must have to see or change anything."""
    gated: bool = False
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    """The same for every request of a kind."""
    large: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded, by SHA-256; it is in no model before a commit names it."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes that were downloaded, by file."""
    asked: Counter[str] = field(default_factory=Counter)
    endpoint: str = ""

    def fault(self, kind: str) -> Fault:
        self.asked[kind] += 1
        waiting = self.faults.get(kind)
        return waiting.pop(0) if waiting else self.always.get(kind, Fault())

    def files(self, repository: str, revision: str = "main") -> Files:
        found = self.repositories[repository]
        return found.commits[found.branches[revision]]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    handler = type("OfThisHub", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


_NAME = r"(?P<repository>[\w.-]+/[\w.-]+)"
_ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "yaml"),
    ("POST", rf"/api/models/{_NAME}/branch/(?P<branch>.+)", "branch"),
    ("POST", rf"/api/models/{_NAME}/preupload/(?P<revision>.+)", "preupload"),
    ("POST", rf"/api/models/{_NAME}/commit/(?P<revision>.+)", "commit"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/large/(?P<digest>\w+)", "upload"),
    ("POST", r"/verify", "verify"),
    ("GET", rf"/api/models/{_NAME}/tree/(?P<revision>[^/]+)", "tree"),
    ("GET", rf"/api/models/{_NAME}/revision/(?P<revision>.+)", "info"),
    ("GET", rf"/api/models/{_NAME}", "info"),
    ("GET", rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer("GET")

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")

    def answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        for wanted, pattern, kind in _ROUTES:
            found = re.fullmatch(pattern, path)
            if wanted == method and found:
                fault = self.hub.fault(kind)
                body = self.read(fault.cut if kind == "upload" else None)
                if body is None:
                    self.close_connection = True
                    return
                self.reply(kind, fault, found.groupdict(), body)
                return
        self.say(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def read(self, most: int | None) -> bytes | None:
        """What was sent; None if the connection is to break before its end."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts) if most is None else None
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length if most is None else min(most, length))
        return body if most is None else None

    def reply(self, kind: str, fault: Fault, place: dict[str, Any], body: bytes) -> None:
        hub = self.hub
        if fault.status is not None:
            self.say(fault.status, fault.body or b"{}")
            return
        allowed = not hub.token or self.headers.get("Authorization") == f"Bearer {hub.token}"
        if not allowed and kind not in ("upload", "verify"):
            code = "GatedRepo" if hub.gated else "RepoNotFound"
            self.say(403 if hub.gated else 404, b"{}", {"X-Error-Code": code})
            return
        answer: Callable[..., Answer] = getattr(self, f"on_{kind}")
        status, content, headers = answer(body=body, **place)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if fault.body is not None:
            data = fault.body
        self.say(status, data, headers, fault.cut)

    def say(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError):
                self.wfile.write(data[:cut])
        self.close_connection = True

    # ---- what the hub does

    def on_create(self, body: bytes) -> Answer:
        asked = json.loads(body)
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        url = {"url": f"{self.hub.endpoint}/{name}"}
        if name in self.hub.repositories:
            return 409, url, {}
        self.hub.repositories[name] = Repository("private" in (asked.get("visibility"), *asked))
        return 200, url, {}

    def on_yaml(self, body: bytes) -> Answer:
        good = json.loads(body)["content"].startswith("---\n")
        errors = [] if good else [{"message": "no metadata"}]
        return 200 if good else 400, {"errors": errors, "warnings": []}, {}

    def on_branch(self, repository: str, branch: str, body: bytes) -> Answer:
        found = self.hub.repositories[repository]
        if branch in found.branches:
            return 409, {}, {}
        found.branches[branch] = found.branches["main"]
        return 200, {}, {}

    def found(self, repository: str, revision: str) -> tuple[str, Files] | str:
        """A commit and its files; or the code of the error."""
        there = self.hub.repositories.get(repository)
        if there is None:
            return "RepoNotFound"
        commit = there.find(revision)
        return "RevisionNotFound" if commit is None else (commit, there.commits[commit])

    def on_info(self, repository: str, body: bytes, revision: str = "main") -> Answer:
        found = self.found(repository, revision)
        if isinstance(found, str):
            return 404, {}, {"X-Error-Code": found}
        commit, files = found
        private = self.hub.repositories[repository].private
        names = [{"rfilename": name} for name in files]
        return 200, {"id": repository, "sha": commit, "siblings": names, "private": private}, {}

    def on_tree(self, repository: str, revision: str, body: bytes) -> Answer:
        found = self.found(repository, revision)
        if isinstance(found, str):
            return 404, {}, {"X-Error-Code": found}
        return 200, [_entry(name, content) for name, content in found[1].items()], {}

    def on_resolve(self, repository: str, revision: str, path: str, body: bytes) -> Answer:
        found = self.found(repository, revision)
        if isinstance(found, str) or path not in found[1]:
            code = found if isinstance(found, str) else "EntryNotFound"
            return 404, {}, {"X-Error-Code": code}
        commit, files = found
        whole, headers = files[path], {"X-Repo-Commit": commit}
        headers["ETag"] = f'"{_entry(path, whole)["oid"]}"'
        if len(whole) >= LARGE:
            headers["ETag"] = f'"{hashlib.sha256(whole).hexdigest()}"'
        first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0] or 0)
        if self.command == "GET":
            self.hub.sent[path] += len(whole) - first
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(whole) - 1}/{len(whole)}"
            return 206, whole[first:], headers
        return 200, whole, headers

    def on_preupload(self, repository: str, revision: str, body: bytes) -> Answer:
        found = self.found(repository, revision)
        there = {} if isinstance(found, str) else found[1]
        files = []
        for file in json.loads(body)["files"]:
            mode = "lfs" if file["size"] >= LARGE else "regular"
            known = _entry(file["path"], there[file["path"]]) if file["path"] in there else {}
            oid = known.get("lfs", {}).get("oid") or known.get("oid")
            files.append(
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        return 200, {"files": files}, {}

    def on_batch(self, repository: str, body: bytes) -> Answer:
        def answer(asked: dict[str, Any]) -> dict[str, Any]:
            if asked["oid"] in self.hub.large:
                return asked
            href = f"{self.hub.endpoint}/large/{asked['oid']}"
            verify = {"href": f"{self.hub.endpoint}/verify"}
            return {**asked, "actions": {"upload": {"href": href}, "verify": verify}}

        return (
            200,
            {"transfer": "basic", "objects": [*map(answer, json.loads(body)["objects"])]},
            {},
        )

    def on_upload(self, digest: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != digest:
            return 400, {}, {}
        self.hub.large[digest] = body
        return 200, {}, {}

    def on_verify(self, body: bytes) -> Answer:
        asked = json.loads(body)
        there = self.hub.large.get(asked["oid"], b"")
        return (200 if len(there) == asked["size"] else 404), {}, {}

    def on_commit(self, repository: str, revision: str, body: bytes) -> Answer:
        found = self.hub.repositories[repository]
        files = dict(found.commits[found.branches[revision]])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = found.commit(revision, files)
        url = f"{self.hub.endpoint}/{repository}/commit/{commit}"
        return 200, {"commitUrl": url, "commitOid": commit}, {}

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what was asked is in `hub`."""


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    told: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return told

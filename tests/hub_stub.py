"""A stand-in for the Hugging Face hub on loopback: what `huggingface_hub` asks of it to read a
repository and to upload one, without LFS's storage elsewhere.

`Hub(files)` serves repositories by name; `requests` lists (method, path) as they came, `commits`
what was uploaded: the files of each commit by name.
"""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from web_stub import loopback

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories as {name: {file: bytes}}; `token`, where given, must come with each request."""

    def __init__(self, repositories, token=None):
        self.repositories, self.token = repositories, token
        self.requests, self.commits, self.objects, self.created = [], {}, {}, []
        self.host = ""

    def answer(self, method, path, headers, body):
        """(status, headers, body) of a request."""
        self.requests.append((method, path))
        self.host = headers["host"]
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
        if method == "POST" and parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = (
                f"{asked['organization']}/{asked['name']}"
                if asked.get("organization")
                else asked["name"]
            )
            self.created.append(name)
            return 200, {}, json.dumps({"url": f"http://{self.host}/{name}", "name": name}).encode()
        if parts == ["api", "validate-yaml"]:
            return 200, {}, b'{"errors": [], "warnings": []}'
        if method == "PUT":
            self.objects[parts[-1]] = body
            return 200, {}, b""
        if parts[:2] == ["api", "models"]:
            return self._api(method, "/".join(parts[2:4]), parts[4:], body)
        if parts[:2] == ["api", "datasets"]:
            return self._api(method, "/".join(parts[1:4]), parts[4:], body)
        if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
            return self._file("/".join(parts[:3]), parts[4], "/".join(parts[5:]), headers)
        if parts[2:3] == ["resolve"]:
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), headers)
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(headers, json.loads(body))
        return 404, {}, b"{}"

    def _api(self, method, name, rest, body):
        if method == "GET" and name not in self.repositories:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if method == "GET" and rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if method == "GET" and rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": file} for file in self.repositories[name]]
            facts = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
            return 200, {}, json.dumps(facts | {"private": False, "downloads": 0}).encode()
        if method == "GET" and rest[:1] == ["tree"]:
            return self._tree(self.repositories[name], "".join(f"{part}/" for part in rest[2:]))
        if rest[:1] == ["preupload"]:
            asked = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False}
                for one in asked
            ]
            return 200, {}, json.dumps({"files": modes}).encode()
        if rest[:1] == ["commit"]:
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            self.commits[name] = {
                line["value"]["path"]: self._content(line)
                for line in lines
                if line["key"] != "header"
            }
            facts = {"commitUrl": f"http://{self.host}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
            return 200, {}, json.dumps(facts | {"pullRequestUrl": None}).encode()
        return 404, {}, b"{}"

    def _content(self, line):
        value = line["value"]
        if line["key"] == "lfsFile":
            return self.objects[value["oid"]]
        return base64.b64decode(value["content"])

    def _batch(self, headers, asked):
        host = headers.get("host")
        objects = [
            {
                "oid": one["oid"], "size": one["size"], "authenticated": True,
                "actions": {"upload": {"href": f"http://{host}/objects/{one['oid']}"}},
            }
            for one in asked["objects"]
        ]  # fmt: skip
        return 200, {}, json.dumps({"transfer": "basic", "objects": objects}).encode()

    def _tree(self, files, folder):
        """The files of a folder and of those in it, and these."""
        within = {file: data for file, data in files.items() if file.startswith(folder)}
        if not within:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        folders = {file.rpartition("/")[0] for file in within} - {"", folder.rstrip("/")}
        entries = [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders]
        entries += [
            {"type": "file", "path": file, "size": len(data), "oid": _blob(data)}
            for file, data in within.items()
        ]
        return 200, {}, json.dumps(entries).encode()

    def _file(self, name, revision, file, headers):
        files = self.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        data = files[file]
        facts = {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first, status = 0, 200
        if ranged := headers.get("range"):
            first, status = int(ranged.removeprefix("bytes=").split("-")[0]), 206
            facts["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        return status, facts, data[first:]


def _blob(data):
    """git's name of a blob, as the hub's ETag of small files is."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _mode(path):
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def serving(hub):
    """The address of a server that answers as `hub` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self):
            size = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(size)
            if "chunked" in self.headers.get("transfer-encoding", ""):
                body = self.read_chunks()
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, facts, data = hub.answer(self.command, self.path, headers, body)
            self.send_response(status)
            for name, value in facts.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = respond

        def read_chunks(self):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *_):
            pass

    with loopback(Handler) as address:
        yield address

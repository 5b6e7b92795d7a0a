"""A web server on loopback that gives files by ranges of bytes, and drops connections."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Web:
    """Files by name. Of every answer at most `most` bytes come, then its connection drops; after
    `lost_after` answers none come. `ranges` lists (name, first byte asked for) of all; `ranged`
    says whether ranges are understood, `redirects` names that are elsewhere."""

    def __init__(self, files, most=0, ranged=True):
        self.files, self.most, self.ranged = files, most, ranged
        self.ranges, self.lost_after, self.redirects = [], 0, {}


@contextmanager
def served(web):
    """The address of a server of `web` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            name = self.path.partition("?")[0].lstrip("/")
            if name in web.redirects:
                self.send_response(302)
                self.send_header("Location", web.redirects[name])
                self.send_header("Content-Length", "0")
                return self.end_headers()
            if name not in web.files:
                return self.send_error(404)
            data = web.files[name]
            if isinstance(data, int):
                return self.send_error(data)
            asked = self.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")
            first = int(asked[0])
            last = min(int(asked[1]) + 1, len(data)) if asked[1] else len(data)
            web.ranges.append((name, first))
            lost = web.lost_after and len(web.ranges) > web.lost_after
            if not web.ranged:
                self.send_response(200)
                first, last = 0, len(data)
            elif first >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                first = last = 0
            else:
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(data)}")
            self.send_header("ETag", f'"{hash(data)}"')
            self.send_header("Content-Length", str(last - first))
            self.end_headers()
            sent = data[first:last]
            if lost or (web.most and len(sent) > web.most):
                self.close_connection = True
                sent = b"" if lost else sent[: web.most]
            if self.command == "GET":
                self.wfile.write(sent)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with loopback(Handler) as address:
        yield address


@contextmanager
def loopback(handler):
    """A server on loopback: its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

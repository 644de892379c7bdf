"""A server of git LFS on two hosts: one answers the batch request and demands the credential, the
other keeps the objects behind signed links, and refuses whoever brings an Authorization field, as
stores of that kind do. For the repository `keyed` it gives no signed links but a header to show there,
with the key of LFS_KEY. It prints the path of each batch request.

`lfs_server.py API_PORT API_CERT API_KEY OBJECTS_PORT OBJECTS_CERT OBJECTS_KEY USER:TOKEN DIR`
"""

import base64
import hashlib
import http.server
import json
import os
import pathlib
import ssl
import sys
import threading

API, OBJECTS = sys.argv[1:4], sys.argv[4:7]
WANTED = "Basic " + base64.b64encode(sys.argv[7].encode()).decode()
KEPT = pathlib.Path(sys.argv[8])
OBJECTS_HOST, SIGNATURE = "objects.example", "signed=4f1d"
KEY = "RemoteAuth " + os.environ["LFS_KEY"]


class Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b"", kind="application/vnd.git-lfs+json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        whole = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def log_message(self, *_):
        pass


class Batch(Quiet):
    def do_POST(self):
        asked = self.body()
        if self.headers.get("Authorization") != WANTED:
            return self.answer(401, b"{}")
        if not self.path.endswith("/info/lfs/objects/batch"):
            return self.answer(404, b"{}")
        print(self.path, flush=True)
        batch = json.loads(asked)
        objects = []
        for wanted in batch["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            link = {"href": f"https://{OBJECTS_HOST}/store/{oid}?{SIGNATURE}", "expires_in": 600}
            if self.path.startswith("/acme/keyed.git/"):
                link["href"] = f"https://{OBJECTS_HOST}/store/{oid}"
                link["header"] = {"Authorization": KEY}
            actions = {} if batch["operation"] == "upload" and (KEPT / oid).exists() else {batch["operation"]: link}
            objects.append({"oid": oid, "size": size, "authenticated": True, "actions": actions})
        self.answer(200, json.dumps({"transfer": "basic", "objects": objects}).encode())


class Store(Quiet):
    def refused(self):
        oid = self.path.split("?")[0].rsplit("/", 1)[-1]
        # A link or a header, and never both.
        signed, shown = self.path.endswith("?" + SIGNATURE), self.headers.get("Authorization")
        if (shown is not None if signed else shown != KEY):
            self.body() if self.command == "PUT" else None
            self.answer(400, b"only one way to sign in is allowed", "text/plain")
            return None
        return KEPT / oid

    def do_PUT(self):
        if place := self.refused():
            content = self.body()
            if hashlib.sha256(content).hexdigest() != place.name:
                return self.answer(422)
            place.write_bytes(content)
            self.answer(200)

    def do_GET(self):
        if place := self.refused():
            self.answer(200, place.read_bytes(), "application/octet-stream")


for (port, cert, key), handler in [(API, Batch), (OBJECTS, Store)]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

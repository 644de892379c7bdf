"""Image registries with skopeo in a sandbox: docker-registry with a token server (a small one of ours that
signs what docker-registry checks), and docker-registry that takes the password itself."""

import base64
import http.server
import json
import os
import subprocess
import threading
import time
import urllib.parse

import secrecy
from support import Place, free_port, port_answers, wait_for

PASSWORD = "PASSWORD-CANARY-" + os.urandom(12).hex()
SERVICE = "images"
POLICY = """
    [sandbox]
    tool-timeout = "3m"
    [[egress.allow]]
    hosts = ["images.example", "basic.example"]
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH"]
    paths = ["/v2/", "/v2/team/**"]
    credential = "images"
    addresses = ["127.0.0.1/32"]
    [credentials.images]
    secret = "local:images"
    hosts = ["images.example", "basic.example", "login.example"]
    inject = { registry = "bot" }
"""
# An image of one layer that holds one file, as OCI lays it out.
IMAGE = """import gzip, hashlib, io, json, os, tarfile
os.makedirs("/tmp/image/blobs/sha256")
def blob(content, kind):
    digest = hashlib.sha256(content).hexdigest()
    open(f"/tmp/image/blobs/sha256/{digest}", "wb").write(content)
    return {"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + digest, "size": len(content)}
layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as tar:
    entry = tarfile.TarInfo("hello"); entry.size = 1 << 20
    tar.addfile(entry, io.BytesIO(os.urandom(1 << 20)))
layer = layer.getvalue()
config = {"architecture": "amd64", "os": "linux", "config": {},
          "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}}
manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [blob(gzip.compress(layer), "layer.v1.tar+gzip")]}
index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), "manifest.v1+json")]}
index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "1"}
json.dump(index, open("/tmp/image/index.json", "w"))
json.dump({"imageLayoutVersion": "1.0.0"}, open("/tmp/image/oci-layout", "w"))
"""
SCRIPT = """set -e
python3 - <<'END'
{image}END
skopeo() {{ command skopeo --insecure-policy "$@"; }}
skopeo copy -q oci:/tmp/image:1 docker://{host}/team/app:1
skopeo copy -q docker://{host}/team/app:1 oci:/tmp/back:1
diff -r /tmp/image/blobs /tmp/back/blobs
skopeo list-tags docker://{host}/team/app
! skopeo copy -q oci:/tmp/image:1 docker://{host}/other/app:1
echo all done
"""


class Tokens(http.server.BaseHTTPRequestHandler):
    """Gives who knows the password what is asked for; a token says so under the signature of `signer`."""

    protocol_version = "HTTP/1.1"
    signer = None
    scopes, given = [], []

    def do_GET(self):
        pair = base64.b64encode(f"bot:{PASSWORD}".encode()).decode()
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        scopes = " ".join(query.get("scope", [])).split()
        if self.headers["authorization"] != f"Basic {pair}" or query.get("service") != [SERVICE]:
            return self.answer(401, {"errors": [{"code": "UNAUTHORIZED"}]})
        access = []
        for kind, name, actions in (scope.split(":") for scope in scopes):
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        self.scopes += scopes
        now = int(time.time())
        token = self.signer.sign({"iss": "login", "sub": "bot", "aud": SERVICE, "iat": now, "nbf": now - 60,
                                  "exp": now + 300, "jti": os.urandom(8).hex(), "access": access})
        self.given.append(token)
        self.answer(200, {"token": token, "expires_in": 300})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Signer:
    def __init__(self, root):
        self.certificate, self.key, self.der = (root / f"signer.{end}" for end in ("pem", "key", "der"))
        run = lambda *a: subprocess.run(["openssl", *map(str, a)], check=True, capture_output=True)
        run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self.key, "-out", self.certificate,
            "-days", "2", "-subj", "/CN=signer")
        run("x509", "-in", self.certificate, "-outform", "DER", "-out", self.der)

    def sign(self, claims):
        plain = lambda content: base64.urlsafe_b64encode(content).rstrip(b"=")
        chain = [base64.b64encode(self.der.read_bytes()).decode()]
        head = {"typ": "JWT", "alg": "RS256", "x5c": chain}
        text = b".".join(plain(json.dumps(part).encode()) for part in (head, claims))
        signed = subprocess.run(["openssl", "dgst", "-sha256", "-sign", self.key], input=text, check=True,
                                capture_output=True)
        return (text + b"." + plain(signed.stdout)).decode()


def registry(place, name, auth):
    port = free_port()
    content = {
        "version": 0.1, "log": {"level": "warn"}, "auth": auth,
        "storage": {"filesystem": {"rootdirectory": str(place.root / f"images-{name}")}},
        "http": {"addr": f"127.0.0.1:{port}", "host": f"https://{name}.example"},
    }
    config = place.root / f"{name}.yml"
    # What is JSON is YAML.
    config.write_text(json.dumps(content))
    place.start(name, ["docker-registry", "serve", str(config)])
    wait_for(f"the registry {name} to listen", 30, lambda: port_answers(port))
    return port


def servers(place):
    Tokens.signer = Signer(place.root)
    tokens = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tokens)
    threading.Thread(target=tokens.serve_forever, daemon=True).start()
    users = subprocess.run(["htpasswd", "-niB", "bot"], input=PASSWORD.encode(), check=True, capture_output=True)
    (place.root / "users").write_bytes(users.stdout)
    behind = {
        "login.example": tokens.server_address[1],
        "images.example": registry(place, "images", {"token": {
            "realm": "https://login.example/token", "service": SERVICE, "issuer": "login",
            "rootcertbundle": str(Tokens.signer.certificate)}}),
        "basic.example": registry(place, "basic", {"htpasswd": {
            "realm": "basic", "path": str(place.root / "users")}}),
    }
    ports, blocks = {host: free_port() for host in behind}, ""
    for host, port in ports.items():
        certificate, key = place.certificate(host)
        blocks += f"""
          server {{ listen 127.0.0.1:{port} ssl; server_name {host}; client_max_body_size 0;
            ssl_certificate {certificate}; ssl_certificate_key {key};
            location / {{ proxy_pass http://127.0.0.1:{behind[host]}; proxy_http_version 1.1;
              proxy_set_header Host $host; proxy_set_header X-Forwarded-Proto https;
              proxy_request_buffering off; }} }}"""
    place.nginx("unused.example", "", before=blocks)
    return ports


def run(claims):
    with Place() as place:
        ports = servers(place)
        place.cleanhands({"agents": POLICY}, ports)
        place.store_secret("images", PASSWORD)
        outputs = []
        for host, kind in (("images.example", "tokens"), ("basic.example", "the password itself")):
            done = place.command("exec", "--environment", "agents", "--", "bash", "-c",
                                 SCRIPT.format(image=IMAGE, host=host), timeout=180)
            text = (done.stdout + done.stderr).decode(errors="replace")
            outputs.append(text)
            claims.holds(f"skopeo without a login pushes, pulls and lists at a registry that takes {kind}",
                         "all done" in text and '"Tags"' in text,
                         text + place.log("up")[-3000:] + place.log(host.split(".")[0])[-2000:])
            claims.holds("and cannot push where no rule allows it", "other/app: 403" in text, text)
        asked = set(Tokens.scopes)
        claims.holds("each token was for the one repository and for what the requests did",
                     asked == {"repository:team/app:pull", "repository:team/app:pull,push"}, str(asked))
        claims.holds("a token serves the requests that follow", len(Tokens.given) <= 4, str(Tokens.scopes))
        known = [PASSWORD, base64.b64encode(f"bot:{PASSWORD}".encode()).decode(), *Tokens.given]
        claims.holds("neither password nor token is in any output",
                     not any(secret in text for secret in known for text in outputs))

        def again():
            for host in ("images.example", "basic.example"):
                done = place.command("exec", "--environment", "agents", "--", "bash", "-c",
                                     SCRIPT.format(image=IMAGE, host=host), timeout=180)
                claims.holds(f"{host} serves after a restart", b"all done" in done.stdout,
                             (done.stdout + done.stderr).decode(errors="replace"))
            note()

        def note():
            place.secrets.update((token.encode(), f"token {number}") for number, token in enumerate(Tokens.given))

        note()
        secrecy.check(claims, "registries", place, again)

"""Every protocol between clients and servers that others wrote: the clients in a sandbox without any
token, the servers demanding one, proxyd in between.

TRAFFIC_PACKAGES (set by tests/run) is a directory of Python packages for /usr/bin/python3.
"""

import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import threading
import time

from support import Claims, Place, free_port, port_answers, wait_for

TOKEN = "SECRET-CANARY-traffic-" + os.urandom(12).hex()
PACKAGES = os.environ["TRAFFIC_PACKAGES"]
PYTHON = "/usr/bin/python3"
HERE = pathlib.Path(__file__).resolve().parent / "traffic"
WEB, EVENTS, GRPC, SOCKET, PLAIN = (
    "web.example", "events.example", "grpc.example", "socket.example", "plain.example")
HOSTS = f'["{WEB}", "{EVENTS}", "{GRPC}", "{SOCKET}"]'
GIB = 1 << 30
POLICY = f"""
    [sandbox]
    tool-timeout = "5m"
    mounts = [{{ source = "{PACKAGES}", target = "/opt/traffic" }}]
    [[egress.allow]]
    hosts = ["{GRPC}"]
    paths = ["/test.Peer/**"]
    credential = "api"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["{WEB}", "{EVENTS}", "{SOCKET}"]
    methods = ["GET", "HEAD", "POST", "PUT", "OPTIONS"]
    credential = "api"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["{PLAIN}"]
    methods = ["GET"]
    ports = [80]
    plaintext = true
    addresses = ["127.0.0.1/32"]
    [credentials.api]
    secret = "local:api"
    inject = {{ bearer = true }}
    hosts = {HOSTS}
    env = "API_TOKEN"
"""


class Sink(http.server.BaseHTTPRequestHandler):
    """Counts what nginx passes on, and keeps nothing."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        left = count = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 1 << 20)))
        body = b"%d\n" % count
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def proxyd_of(up):
    """The process that carries the traffic: the vault has one of its own."""
    children = pathlib.Path(f"/proc/{up}/task/{up}/children").read_text().split()
    for child in children:
        command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"proxyd" in command[:5]:
            return int(child)
    raise SystemExit(f"FAILED: no proxyd among {children}\n0 passed, 1 failed")


def peak(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def start_peers(place):
    ports = {}
    environment = {"PYTHONPATH": PACKAGES, "PATH": os.environ["PATH"]}
    for kind, host in [("grpc", GRPC), ("websocket", SOCKET), ("events", EVENTS)]:
        cert, key = place.certificate(host)
        ports[host] = free_port()
        place.start(kind, [PYTHON, str(HERE / "servers.py"), kind, str(ports[host]), cert, key, TOKEN],
                    env=environment)
    sink = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    with open(place.root / "gib", "wb") as sparse:
        sparse.truncate(GIB)
    ports[PLAIN] = free_port()
    ports[WEB] = place.nginx(WEB, f"""
        client_max_body_size 0; root {place.root};
        if ($http_authorization != "Bearer {TOKEN}") {{ return 401; }}
        location = /hello {{ return 200 "hello\\n"; }}
        location = /headers {{ return 200 "$http_expect|$http_te|$http_x_odd|$request_uri\\n"; }}
        location = /early {{ return 413 "too much\\n"; }}
        location /odd/ {{ return 200 "ok\\n"; }}
        location = /gib {{ }}
        location /sink {{
          proxy_pass http://127.0.0.1:{sink.server_port}; proxy_request_buffering off;
          proxy_http_version 1.1; proxy_read_timeout 300s;
        }}
    """, f"""
        server {{ listen 127.0.0.1:{ports[PLAIN]} http2; location / {{ return 200 "$server_protocol\\n"; }} }}
    """)
    for host, port in ports.items():
        wait_for(f"{host} to listen", 30, lambda: port_answers(port))
    return ports


class Sandbox:
    def __init__(self, place, claims):
        self.place, self.claims = place, claims
        self.work = place.root / "work"
        shutil.copytree(HERE, self.work, ignore=shutil.ignore_patterns("servers.py", "__pycache__"))
        self.seen = b""

    def run(self, *argv, timeout=280):
        done = self.place.command(
            "exec", "--environment", "traffic", "--workspace", str(self.work), "--", *argv,
            timeout=timeout)
        self.seen += done.stdout + done.stderr
        return done

    def shell(self, script, **more):
        return self.run("sh", "-c", script, **more)

    def python(self, what, program, *arguments):
        """Runs a program that prints a line for each claim that holds."""
        done = self.run("env", "PYTHONPATH=/opt/traffic", PYTHON, program, *arguments)
        said = done.stdout.decode(errors="replace")
        for line in said.splitlines():
            if line.startswith("holds: "):
                self.claims.holds(f"{what}: {line.removeprefix('holds: ')}", True)
        self.claims.holds(f"{what}: to the end", done.returncode == 0 and "holds: " in said,
                          said + done.stderr.decode(errors="replace") + self.place.log("up")[-3000:])

    def says(self, claim, script, expected):
        done = self.shell(script)
        out = done.stdout.decode(errors="replace")
        holds = out == expected if isinstance(expected, str) else expected.search(out)
        self.claims.holds(claim, done.returncode == 0 and holds, f"{done.returncode}: {out!r}\n"
                          + done.stderr.decode(errors="replace") + self.place.log("up")[-3000:])
        return out


def with_curl(sandbox):
    url = f"https://{WEB}"
    for flag, version in [("--http1.0", "1.1"), ("--http1.1", "1.1"), ("--http2", "2")]:
        sandbox.says(f"curl {flag}", f"curl -sS {flag} -w '%{{http_version}}' {url}/hello", f"hello\n{version}")
    sandbox.says("curl HEAD keeps the length", f"curl -sS --http1.1 -I {url}/gib", re.compile(r"(?i)content-length: 1073741824"))
    sandbox.says("curl with Expect over HTTP/1.1",
                 f"head -c 10485760 /dev/zero | curl -sS --http1.1 -H 'Expect: 100-continue' -T - -H 'Content-Length: 10485760' "
                 f"-H 'Transfer-Encoding:' {url}/sink", "10485760\n")
    for flag in ["--http1.1", "--http2"]:
        sandbox.says(f"an early refusal of an upload arrives whole, curl {flag}",
                     f"head -c 5242880 /dev/zero > up; curl -sS {flag} -w '%{{http_code}}' -T up {url}/early",
                     "too much\n413")
    sandbox.says("targets and fields pass raw",
                 f"curl -sS --http1.1 --path-as-is -H 'X-Odd:  a  b' '{url}/headers?%2F;a=+&&%7e'", "||a  b|/headers?%2F;a=+&&%7e\n")
    sandbox.says("HTTP/2 by prior knowledge over plain HTTP, on both legs",
                 f"curl -sS --http2-prior-knowledge http://{PLAIN}/", "HTTP/2.0\n")
    sandbox.says("an upgrade to HTTP/2 is not taken, and the request is answered",
                 f"curl -sS --http2 -w '%{{http_version}}' http://{PLAIN}/ | tail -c 3", "1.1")


def with_node(sandbox):
    (sandbox.work / "fetch.mjs").write_text(f"""
        import http2 from 'http2';
        const got = await fetch('https://{WEB}/hello');
        console.log(got.status, (await got.text()).trim());
        const body = await (await fetch('https://{EVENTS}/upload',
          {{ method: 'POST', body: new Uint8Array(300000) }})).text();
        console.log(body);
        const client = http2.connect('https://{WEB}');
        const stream = client.request({{ ':path': '/hello' }});
        let text = '';
        for await (const piece of stream) text += piece;
        console.log('http2', text.trim());
        client.close();
    """)
    sandbox.says("node: fetch and http2", "node fetch.mjs", "200 hello\n300000 300000\nhttp2 hello\n")


def with_h2load(sandbox):
    out = sandbox.says("h2load: every request answered",
                       f"h2load -n 1000 -c 4 -m 20 https://{WEB}/hello", re.compile("1000 2xx, 0 3xx, 0 4xx, 0 5xx"))
    sandbox.claims.holds("h2load: none failed", "1000 succeeded, 0 failed, 0 errored" in out, out)


def large_bodies(sandbox, pid):
    before = peak(pid)
    for flag in ["--http1.1", "--http2"]:
        started = time.monotonic()
        sandbox.says(f"1 GiB down, curl {flag}", f"curl -sS {flag} https://{WEB}/gib | wc -c", f"{GIB}\n")
        print(f"   {GIB / 2**20 / (time.monotonic() - started):.0f} MiB/s down", flush=True)
        started = time.monotonic()
        sandbox.says(f"1 GiB up, curl {flag}",
                     f"truncate -s 1G /tmp/up && curl -sS {flag} -H Expect: -T /tmp/up https://{WEB}/sink", f"{GIB}\n")
        print(f"   {GIB / 2**20 / (time.monotonic() - started):.0f} MiB/s up", flush=True)
    grown = peak(pid) - before
    sandbox.claims.holds(f"4 GiB of bodies grew proxyd's peak by {grown >> 20} MiB", grown < 64 << 20)


def odd_requests(sandbox, place):
    """Whenever proxyd lets an odd request through, nginx sees the same requests in it."""
    done = sandbox.run(PYTHON, "odd.py", WEB)
    results = json.loads(done.stdout)
    logged = re.findall(r'"[A-Z]+ /odd/(\d+)/(\w+) ', (place.root / "nginx-access.log").read_text())
    accepted = 0
    for number, case, finals in results:
        seen = [what for n, what in logged if int(n) == number]
        passed = [what for what, status in zip(["first", "next"], finals) if status == 200]
        sandbox.claims.passed += 1
        accepted += bool(passed)
        # A body that turns out broken is refused when its head has reached nginx already.
        broken = finals == [400] and seen == ["first"]
        if not (seen == passed or broken) or not 0 < len(finals) <= 2:
            sandbox.claims.holds(f"nginx sees what proxyd passes on: {case!r}", False,
                                 f"answered {finals}, seen {seen}")
    sandbox.claims.holds(f"{len(results)} odd requests, {accepted} of them sound", 8 <= accepted <= 24)


with Place() as place:
    claims = Claims()
    ports = start_peers(place)
    place.cleanhands({"traffic": POLICY}, ports)
    place.store_secret("api", TOKEN)
    pid = proxyd_of(place.processes[-1][1].pid)
    sandbox = Sandbox(place, claims)

    with_curl(sandbox)
    sandbox.python("gRPC", "grpc_client.py", GRPC, WEB)
    sandbox.python("WebSocket", "websocket_client.py", SOCKET)
    sandbox.python("Python", "http_clients.py", WEB, EVENTS)
    with_node(sandbox)
    with_h2load(sandbox)
    odd_requests(sandbox, place)
    large_bodies(sandbox, pid)

    audit = place.command("audit", "--json").stdout
    claims.holds("the audit says why the messages were refused", audit.count(b"message_refused") >= 2)
    claims.holds("the token is in no output", TOKEN.encode() not in sandbox.seen)
    claims.close()

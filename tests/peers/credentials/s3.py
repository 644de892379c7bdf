"""S3 with AWS's command in a sandbox, against a server that others wrote (s3s-fs) and that checks every
signature: of requests, of each chunk of an upload, of trailers, of presigned addresses."""

import hashlib
import os
import pathlib
import subprocess
import sys

from support import Place, free_port, port_answers, wait_for

KEY_ID = "AKIAS3CANARY" + os.urandom(4).hex().upper()
SECRET = "S3-CANARY-" + os.urandom(15).hex()
POLICY = """
    [sandbox]
    tool-timeout = "3m"
    mounts = [
      {{ source = "{site}", target = "/opt/aws" }},
      {{ source = "{here}", target = "/opt/peers" }},
    ]
    [[egress.allow]]
    hosts = ["s3.example"]
    methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
    credential = "s3"
    addresses = ["127.0.0.1/32"]
    [credentials.s3]
    secret = "local:s3"
    inject = {{ aws-sigv4 = {{ regions = ["eu-central-1"], services = ["s3"] }} }}
    hosts = ["s3.example"]
    env = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
"""
COMMAND = """set -e
cd /tmp
aws() { PYTHONPATH=/opt/aws /usr/bin/python3 -m awscli --endpoint-url https://s3.example \\
    --region eu-central-1 "$@"; }
head -c 1024 /dev/urandom > small
head -c 20971520 /dev/urandom > large
aws s3 mb s3://box
aws s3 cp --no-progress small "s3://box/small one+1.txt"
aws s3 cp --no-progress large s3://box/parts/large.bin
aws s3 cp --no-progress "s3://box/small one+1.txt" small.back
aws s3 cp --no-progress s3://box/parts/large.bin large.back
cmp small small.back && cmp large large.back && echo "came back"
aws s3 ls --recursive s3://box/ | sed 's/^/listed /'
AWS_REQUEST_CHECKSUM_CALCULATION=when_required aws s3 cp --no-progress small s3://box/plain && echo "plain"
curl -sS "$(aws s3 presign s3://box/plain)" | cmp - small && echo "presigned"
aws s3 rm s3://box/plain && ! aws s3api head-object --bucket box --key plain 2>/dev/null && echo "removed"
"""
# The presigned address of a PUT is what the command cannot make.
PRESIGNED = """
import boto3, urllib.request
from botocore.config import Config
s3 = boto3.client("s3", region_name="eu-central-1", endpoint_url="https://s3.example",
                  config=Config(signature_version="s3v4", s3={"addressing_style": "path"}))
url = s3.generate_presigned_url("put_object", {"Bucket": "box", "Key": "put by address"})
urllib.request.urlopen(urllib.request.Request(url, b"by address", method="PUT"))
print("put", s3.get_object(Bucket="box", Key="put by address")["Body"].read().decode())
"""
WAYS = ["hash", "UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"]
SIZE = (1 << 20) + 4711


def server(place, program):
    """The server, and nginx with TLS before it; gives both ports."""
    kept = place.root / "s3"
    kept.mkdir()
    port = free_port()
    place.start("s3s-fs", [program, "--host", "127.0.0.1", "--port", str(port), "--access-key", KEY_ID,
                           "--secret-key", SECRET, str(kept)])
    wait_for("s3s-fs to listen", 30, lambda: port_answers(port))
    tls = place.nginx("s3.example", f"""
        client_max_body_size 0;
        location / {{ proxy_pass http://127.0.0.1:{port}; proxy_http_version 1.1;
          proxy_set_header Host $host; proxy_request_buffering off; }}""")
    return port, tls


def run(claims, site, program):
    here = pathlib.Path(__file__).resolve().parent
    with Place() as place:
        port, tls = server(place, program)
        place.cleanhands({"agents": POLICY.format(site=site, here=here)}, {"s3.example": tls})
        place.store_secret("s3", f"{KEY_ID}:{SECRET}")
        outputs = []

        def inside(*argv):
            done = place.command("exec", "--environment", "agents", "--", *argv, timeout=300)
            outputs.append((done.stdout + done.stderr).decode(errors="replace"))
            return outputs[-1], done.returncode == 0

        def direct(key_id, *arguments):
            keys = {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": SECRET}
            done = subprocess.run([sys.executable, str(here / "s3_upload.py"), f"http://127.0.0.1:{port}",
                                   *arguments], env={**os.environ, **keys}, capture_output=True, text=True)
            return done.stdout + done.stderr

        text, well = inside("bash", "-c", COMMAND)
        shown = text + place.log("up")[-3000:] + place.log("s3s-fs")[-3000:]
        lines = text.splitlines()
        claims.holds("AWS's command puts, lists and gets at a server that checks signatures",
                     well and "came back" in lines and "plain" in lines and "removed" in lines
                     and any(line.startswith("listed ") and line.endswith(" 20971520 parts/large.bin")
                             for line in lines), shown)
        claims.holds("under the names that it gave", (place.root / "s3/box/small one+1.txt").exists(), shown)
        claims.holds("a presigned address is signed again", "presigned" in lines, shown)
        text, well = inside("env", "PYTHONPATH=/opt/aws", "/usr/bin/python3", "-c", PRESIGNED)
        claims.holds("and that of an upload", well and "put by address" in text.splitlines(), text)
        wanted = hashlib.sha256((bytes(range(256)) * (SIZE // 256 + 1))[:SIZE]).hexdigest()
        for way in WAYS:
            text, _ = inside("/usr/bin/python3", "/opt/peers/s3_upload.py", "https://s3.example",
                             f"/box/{way}", way, str(SIZE))
            claims.holds(f"the server takes an upload by {way}", text.strip() == "200",
                         text + place.log("up")[-3000:] + place.log("s3s-fs")[-3000:])
            kept = (place.root / "s3/box" / way).read_bytes()
            claims.holds("and keeps the bytes that were sent", hashlib.sha256(kept).hexdigest() == wanted, way)
        for way in WAYS[2:]:
            taken = direct(KEY_ID, "/box/direct", way, str(SIZE))
            claims.holds(f"{way} is what the server wants of the key's owner", taken.strip() == "200", taken)
            refused = direct(KEY_ID, "/box/direct", way, str(SIZE), "spoil")
            claims.holds("one wrong signature among its chunks is refused there",
                         not refused.startswith("200"), refused)
        stranger = direct("AKIA" + "X" * 16, "/box/direct", "hash", "10")
        claims.holds("another key's signature is refused there", stranger.startswith("403"), stranger)
        found, read = place.files_holding([SECRET.encode()])
        ours = [path for path in found if "/run/" in path or "/state/" in path or "up.log" in path]
        claims.holds(f"the secret key is in none of the daemons' files ({read} read)", not ours and read > 10,
                     str(ours))
        claims.holds("nor in any output", not any(SECRET in text for text in outputs))

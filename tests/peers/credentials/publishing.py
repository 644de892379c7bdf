"""Packages published and installed from inside a sandbox by the tools that people use: npm at verdaccio, which
wants a token, twine and pip at pypiserver, which wants a password. The tools hold placeholders."""

import base64
import json
import os
import subprocess
import urllib.error
import urllib.request

from support import Place, free_port, port_answers, wait_for

PASSWORD = "PASSWORD-CANARY-" + os.urandom(12).hex()
POLICY = """
    [sandbox]
    tool-timeout = "3m"
    mounts = [{{ source = "{site}", target = "/opt/site" }}]
    [[egress.allow]]
    hosts = ["npm.example"]
    methods = ["GET", "HEAD", "PUT"]
    credential = "npm"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["python.example"]
    methods = ["GET", "HEAD", "POST"]
    credential = "python"
    addresses = ["127.0.0.1/32"]
    [credentials.npm]
    secret = "local:npm"
    inject = {{ bearer = true }}
    hosts = ["npm.example"]
    env = "NPM_TOKEN"
    [credentials.python]
    secret = "local:python"
    inject = {{ basic = "bot" }}
    hosts = ["python.example"]
    env = "TWINE_PASSWORD"
"""
NPM = """set -e
export npm_config_update_notifier=false npm_config_audit=false npm_config_fund=false
echo '//npm.example/:_authToken=${NPM_TOKEN}' > ~/.npmrc
echo 'registry=https://npm.example/' >> ~/.npmrc
case $NPM_TOKEN in npm_*) echo shaped;; esac
mkdir /tmp/p /tmp/q && cd /tmp/p
echo '{"name": "tiny-probe", "version": "1.0.0", "main": "index.js"}' > package.json
echo 'console.log("node-installed")' > index.js
echo "me $(npm whoami)"
npm publish
cd /tmp/q && echo '{"name": "user", "version": "1.0.0"}' > package.json
npm install tiny-probe
node -e 'require("tiny-probe")'
"""
TWINE = """set -e
cd /tmp && python3 - <<'END'
import os, zipfile
os.mkdir("dist")
info = "tiny_probe-1.0.0.dist-info"
files = {"tiny_probe.py": "print('python-installed')\\n",
         f"{info}/METADATA": "Metadata-Version: 2.1\\nName: tiny-probe\\nVersion: 1.0.0\\n",
         f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
files[f"{info}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{info}/RECORD"])
with zipfile.ZipFile("dist/tiny_probe-1.0.0-py3-none-any.whl", "w") as wheel:
    for name, text in files.items():
        wheel.writestr(name, text)
END
tool() { PYTHONPATH=/opt/site /usr/bin/python3 -m "$@"; }
tool twine upload --non-interactive --disable-progress-bar -u bot --repository-url https://python.example/ dist/*
tool pip install -q --disable-pip-version-check --no-cache-dir --index-url https://python.example/simple/ \\
    --target /tmp/t tiny-probe
PYTHONPATH=/tmp/t python3 -c 'import tiny_probe'
"""


def verdaccio(place, packages):
    """One that shows its packages to nobody without a token; gives its port and a token."""
    port = free_port()
    config = place.root / "verdaccio.yaml"
    # What is JSON is YAML.
    config.write_text(json.dumps({
        "storage": str(place.root / "verdaccio"), "uplinks": {}, "web": {"enable": False},
        "auth": {"htpasswd": {"file": str(place.root / "npm-users"), "max_users": 2}},
        "security": {"api": {"legacy": False, "jwt": {"sign": {"expiresIn": "1h"}}}},
        "packages": {"**": {"access": "$authenticated", "publish": "$authenticated"}},
        "log": {"type": "stdout", "format": "json", "level": "warn"},
    }))
    place.start("verdaccio", ["node", str(packages / "node_modules/verdaccio/bin/verdaccio"), "--listen",
                              f"127.0.0.1:{port}", "--config", str(config)],
                env={**os.environ, "HOME": str(place.root)})
    wait_for("verdaccio to listen", 60, lambda: port_answers(port))
    user = {"name": "bot", "password": PASSWORD}
    ask = urllib.request.Request(f"http://127.0.0.1:{port}/-/user/org.couchdb.user:bot", json.dumps(user).encode(),
                                 {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(ask, timeout=60) as answer:
        return port, json.load(answer)["token"]


def pypiserver(place, packages):
    port, kept = free_port(), place.root / "wheels"
    kept.mkdir()
    users = subprocess.run(["htpasswd", "-nim", "bot"], input=PASSWORD.encode(), check=True, capture_output=True)
    (place.root / "python-users").write_bytes(users.stdout)
    place.start("pypiserver", [str(packages / "venv/bin/pypi-server"), "run", "-i", "127.0.0.1", "-p", str(port),
                               "-P", str(place.root / "python-users"), "-a", "update,download,list", str(kept)])
    wait_for("pypiserver to listen", 60, lambda: port_answers(port))
    return port


def status(url):
    try:
        return urllib.request.urlopen(url, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def servers(place, table):
    ports, blocks = {host: free_port() for host in table}, ""
    for host, port in ports.items():
        certificate, key = place.certificate(host)
        blocks += f"""
          server {{ listen 127.0.0.1:{port} ssl; server_name {host}; client_max_body_size 0;
            ssl_certificate {certificate}; ssl_certificate_key {key};
            location / {{ proxy_pass http://127.0.0.1:{table[host]}; proxy_http_version 1.1;
              proxy_set_header Host $host; proxy_set_header X-Forwarded-Proto https;
              proxy_request_buffering off; }} }}"""
    place.nginx("unused.example", "", before=blocks)
    return ports


def run(claims, packages, site):
    with Place() as place:
        npm_port, token = verdaccio(place, packages)
        python_port = pypiserver(place, packages)
        ports = servers(place, {"npm.example": npm_port, "python.example": python_port})
        place.cleanhands({"agents": POLICY.format(site=site)}, ports)
        place.store_secret("npm", token)
        place.store_secret("python", PASSWORD)
        outputs = []

        def inside(script):
            done = place.command("exec", "--environment", "agents", "--", "bash", "-c", script, timeout=300)
            outputs.append((done.stdout + done.stderr).decode(errors="replace"))
            return outputs[-1], done.returncode == 0

        text, well = inside(NPM)
        shown = text + place.log("up")[-3000:] + place.log("verdaccio")[-3000:]
        claims.holds("npm with a placeholder publishes at verdaccio and installs from there",
                     well and "node-installed" in text and "me bot" in text, shown)
        claims.holds("the placeholder has the shape that npm's tokens have", "shaped" in text.splitlines(), text)
        claims.holds("verdaccio gives nothing to who has no token",
                     status(f"http://127.0.0.1:{npm_port}/tiny-probe") == 401)
        text, well = inside(TWINE)
        shown = text + place.log("up")[-3000:] + place.log("pypiserver")[-3000:]
        claims.holds("twine uploads to pypiserver, and pip, which knows of no password, installs from there",
                     well and "python-installed" in text, shown)
        claims.holds("pypiserver gives nothing to who has no password",
                     status(f"http://127.0.0.1:{python_port}/simple/") == 401)
        needles = [PASSWORD, token, base64.b64encode(f"bot:{PASSWORD}".encode()).decode()]
        found, read = place.files_holding([needle.encode() for needle in needles])
        ours = [path for path in found if "/run/" in path or "/state/" in path or "up.log" in path]
        claims.holds(f"no token and no password of a registry is in the daemons' files ({read} read)",
                     not ours and read > 10, str(ours))
        claims.holds("nor in any output", not any(n in text for n in needles for text in outputs))

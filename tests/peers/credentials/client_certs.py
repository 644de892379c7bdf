"""Client certificates shown to nginx, which asks for them: by TLS 1.2 and 1.3, RSA and P-256, over HTTP/1.1
and HTTP/2, for curl and Python in a sandbox that knows nothing of it."""

import subprocess

import secrecy
from support import Place, free_port

ADDRESSES = 'addresses = ["127.0.0.1/32"]'
# What nginx knows of each connection's client.
SHOWN = "return 200 '$ssl_client_verify $ssl_client_s_dn $ssl_protocol $server_protocol\\n';"
HOSTS = {
    "old.example": ("corp-rsa", "TLSv1.2", "on"),
    "new.example": ("corp-ec", "TLSv1.3", "on"),
    "plain.example": (None, "TLSv1.3", "optional"),
    "closed.example": (None, "TLSv1.3", "on"),
}
RULES = "".join(f"""
    [[egress.allow]]
    hosts = ["{host}"]
    methods = ["GET"]
    {f'credential = "{credential}"' if credential else ""}
    {ADDRESSES}
""" for host, (credential, *_) in HOSTS.items())
POLICY = RULES + "".join(f"""
    [credentials.{credential}]
    secret = "local:{credential}"
    inject = {{ client-certificate = true }}
    hosts = ["{host}"]
""" for host, (credential, *_) in HOSTS.items() if credential)
PYTHON = """import http.client, sys
client = http.client.HTTPSConnection(sys.argv[1])
client.request("GET", "/")
print(client.getresponse().read().decode(), end="")"""


class Clients:
    """A CA for clients, and certificates of it."""

    def __init__(self, directory):
        self.directory = directory
        self.ca, self.key = self.files("clients")
        openssl("req", "-x509", *self.fresh("ec"), "-keyout", self.key, "-out", self.ca, "-days", "2",
                "-subj", "/CN=Clients")

    def files(self, name):
        return self.directory / f"{name}.crt", self.directory / f"{name}.key"

    def fresh(self, kind):
        ec = ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        return ["-newkey", *(ec if kind == "ec" else ["rsa:2048"]), "-nodes"]

    def issue(self, name, kind):
        """The certificate with its key, in one text, as many scripts make them: RSA in version 1, the key in
        the older of its two forms."""
        certificate, key = self.files(name)
        request = self.directory / f"{name}.req"
        openssl("req", *self.fresh(kind), "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions = self.directory / f"{name}.ext"
        extensions.write_text("basicConstraints=CA:FALSE\nextendedKeyUsage=clientAuth\n")
        # Without extensions it is one of version 1.
        more = ["-extfile", extensions] if kind == "ec" else []
        openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.key, "-CAcreateserial",
                "-days", "2", *more, "-out", certificate)
        old = openssl("pkey", "-in", key, "-traditional").stdout.decode()
        return certificate.read_text() + old


def openssl(*arguments):
    return subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def nginx(place, clients):
    ports = {host: free_port() for host in HOSTS}
    blocks = ""
    for host, (_, protocol, verify) in HOSTS.items():
        certificate, key = place.certificate(host)
        blocks += f"""
          server {{ listen 127.0.0.1:{ports[host]} ssl http2; server_name {host};
            ssl_certificate {certificate}; ssl_certificate_key {key}; ssl_protocols {protocol};
            ssl_client_certificate {clients.ca}; ssl_verify_client {verify};
            location / {{ {SHOWN} }} }}"""
    place.nginx("unused.example", "", before=blocks)
    return ports


def run(claims):
    with Place() as place:
        clients = Clients(place.root)
        ports = nginx(place, clients)
        place.cleanhands({"agents": POLICY}, ports)
        pairs = {"corp-rsa": clients.issue("agent-rsa", "rsa"), "corp-ec": clients.issue("agent-ec", "ec")}
        for name, pair in pairs.items():
            place.store_secret(name, pair)
        inside = lambda *argv: place.command("exec", "--environment", "agents", "--", *argv, timeout=180)
        outputs = []

        def got(*argv):
            done = inside(*argv)
            outputs.append((done.stdout + done.stderr).decode(errors="replace"))
            return outputs[-1].strip()

        for host, name, tls in (("old.example", "agent-rsa", "TLSv1.2"), ("new.example", "agent-ec", "TLSv1.3")):
            for version, spoken in (("--http1.1", "HTTP/1.1"), ("--http2", "HTTP/2.0")):
                text = got("curl", "-sS", version, f"https://{host}/")
                claims.holds(f"nginx knows curl in a sandbox by its certificate, over {tls} and {spoken}",
                             text == f"SUCCESS CN={name} {tls} {spoken}", text + place.log("up")[-3000:])
            text = got("/usr/bin/python3", "-c", PYTHON, host)
            claims.holds(f"and Python over {tls}", text == f"SUCCESS CN={name} {tls} HTTP/1.1", text)
        text = got("curl", "-sS", "https://plain.example/")
        claims.holds("a host of no credential that would take one is shown none", text.startswith("NONE "), text)
        text = got("curl", "-sS", "https://closed.example/")
        claims.holds("one that demands one answers so itself", "No required SSL certificate" in text, text)

        place.store_secret("corp-ec", clients.issue("agent-next", "ec"))
        text = got("curl", "-sS", "https://new.example/")
        claims.holds("a certificate that was replaced is shown from the next request on",
                     text.startswith("SUCCESS CN=agent-next "), text)
        foreign = (place.root / "foreign")
        foreign.mkdir()
        place.store_secret("corp-ec", Clients(foreign).issue("stranger", "ec"))
        text = got("curl", "-sS", "https://new.example/")
        claims.holds("nginx's refusal of a stranger's certificate is passed on", "SSL certificate error" in text, text)
        swapped = pairs["corp-rsa"].split("-----BEGIN RSA")[0] + pairs["corp-ec"][pairs["corp-ec"].index("-----BEGIN EC"):]
        refused = place.command("secret", "set", "corp-rsa", stdin=swapped.encode())
        claims.holds("a key of another certificate is refused when it is stored, and says so",
                     refused.returncode and b"does not belong to its first certificate" in refused.stderr,
                     refused.stderr.decode())
        many = got("bash", "-c", "for i in $(seq 30); do curl -sS --cacert $NODE_EXTRA_CA_CERTS -o /dev/null "
                   "-w '%{http_code}\\n' https://old.example/ & done; wait")
        claims.holds("thirty at once all pass", many.split() == ["200"] * 30, many + place.log("up")[-3000:])

        lines = [line for pair in pairs.values() for line in pair[pair.rindex("-----BEGIN"):].splitlines()[1:-1]]
        claims.holds("no line of a key is in any output", not any(line in text for line in lines for text in outputs))
        place.store_secret("corp-ec", pairs["corp-ec"])
        again = lambda: claims.holds("both certificates serve after a restart", all(
            got("curl", "-sS", f"https://{host}/").startswith("SUCCESS ") for host in ("old.example", "new.example")))
        secrecy.check(claims, "client certificates", place, again)

"""The ways out and in, with proxies and clients of others: squid and tinyproxy between proxyd and its
upstreams; curl, wget, Python and Java with nothing but what a lease prints.
"""

import base64
import contextlib
import http.server
import json
import os
import pathlib
import pwd
import shutil
import ssl
import subprocess
import sys
import threading

from support import COMMAND, Claims, Place, free_port, port_answers, wait_for

TOKEN = "SECRET-CANARY-ways-" + os.urandom(12).hex()
PASSWORD = "SECRET-CANARY-proxy-" + os.urandom(12).hex()
JAVA = """
    import java.io.*; import java.net.*;
    public class Get {
      public static void main(String[] a) throws Exception {
        String token = System.getenv("LEASE_TOKEN");
        Authenticator.setDefault(new Authenticator() {
          protected PasswordAuthentication getPasswordAuthentication() {
            return new PasswordAuthentication("lease", token.toCharArray());
          }
        });
        InputStream in = new URI(a[0]).toURL().openStream();
        System.out.print(new String(in.readAllBytes()));
      }
    }
"""


class Origin(http.server.BaseHTTPRequestHandler):
    """Answers with what it was asked and by whom, if the right token came."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.server.open
        leaked = "leaked" if self.headers.get("Proxy-Authorization") else "clean"
        body = f"{'welcome' if known else 'who?'} {self.path} {self.headers['Host']} {leaked}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve(place, host=None):
    """An origin on a port of its own, with TLS for `host` if there is one; gives the port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Origin)
    server.open = host is None
    if host:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*place.certificate(host))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def squid(place, hosts):
    """squid that knows one user, forbids one host, and takes names from a file of its own."""
    folder, port = place.root / "squid", free_port()
    folder.mkdir(mode=0o700)
    hashed = subprocess.run(["openssl", "passwd", "-apr1", "-stdin"], input=PASSWORD, text=True,
                            check=True, capture_output=True).stdout.strip()
    (folder / "users").write_text(f"svc:{hashed}\n")
    (folder / "hosts").write_text("".join(f"127.0.0.1 {host}\n" for host in hosts))
    helper = next(p for p in ("/usr/lib/squid/basic_ncsa_auth", "/usr/lib64/squid/basic_ncsa_auth")
                  if os.path.exists(p))
    (folder / "squid.conf").write_text(f"""
http_port 127.0.0.1:{port}
pid_filename {folder}/pid
cache deny all
access_log stdio:{folder}/access.log
cache_log {folder}/cache.log
coredump_dir {folder}
hosts_file {folder}/hosts
pinger_enable off
shutdown_lifetime 1 seconds
auth_param basic program {helper} {folder}/users
auth_param basic realm corporate
acl known proxy_auth REQUIRED
acl forbidden dstdomain forbidden.example
http_access deny forbidden
http_access allow known
http_access deny all
""")
    if os.getuid() == 0:
        # squid gives root up for a user of its own, who must come to its files.
        user = pwd.getpwnam("proxy")
        place.root.chmod(0o711)
        for path in (folder, *folder.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
    program = shutil.which("squid") or "/usr/sbin/squid"
    place.start("squid", [program, "-N", "-f", str(folder / "squid.conf")])
    wait_for("squid to listen", 30, lambda: port_answers(port))
    return port, folder / "access.log"


def tinyproxy(place):
    """tinyproxy with Basic authentication; gives the port."""
    port, config = free_port(), place.root / "tinyproxy.conf"
    config.write_text(f"Port {port}\nListen 127.0.0.1\nAllow 127.0.0.1\nBasicAuth svc {PASSWORD}\n"
                      f"LogLevel Info\n")
    config.chmod(0o600)
    user = [f"User {pwd.getpwuid(os.getuid()).pw_name}\n"] if os.getuid() == 0 else []
    config.write_text(config.read_text() + "".join(user))
    program = shutil.which("tinyproxy") or "/usr/sbin/tinyproxy"
    place.start("tinyproxy", [program, "-d", "-c", str(config)])
    wait_for("tinyproxy to listen", 15, lambda: port_answers(port))
    return port


def out(done):
    return (done.stdout + done.stderr).decode(errors="replace")


def error(done):
    """What a denial says, as the client printed it."""
    with contextlib.suppress(ValueError):
        return json.loads(done.stdout)["error"]
    return {"code": None, "reason": out(done), "hint": None}


def ways_out(place, claims, ports, squid_log):
    inside = lambda *url: place.command("exec", "--environment", "dev", "--", "curl", "-sS", *url)
    api = f"https://api.example:{ports['api']}/a?b=c"

    without = error(inside(api))
    claims.holds("a proxy's password that is not in the vault is asked for by name",
                 without["code"] == "upstream_proxy" and "secret set corp" in (without["hint"] or ""),
                 str(without))
    place.store_secret("corp", "not-the-password-at-all")
    wrong = error(inside(api))
    claims.holds("a password that squid does not accept is said so in words",
                 wrong["code"] == "upstream_proxy" and "407" in wrong["reason"], str(wrong))
    place.store_secret("corp", PASSWORD)
    https = inside(api)
    claims.holds("https goes through squid by name, with its password and the credential inside",
                 https.stdout == f"welcome /a?b=c api.example:{ports['api']} clean\n".encode(), out(https))
    log = squid_log.read_text()
    claims.holds("squid saw a CONNECT with the verified name from the user it knows",
                 any(f"CONNECT api.example:{ports['api']} svc " in line for line in log.splitlines()), log)
    h2 = inside("--http2", api)
    claims.holds("a client's HTTP/2 goes the same way", h2.stdout == https.stdout, out(h2))
    plain = inside(f"http://plain.example:{ports['plain']}/p?q")
    claims.holds("plain http goes through squid as a whole request, without proxyd's password behind it",
                 plain.stdout == f"welcome /p?q plain.example:{ports['plain']} clean\n".encode(), out(plain))
    claims.holds("squid saw the whole URI",
                 f"GET http://plain.example:{ports['plain']}/p" in squid_log.read_text())
    denied = inside("https://forbidden.example:8443/")
    told = error(denied)
    claims.holds("what squid forbids is told in proxyd's words, without squid's page",
                 told["code"] == "upstream_proxy" and "403" in told["reason"] and b"<" not in denied.stdout,
                 out(denied))
    tunnel = place.command("exec", "--environment", "dev", "--", "curl", "-sSk",
                           f"https://tunnel.example:{ports['tunnel']}/t")
    claims.holds("a host that is passed on unread goes through squid too",
                 tunnel.stdout.startswith(b"who? /t tunnel.example"), out(tunnel))
    tiny = inside(f"https://tiny.example:{ports['tiny']}/t")
    claims.holds("a host with a proxy of its own goes through tinyproxy, to the address that was judged",
                 tiny.stdout.startswith(b"welcome /t tiny.example"), out(tiny))
    claims.holds("tinyproxy saw that address", f"127.0.0.1:{ports['tiny']}" in place.log("tinyproxy"),
                 place.log("tinyproxy"))
    unlisted = error(inside("https://unlisted.example/"))
    claims.holds("policy decides before any proxy is asked",
                 unlisted["code"] == "host_not_listed" and "unlisted" not in squid_log.read_text(), str(unlisted))


def ways_in(place, claims, ports):
    url = f"https://api.example:{ports['api']}/in"
    welcome = f"welcome /in api.example:{ports['api']} clean".encode()
    under = lambda *argv: place.command("lease", "open", "dev", "--", *argv)
    clients = {
        "curl": ["curl", "-sS", url],
        # No variable tells wget whom to trust.
        "wget": ["sh", "-c", f'wget -qO- --ca-certificate="$SSL_CERT_FILE" {url}'],
        "Python's urllib": ["python3", "-c", f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"],
    }
    for name, argv in clients.items():
        done = under(*argv)
        claims.holds(f"{name} works with the variables of a lease", welcome in done.stdout, out(done))
    evil = "https://evil.example"
    refused = {
        "git by its own error line": ["git", "ls-remote", f"{evil}/acme/widget.git"],
        "wget, which prints no body,": ["sh", "-c", f'wget -O- --ca-certificate="$SSL_CERT_FILE" {evil}/'],
        "pip": [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(place.root), f"{evil}/a-1-py3-none-any.whl"],
        "npm": ["npm", "view", "left-pad", f"--registry={evil}/", "--fetch-retries=0", f"--cache={place.root}/npm"],
        "cargo": ["cargo", "search", "--index", f"sparse+{evil}/index/", "serde"],
    }
    for name, argv in refused.items():
        if not shutil.which(argv[0]):
            print(f"left out: {argv[0]} is not here", flush=True)
            continue
        done = under(*argv)
        claims.holds(f"{name} prints why it is refused",
                     done.returncode != 0 and "does not list evil.example" in out(done), out(done))

    source = place.root / "Get.java"
    source.write_text(JAVA)
    held = subprocess.Popen([COMMAND, "lease", "--runtime-dir", str(place.root / "run"), "open", "dev", "--json"],
                            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        said = json.loads(held.stdout.readline())
        environment = {"PATH": os.environ["PATH"], "LEASE_TOKEN": said["token"]}
        java = subprocess.run(["java", *said["java"], str(source), url], env=environment,
                              capture_output=True, timeout=120)
        claims.holds("Java works with the options that a lease prints", welcome in java.stdout, out(java))
    finally:
        held.terminate()
        held.wait()
    claims.holds("the files of a lease go with it", not pathlib.Path(said["ca"]).exists())


def main():
    claims = Claims()
    with Place() as place:
        ports = {name: serve(place, f"{name}.example") for name in ("api", "tiny", "tunnel")}
        ports["plain"] = serve(place)
        squid_port, squid_log = squid(place, ["api.example", "plain.example", "tunnel.example"])
        tiny_port = tinyproxy(place)
        secret = place.root / "tiny-password"
        secret.write_text(PASSWORD + "\n")
        secret.chmod(0o600)
        table = f"""
[upstream-proxy]
url = "http://127.0.0.1:{squid_port}"
resolve = "proxy"
user = "svc"
password = "local:corp"
[upstreams."api.example"]
ca = "{place.root}/ca.pem"
[upstreams."tiny.example"]
ca = "{place.root}/ca.pem"
dial = "127.0.0.1:{ports['tiny']}"
proxy = {{ url = "http://127.0.0.1:{tiny_port}", resolve = "here", user = "svc", password = "file:{secret}" }}
"""
        policy = f"""
            [sandbox]
            root = "host"
            [[egress.allow]]
            hosts = ["api.example"]
            ports = [{ports['api']}]
            credential = "api"
            [[egress.allow]]
            hosts = ["tiny.example"]
            ports = [{ports['tiny']}]
            credential = "api"
            addresses = ["127.0.0.1/32"]
            [[egress.allow]]
            hosts = ["plain.example"]
            ports = [{ports['plain']}]
            plaintext = true
            methods = ["GET"]
            [[egress.allow]]
            hosts = ["tunnel.example"]
            ports = [{ports['tunnel']}]
            [[egress.allow]]
            hosts = ["forbidden.example"]
            ports = [8443]
            methods = ["GET"]
            [credentials.api]
            secret = "local:api"
            inject = {{ bearer = true }}
            hosts = ["api.example", "tiny.example"]
        """
        place.cleanhands({"dev": policy}, {}, proxyd=table)
        place.store_secret("api", TOKEN)
        ways_out(place, claims, ports, squid_log)
        ways_in(place, claims, ports)

        secret.unlink()
        (place.root / "tinyproxy.conf").unlink()
        login = base64.b64encode(f"svc:{PASSWORD}".encode())
        found, read = place.files_holding([TOKEN.encode(), PASSWORD.encode(), login])
        claims.holds(f"neither token nor password is in any of {read} files", not found and read > 10, str(found))
        audit = place.command("audit", "--json").stdout
        claims.holds("the audit says which way a request went",
                     f"via 127.0.0.1:{squid_port}".encode() in audit and PASSWORD.encode() not in audit,
                     audit.decode()[:2000])
    claims.close()


main()

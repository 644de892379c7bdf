"""An OpenBao server as others ship it, with a role for proxyd."""

import json
import os
import urllib.error
import urllib.request

from support import free_port, port_answers, wait_for


class Bao:
    """The server, and an application's role whose tokens may do what `policy` says."""

    def __init__(self, place, packages, policy, token_ttl, token_max_ttl):
        self.port = free_port()
        self.root = "ROOT-CANARY-" + os.urandom(12).hex()
        # It writes nothing but its log; the home is for its client's leftovers.
        home = place.root / "bao-home"
        home.mkdir()
        place.start("bao", [str(packages / "venv/bin/bao"), "server", "-dev", "-dev-no-store-token",
                            f"-dev-root-token-id={self.root}", f"-dev-listen-address=127.0.0.1:{self.port}"],
                    env={**os.environ, "HOME": str(home)})
        wait_for("OpenBao to serve", 60, lambda: port_answers(self.port) and self.ready())
        self.ask("PUT", "sys/policies/acl/proxyd", {"policy": policy})
        self.ask("POST", "sys/auth/approle", {"type": "approle"})
        self.ask("POST", "auth/approle/role/proxyd",
                 {"token_policies": "proxyd", "token_ttl": token_ttl, "token_max_ttl": token_max_ttl})
        self.role = self.ask("GET", "auth/approle/role/proxyd/role-id")["data"]["role_id"]
        self.secret = self.ask("POST", "auth/approle/role/proxyd/secret-id", {})["data"]["secret_id"]

    def ask(self, method, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/{path}", None if body is None else json.dumps(body).encode(),
            {"X-Vault-Token": self.root, "Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"{}")

    def ready(self):
        try:
            return self.ask("GET", "sys/mounts")
        except (urllib.error.URLError, OSError):
            return None

    def accessors(self):
        return self.ask("LIST", "auth/token/accessors")["data"]["keys"]

    def configuration(self, more=""):
        """What proxyd.toml says of it; the secret is stored as `bao-secret-id`."""
        return f"""
[openbao]
url = "https://bao.example"
{more}
login = {{ method = "approle", role = "{self.role}", secret = "local:bao-secret-id" }}
"""

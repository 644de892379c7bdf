"""git's own client in a sandbox, git's own server behind TLS and Basic: the token is injected."""

import base64
import os
import shutil
import subprocess

from support import Claims, Place, wait_for

HOST = "git.example"
TOKEN = "ghs_SECRET-CANARY-git-" + os.urandom(12).hex()
POLICY = """
    description = "Work on one repository, with push, and read another"
    [[egress.allow]]
    hosts = ["git.example"]
    git = { repositories = ["acme/widget"], push = true }
    credential = "git"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["git.example"]
    git = { repositories = ["acme/readonly"], push = false }
    credential = "git"
    addresses = ["127.0.0.1/32"]
    [credentials.git]
    secret = "local:git"
    inject = { basic = { user = "x-access-token" } }
    hosts = ["git.example"]
"""
INSIDE = """
    set -e
    git config --global user.email agent@example.invalid
    git config --global user.name agent
    git clone -q https://git.example/acme/widget.git w
    cd w
    cat seed.txt
    head -c 3000000 /dev/urandom > big.bin
    git add big.bin && git commit -q -m "three megabytes"
    git push -q origin HEAD:main
    git ls-remote origin main
"""


def repository(root, name):
    path = root / "repos" / "acme" / name
    run = lambda *a: subprocess.run(["git", "-c", "safe.directory=*", *a], check=True, capture_output=True)
    run("init", "-q", "--bare", "-b", "main", str(path))
    run("-C", str(path), "config", "http.receivepack", "true")
    seed = root / f"seed-{name}"
    run("init", "-q", "-b", "main", str(seed))
    (seed / "seed.txt").write_text("seed line\n")
    run("-C", str(seed), "add", ".")
    run("-C", str(seed), "-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "seed")
    run("-C", str(seed), "push", "-q", str(path), "main")
    return path


with Place() as place:
    claims = Claims()
    root = place.root
    widget = repository(root, "widget.git")
    repository(root, "readonly.git")
    users = root / "htpasswd"
    htpasswd = shutil.which("htpasswd")
    subprocess.run([htpasswd, "-bc", str(users), "x-access-token", TOKEN], check=True, capture_output=True)
    users_only = {"HOME": str(root), "PATH": os.environ["PATH"], "GIT_CONFIG_COUNT": "1",
                  "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    program = shutil.which("fcgiwrap") or "/usr/sbin/fcgiwrap"
    place.start("fcgiwrap", [program, "-c", "2", "-s", f"unix:{root}/fcgi.sock"], env=users_only)
    wait_for("fcgiwrap's socket", 10, (root / "fcgi.sock").exists)
    backend = subprocess.run(["git", "--exec-path"], check=True, capture_output=True, text=True).stdout.strip()
    port = place.nginx(HOST, f"""
        location ~ ^/.*\\.git/ {{
          auth_basic "git"; auth_basic_user_file {users};
          client_max_body_size 0; fastcgi_request_buffering off;
          fastcgi_pass unix:{root}/fcgi.sock; include /etc/nginx/fastcgi_params;
          fastcgi_param SCRIPT_FILENAME {backend}/git-http-backend;
          fastcgi_param GIT_PROJECT_ROOT {root}/repos; fastcgi_param GIT_HTTP_EXPORT_ALL "";
          fastcgi_param PATH_INFO $uri; fastcgi_param REMOTE_USER $remote_user;
          fastcgi_param GIT_PROTOCOL $http_git_protocol;
          fastcgi_param HTTP_CONTENT_ENCODING $http_content_encoding;
        }}
    """)
    place.cleanhands({"git": POLICY}, {HOST: port})
    place.store_secret("git", TOKEN)

    inside = place.command("exec", "--environment", "git", "--", "bash", "-c", INSIDE)
    shown = (inside.stdout + inside.stderr).decode(errors="replace") + place.log("up")
    claims.holds("clone, commit and push from inside a sandbox work with no token inside",
                 inside.returncode == 0 and b"seed line" in inside.stdout, shown)
    head = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(widget), "rev-parse", "main"],
                          check=True, capture_output=True).stdout.strip()
    claims.holds("the server has the pushed commit", head and head in inside.stdout, shown)

    refused = place.command(
        "exec", "--environment", "git", "--", "bash", "-c",
        "git clone -q https://git.example/acme/readonly.git r && cd r && echo x > x && git add x && "
        "git -c user.name=a -c user.email=a@example.invalid commit -qm x && git push origin HEAD:main")
    said = (refused.stdout + refused.stderr).decode(errors="replace")
    claims.holds("a push to a repository that may only be read is refused, and git shows why",
                 refused.returncode != 0 and "push" in said, said)
    other = place.command("exec", "--environment", "git", "--", "git", "clone",
                          "https://git.example/acme/other.git")
    claims.holds("a repository that no rule names is refused", other.returncode != 0,
                 (other.stdout + other.stderr).decode(errors="replace"))

    needles = [TOKEN.encode(), base64.b64encode(f"x-access-token:{TOKEN}".encode())]
    seen = inside.stdout + inside.stderr + refused.stdout + refused.stderr
    claims.holds("the token is in no output", not any(n in seen for n in needles))
    found, read = place.files_holding(needles)
    claims.holds(f"the token is in none of {read} files", not found and read > 10, str(found))
    audit = place.command("audit", "--json").stdout
    claims.holds("the audit names the credential", b'"credential":"git"' in audit.replace(b": ", b":"),
                 audit.decode()[:2000])
    claims.close()

"""git's own client in a sandbox, git's own server behind TLS and Basic: the token is injected."""

import base64
import os
import pathlib
import shutil
import subprocess
import sys

from support import Claims, Place, free_port, port_answers, wait_for

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
    [[egress.allow]]
    hosts = ["lfs.example"]
    methods = ["GET", "POST"]
    paths = ["/acme/widget.git/info/lfs/**"]
    credential = "lfs"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["objects.example"]
    methods = ["GET", "PUT"]
    paths = ["/store/**"]
    addresses = ["127.0.0.1/32"]
    [credentials.lfs]
    secret = "local:git"
    inject = { basic = { user = "x-access-token" } }
    hosts = ["lfs.example"]
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

# The rest of what git does over HTTP: each step must succeed, and prints what the test looks at.
MORE = """
    set -e
    git config --global user.email agent@example.invalid
    git config --global user.name agent
    cd /tmp
    git clone -q --depth 1 https://git.example/acme/widget.git shallow
    echo "shallow $(git -C shallow rev-list --count HEAD)"
    git -C shallow fetch -q --unshallow
    echo "unshallowed $(git -C shallow rev-list --count HEAD)"
    git clone -q --filter=blob:none --no-checkout https://git.example/acme/widget.git partial
    cd partial
    echo "missing $(git rev-list --objects --all --missing=print | grep -c '^?')"
    git checkout -q main
    cat seed.txt
    git tag -a v1 -m one && git push -q origin v1
    git tag light && git push -q --tags origin
    git checkout -q -b topic && echo a > topic && git add topic && git commit -qm a
    git push -q -u origin topic
    git commit -q --amend -m b
    if git push -q origin topic 2>/dev/null; then echo "not forced, and taken"; fi
    git push -q --force origin topic
    git push -q --force-with-lease origin topic
    echo "forced $(git ls-remote origin topic | cut -f1) $(git rev-parse HEAD)"
    git push -q origin --delete topic
    echo "deleted $(git ls-remote origin topic | wc -l)"
    git fetch -q --prune --tags
    git ls-remote --tags origin | cut -f2
    git bundle create -q /tmp/all.bundle --all && git -C /tmp/shallow fetch -q origin --depth 1
    echo end
"""
LFS = """
    set -e
    git config --global user.email agent@example.invalid
    git config --global user.name agent
    git lfs install --skip-repo >/dev/null
    cd /tmp
    git clone -q https://git.example/acme/widget.git w
    cd w
    git config -f .lfsconfig lfs.url https://lfs.example/acme/widget.git/info/lfs
    git config lfs.locksverify false
    git lfs track '*.bin' >/dev/null
    head -c 10485760 /dev/urandom > large.bin
    git add . && git commit -qm "ten megabytes aside" && git push -q origin HEAD:main
    cd .. && git clone -q https://git.example/acme/widget.git again
    cmp w/large.bin again/large.bin && echo "the object arrived"
"""


def repository(root, name):
    path = root / "repos" / "acme" / name
    run = lambda *a: subprocess.run(["git", "-c", "safe.directory=*", *a], check=True, capture_output=True)
    run("init", "-q", "--bare", "-b", "main", str(path))
    run("-C", str(path), "config", "http.receivepack", "true")
    run("-C", str(path), "config", "uploadpack.allowFilter", "true")
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
    lfs, objects = free_port(), free_port()
    (root / "objects").mkdir()
    server = pathlib.Path(__file__).resolve().parent / "lfs_server.py"
    place.start("lfs", [sys.executable, str(server), str(lfs), *place.certificate("lfs.example"), str(objects),
                        *place.certificate("objects.example"), f"x-access-token:{TOKEN}", str(root / "objects")])
    wait_for("the LFS server to listen", 15, lambda: port_answers(lfs) and port_answers(objects))
    place.cleanhands({"git": POLICY}, {HOST: port, "lfs.example": lfs, "objects.example": objects})
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

    more = place.command("exec", "--environment", "git", "--", "bash", "-c", MORE)
    told = (more.stdout + more.stderr).decode(errors="replace")
    lines = more.stdout.decode().split("\n")
    claims.holds("shallow and partial clones, forced pushes, tags and deletions work", more.returncode == 0
                 and "end" in lines, told)
    words = {line.split(" ")[0]: line.split(" ")[1:] for line in lines if line}
    claims.holds("a shallow clone holds one commit until it asks for more",
                 words["shallow"] == ["1"] and int(words["unshallowed"][0]) > 1, told)
    claims.holds("a partial clone fetches what it lacks when it needs it",
                 int(words["missing"][0]) > 0 and "seed line" in lines, told)
    claims.holds("only the forced push replaced the branch",
                 "not forced, and taken" not in told and words["forced"][0] == words["forced"][1], told)
    claims.holds("tags were pushed and the branch is gone", {"refs/tags/v1", "refs/tags/light"} <= set(lines)
                 and words["deleted"] == ["0"], told)
    large = place.command("exec", "--environment", "git", "--", "bash", "-c", LFS)
    told = (large.stdout + large.stderr).decode(errors="replace")
    claims.holds("an LFS object on another host arrives both ways, and no credential goes there",
                 large.returncode == 0 and b"the object arrived" in large.stdout, told + place.log("up")[-3000:])
    denied = place.command("exec", "--environment", "git", "--", "bash", "-c",
                           LFS.replace("https://lfs.example/acme", "https://lfs.example/other"))
    said = (denied.stdout + denied.stderr).decode(errors="replace")
    claims.holds("LFS that no rule names fails with the reason", denied.returncode != 0
                 and "not_listed" in said, said)

    needles = [TOKEN.encode(), base64.b64encode(f"x-access-token:{TOKEN}".encode())]
    seen = b"".join(done.stdout + done.stderr for done in (inside, refused, more, large, denied))
    claims.holds("the token is in no output", not any(n in seen for n in needles))
    found, read = place.files_holding(needles)
    claims.holds(f"the token is in none of {read} files", not found and read > 10, str(found))
    audit = place.command("audit", "--json").stdout
    claims.holds("the audit names the credential", b'"credential":"git"' in audit.replace(b": ", b":"),
                 audit.decode()[:2000])
    claims.close()

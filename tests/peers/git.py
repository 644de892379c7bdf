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
# What an LFS server of another kind gives to its clients for a while.
LFS_KEY = "LFS-CANARY-" + os.urandom(12).hex()
POLICY = """
    description = "Work on one repository, with push, and read another"
    [[egress.allow]]
    hosts = ["git.example"]
    git = { repositories = ["acme/widget", "acme/large"], push = true }
    credential = "git"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["git.example"]
    git = { repositories = ["acme/readonly"], push = false }
    credential = "git"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["placed.example"]
    git = { repositories = ["acme/widget"], push = true }
    credential = "placed"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["lfs.example"]
    methods = ["GET", "POST"]
    paths = ["/acme/widget.git/info/lfs/**", "/acme/keyed.git/info/lfs/**"]
    credential = "lfs"
    lfs = true
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["lfs.example"]
    methods = ["GET", "POST"]
    paths = ["/acme/closed.git/info/lfs/**"]
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
    [credentials.placed]
    secret = "local:git"
    inject = { placeholder = ["basic"] }
    hosts = ["placed.example"]
    env = "PLACED_TOKEN"
    shape = "ghs_"
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

# A push that is sent in pieces for a while, and the way back. The files are kept as they are, since what
# is measured is not how fast git packs.
# In parts of 10 MiB; .ci/long pushes more of them.
PARTS = int(os.environ.get("CLEANHANDS_PUSH_PARTS", "2"))
LARGE = f"""
    set -e
    git config --global user.email agent@example.invalid
    git config --global user.name agent
    git config --global core.compression 0
    git config --global core.bigFileThreshold 1m
    # Over HTTP/2 git and some libcurl wait for one another at the end of a long body, with no proxy too.
    git config --global http.version HTTP/1.1
    git init -q -b main large && cd large
    for i in $(seq {PARTS}); do head -c 10485760 /dev/urandom > part$i; done
    git add . && git commit -qm large
    git push -q https://git.example/acme/large.git main
    sum=$(cat part* | sha256sum)
    cd .. && rm -rf large && git clone -q https://git.example/acme/large.git back
    test "$sum" = "$(cat back/part* | sha256sum)" && echo "the same $(du -cb back/part* | tail -1 | cut -f1)"
"""
# What people do who have a token: in the address, and from a helper.
PLACED = """
    set -e
    git config --global user.email agent@example.invalid
    git config --global user.name agent
    cd /tmp
    case $PLACED_TOKEN in ghs_*) echo shaped;; esac
    git clone -q "https://x-access-token:$PLACED_TOKEN@placed.example/acme/widget.git" a
    echo "address $(cat a/seed.txt)"
    git -C a remote set-url origin https://placed.example/acme/widget.git
    if git -C a ls-remote origin 2>/dev/null; then echo "without a password, and taken"; fi
    git config --global credential.helper \
        '!f() { echo username=x-access-token; echo "password=$PLACED_TOKEN"; }; f'
    git clone -q https://placed.example/acme/widget.git b
    echo "helper $(cat b/seed.txt)"
    cd b && echo b > b && git add b && git commit -qm b && git push -q origin HEAD:helped
    echo "pushed $(git rev-parse HEAD)"
"""
# The batch request itself, as an LFS client makes it.
BATCH = """curl -sS -H 'Accept: application/vnd.git-lfs+json' -H 'Content-Type: application/vnd.git-lfs+json' \
    -d '{"operation": "download", "objects": [{"oid": "00", "size": 1}]}' -w '\\n%{http_code}\\n' \
    https://lfs.example/acme/NAME.git/info/lfs/objects/batch"""


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
    large = repository(root, "large.git")
    subprocess.run(["git", "-c", "safe.directory=*", "-C", str(large), "update-ref", "-d", "refs/heads/main"],
                   check=True)
    users = root / "htpasswd"
    htpasswd = shutil.which("htpasswd")
    subprocess.run([htpasswd, "-bc", str(users), "x-access-token", TOKEN], check=True, capture_output=True)
    users_only = {"HOME": str(root), "PATH": os.environ["PATH"], "GIT_CONFIG_COUNT": "1",
                  "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    program = shutil.which("fcgiwrap") or "/usr/sbin/fcgiwrap"
    place.start("fcgiwrap", [program, "-c", "2", "-s", f"unix:{root}/fcgi.sock"], env=users_only)
    wait_for("fcgiwrap's socket", 10, (root / "fcgi.sock").exists)
    backend = subprocess.run(["git", "--exec-path"], check=True, capture_output=True, text=True).stdout.strip()
    location = f"""
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
    """
    placed, (cert, key) = free_port(), place.certificate("placed.example")
    port = place.nginx(HOST, location, before=f"""
        server {{ listen 127.0.0.1:{placed} ssl http2; server_name placed.example;
          ssl_certificate {cert}; ssl_certificate_key {key}; {location} }}
    """)
    lfs, objects = free_port(), free_port()
    (root / "objects").mkdir()
    server = pathlib.Path(__file__).resolve().parent / "lfs_server.py"
    place.start("lfs", [sys.executable, str(server), str(lfs), *place.certificate("lfs.example"), str(objects),
                        *place.certificate("objects.example"), f"x-access-token:{TOKEN}", str(root / "objects")],
                env={**os.environ, "LFS_KEY": LFS_KEY})
    wait_for("the LFS server to listen", 15, lambda: port_answers(lfs) and port_answers(objects))
    place.cleanhands({"git": POLICY}, {HOST: port, "placed.example": placed, "lfs.example": lfs,
                                       "objects.example": objects})
    place.store_secret("git", TOKEN)

    first = place.command("exec", "--environment", "git", "--", "bash", "-c", INSIDE)
    shown = (first.stdout + first.stderr).decode(errors="replace") + place.log("up")
    claims.holds("clone, commit and push from inside a sandbox work with no token inside",
                 first.returncode == 0 and b"seed line" in first.stdout, shown)
    head = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(widget), "rev-parse", "main"],
                          check=True, capture_output=True).stdout.strip()
    claims.holds("the server has the pushed commit", head and head in first.stdout, shown)

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
    inside = lambda script, seconds=120: place.command("exec", "--environment", "git", "--", "bash", "-c", script,
                                                       timeout=seconds)
    text = lambda done: (done.stdout + done.stderr).decode(errors="replace")
    pushed = inside(LARGE, 900)
    claims.holds("a large push arrives whole and is cloned again", pushed.returncode == 0
                 and f"the same {PARTS * 10485760}".encode() in pushed.stdout, text(pushed) + place.log("up")[-3000:])
    by_placeholder = inside(PLACED)
    told, lines = text(by_placeholder), by_placeholder.stdout.decode().split("\n")
    claims.holds("a clone whose address has the placeholder for a password works, and one with a helper",
                 by_placeholder.returncode == 0 and {"address seed line", "helper seed line", "shaped"} <= set(lines),
                 told + place.log("up")[-3000:])
    claims.holds("who brings no placeholder is let in by nobody", "without a password, and taken" not in told, told)
    helped = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(widget), "rev-parse", "helped"],
                            check=True, capture_output=True, text=True).stdout.strip()
    claims.holds("the server has what was pushed with the helper's placeholder", f"pushed {helped}" in lines, told)

    lfs = inside(LFS)
    claims.holds("an LFS object on another host arrives both ways, and no credential goes there",
                 lfs.returncode == 0 and b"the object arrived" in lfs.stdout, text(lfs) + place.log("up")[-3000:])
    elsewhere = inside(LFS.replace("https://lfs.example/acme", "https://lfs.example/other"))
    claims.holds("LFS that no rule names fails with the reason", elsewhere.returncode != 0
                 and "not_listed" in text(elsewhere), text(elsewhere))
    keyed = inside(LFS.replace("widget.git/info/lfs", "keyed.git/info/lfs"))
    claims.holds("an object arrives with the header that the LFS server gives, where the rule says lfs = true",
                 keyed.returncode == 0 and b"the object arrived" in keyed.stdout, text(keyed) + place.log("up")[-3000:])
    batch = inside(BATCH.replace("NAME", "keyed"))
    claims.holds("which the sandbox sees, as the manual says", LFS_KEY.encode() in batch.stdout, text(batch))
    closed = inside(LFS.replace("widget.git/info/lfs", "closed.git/info/lfs"))
    claims.holds("LFS fails with the reason where the rule has a credential and does not say so",
                 closed.returncode != 0 and "lfs_not_allowed" in text(closed), text(closed))
    shut = inside(BATCH.replace("NAME", "closed"))
    claims.holds("nothing of what an LFS server gives gets into the sandbox there",
                 shut.stdout.endswith(b"\n403\n") and LFS_KEY.encode() not in shut.stdout + closed.stdout, text(shut))
    claims.holds("and the LFS server was asked for nothing", "/acme/closed.git" not in place.log("lfs")
                 and "/acme/keyed.git" in place.log("lfs"), place.log("lfs"))

    needles = [TOKEN.encode(), base64.b64encode(f"x-access-token:{TOKEN}".encode())]
    seen = b"".join(done.stdout + done.stderr for done in (
        first, refused, more, pushed, by_placeholder, lfs, elsewhere, keyed, batch, closed, shut))
    claims.holds("the token is in no output", not any(n in seen for n in needles))
    found, read = place.files_holding(needles)
    claims.holds(f"the token is in none of {read} files", not found and read > 10, str(found))
    audit = place.command("audit", "--json").stdout
    claims.holds("the audit names the credential", b'"credential":"git"' in audit.replace(b": ", b":"),
                 audit.decode()[:2000])
    claims.close()

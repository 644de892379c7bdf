"""The trust matrix: clients that others wrote, inside a sandbox, with no setting of their own.

Each fetches from a host whose TLS ends at proxyd and whose server demands a credential that only the
vault holds; from a host that is tunnelled, whose certificate is of a CA that the host's own bundle
trusts; and from a host that no rule names, where the reason must be read. Each package manager installs
a package from a registry that demands the credential too. Only where to fetch from is ever told.

A client that this machine has not is printed as left out. tests/run says in CLIENTS_LACKING what it
could not bring; if that is nothing, a client that is left out is a failure.
"""

import concurrent.futures
import http.server
import os
import pathlib
import re
import shutil
import ssl
import subprocess
import sys
import textwrap
import threading

import registries
from support import CACHE, Claims, Place

TOKEN = "SECRET-CANARY-clients-8b1d55e0c7"
INJECTED, TUNNELLED, DENIED, REGISTRY = (
    "api.example", "plain.example", "denied.example", "registry.example")
PACKAGES = f"https://{REGISTRY}"
BUNDLES = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"]
INSIDE = "/opt/clients"

POLICY = f"""
    [sandbox]
    mounts = [MOUNTS]
    [[egress.allow]]
    hosts = ["{INJECTED}", "{REGISTRY}"]
    methods = ["GET", "HEAD"]
    paths = ["/**"]
    credential = "api"
    addresses = ["127.0.0.1/32"]
    [[egress.allow]]
    hosts = ["{TUNNELLED}"]
    addresses = ["127.0.0.1/32"]
    [credentials.api]
    secret = "local:api"
    inject = {{ bearer = true }}
    hosts = ["{INJECTED}", "{REGISTRY}"]
"""

# Programs of a few lines in the languages that agents write: each prints the body, whatever the status,
# and fails where the status says so.
FILES = {
    "with_urllib.py": """
        import sys, urllib.error, urllib.request
        try: print(urllib.request.urlopen(sys.argv[1]).read().decode())
        except urllib.error.HTTPError as e: sys.exit(e.read().decode())
    """,
    "with_requests.py": """
        import sys, requests
        r = requests.get(sys.argv[1]); print(r.text); sys.exit(not r.ok)
    """,
    "with_httpx.py": """
        import sys, httpx
        r = httpx.get(sys.argv[1]); print(r.text); sys.exit(not r.is_success)
    """,
    "aio.py": """
        import asyncio, sys, aiohttp
        async def main():
            async with aiohttp.ClientSession() as s, s.get(sys.argv[1]) as r:
                print(await r.text()); return not r.ok
        sys.exit(asyncio.run(main()))
    """,
    "aws.py": """
        import sys, boto3, botocore
        from urllib.parse import urlsplit
        url = urlsplit(sys.argv[1])
        s3 = boto3.client("s3", endpoint_url=f"https://{url.netloc}", region_name="r", aws_access_key_id="a",
            aws_secret_access_key="b", config=botocore.config.Config(s3={"addressing_style": "path"}))
        print(s3.get_object(Bucket="bucket", Key="hello")["Body"].read().decode())
    """,
    "fetch.mjs": """
        const r = await fetch(process.argv[2]); console.log(await r.text()); process.exit(r.ok ? 0 : 1)
    """,
    "https.cjs": """
        require('https').get(process.argv[2], r => {
          r.pipe(process.stdout); r.on('end', () => process.exitCode = r.statusCode < 400 ? 0 : 1) })
    """,
    "deno.ts": """
        const r = await fetch(Deno.args[0]); console.log(await r.text()); Deno.exit(r.ok ? 0 : 1)
    """,
    "bun.ts": """
        const r = await fetch(Bun.argv[2]); console.log(await r.text()); process.exit(r.ok ? 0 : 1)
    """,
    "Fetch.java": """
        import java.net.URI;
        import java.net.http.*;
        class Fetch {
          public static void main(String[] a) throws Exception {
            var r = HttpClient.newHttpClient().send(
                HttpRequest.newBuilder(URI.create(a[0])).build(), HttpResponse.BodyHandlers.ofString());
            System.out.println(r.body()); System.exit(r.statusCode() < 400 ? 0 : 1);
          }
        }
    """,
    "fetch.rb": """
        require 'net/http'
        r = Net::HTTP.get_response(URI(ARGV[0])); puts r.body; exit r.is_a?(Net::HTTPSuccess)
    """,
    "fetch.pl": """
        use LWP::UserAgent;
        my $r = LWP::UserAgent->new->get($ARGV[0]); print $r->decoded_content; exit !$r->is_success;
    """,
    "curl.php": """
        <?php $c = curl_init($argv[1]); curl_setopt($c, CURLOPT_RETURNTRANSFER, true);
        echo curl_exec($c), curl_error($c); exit(curl_getinfo($c, CURLINFO_HTTP_CODE) == 200 ? 0 : 1);
    """,
    "stream.php": """
        <?php echo file_get_contents($argv[1], false, stream_context_create(
          ['http' => ['ignore_errors' => true]]));
        exit(str_contains($http_response_header[0] ?? '', ' 200') ? 0 : 1);
    """,
    "fetch.go": """
        package main
        import ("fmt"; "io"; "net/http"; "os")
        func main() {
          r, err := http.Get(os.Args[1])
          if err != nil { fmt.Println(err); os.Exit(1) }
          b, _ := io.ReadAll(r.Body); fmt.Println(string(b))
          if r.StatusCode >= 400 { os.Exit(1) }
        }
    """,
    "resolve.c": """
        #include <netdb.h>
        #include <stdio.h>
        #include <unistd.h>
        #include <sys/socket.h>
        int main(int n, char **a) {
          struct addrinfo *r, hint = { .ai_socktype = SOCK_STREAM };
          int e = getaddrinfo(a[1], "443", &hint, &r);
          if (e) { puts(gai_strerror(e)); return 1; }
          int s = socket(r->ai_family, SOCK_STREAM, 0);
          if (connect(s, r->ai_addr, r->ai_addrlen)) { perror("connect"); return 1; }
          printf("connected to %s\\n", a[1]); return 0;
        }
    """,
    # A client that brings its own list of roots and looks nowhere else.
    "own_roots.py": """
        import ssl, sys, urllib.request
        context = ssl.create_default_context(cafile=sys.argv[2])
        print(urllib.request.urlopen(sys.argv[1], context=context).read().decode())
    """,
}

PY, NODE, BIN = f"{INSIDE}/py/bin/python", f"{INSIDE}/node_modules", f"{INSIDE}/bin"
HELLO = "https://HOST/hello"

# name, the program that must be there, the command; HOST is each host in turn.
FETCHERS = [
    ("curl", "curl", f"curl -sS --fail-with-body {HELLO}"),
    ("curl over HTTP/1.1", "curl", f"curl -sS --http1.1 --fail-with-body {HELLO}"),
    ("curl with an empty environment", "curl", f"env -i /usr/bin/curl -sS --fail-with-body {HELLO}"),
    ("Python with an empty environment", "/usr/bin/python3", f"env -i /usr/bin/python3 with_urllib.py {HELLO}"),
    ("Java with an empty environment", "/usr/bin/java", f"env -i /usr/bin/java Fetch.java {HELLO}"),
    ("Ruby with an empty environment", "/usr/bin/ruby", f"env -i /usr/bin/ruby fetch.rb {HELLO}"),
    ("Go with an empty environment", "/usr/bin/go", f"go build -o g fetch.go && env -i ./g {HELLO}"),
    ("wget", "wget", f"wget -qO- --content-on-error {HELLO}"),
    ("Python urllib", "python3", f"python3 with_urllib.py {HELLO}"),
    ("Python requests", PY, f"{PY} with_requests.py {HELLO}"),
    ("Python httpx", PY, f"{PY} with_httpx.py {HELLO}"),
    ("Python aiohttp", PY, f"{PY} aio.py {HELLO}"),
    ("boto3", PY, f"{PY} aws.py https://HOST"),
    ("AWS CLI", PY, f"export AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b AWS_DEFAULT_REGION=r; "
     f"{PY} -m awscli s3api get-object --endpoint-url https://HOST --bucket bucket --key hello o && cat o"),
    ("Node fetch", "node", f"node fetch.mjs {HELLO}"),
    ("Node https", "node", f"node https.cjs {HELLO}"),
    ("Deno", f"{BIN}/deno", f"{BIN}/deno run -q --allow-net deno.ts {HELLO}"),
    ("Bun", f"{BIN}/bun", f"{BIN}/bun bun.ts {HELLO}"),
    ("Java", "java", f"java Fetch.java {HELLO}"),
    ("Java with options of its own", "java", f"JAVA_TOOL_OPTIONS=-Xmx256m java Fetch.java {HELLO}"),
    ("Ruby", "ruby", f"ruby fetch.rb {HELLO}"),
    ("Perl LWP", "lwp-request", f"perl fetch.pl {HELLO}"),
    ("PHP curl", "php", f"php curl.php {HELLO}"),
    ("PHP streams", "php", f"php stream.php {HELLO}"),
    ("Go", "go", f"go run fetch.go {HELLO}"),
]

# name, the program, the command, whether it succeeds, what is read of it.
OTHERS = [
    ("a static musl program resolves names", "musl-gcc",
     f"musl-gcc -static resolve.c -o r && ./r {INJECTED} && ./r {TUNNELLED}", True, f"connected to {TUNNELLED}"),
    ("a musl program's odd name is refused at once", "musl-gcc",
     "musl-gcc -static resolve.c -o r && ./r single", False, "does not"),
    ("Node's own resolver finds a name, in both families", "node",
     f"node -e 'const d = require(\"dns\").promises, n = \"{INJECTED}\"; Promise.all([d.resolve4(n), "
     "d.resolve6(n)]).then(a => console.log(a.flat().length, \"addresses\"))'", True, "2 addresses"),
    ("Go's own resolver finds a name", "go", f"GODEBUG=netdns=go go run fetch.go https://{INJECTED}/hello", True,
     f"answer of {INJECTED}"),
    ("Go with the system's resolver finds a name", "go",
     f"GODEBUG=netdns=cgo go run fetch.go https://{INJECTED}/hello", True, f"answer of {INJECTED}"),
    ("Java's own tool lists the store", "keytool", "keytool -list -cacerts -storepass changeit", True,
     "cleanhands-0"),
    ("a client with a list of roots of its own reaches what is tunnelled", "python3",
     f"python3 own_roots.py https://{TUNNELLED}/hello ca.pem", True, f"answer of {TUNNELLED}"),
    ("a client with a list of roots of its own is told why an injected host fails", "python3",
     f"python3 own_roots.py https://{INJECTED}/hello ca.pem", False,
     "the client does not trust proxyd's certificate for this host"),
    ("a client that breaks off without a word is told what that may mean", "node",
     f"NODE_EXTRA_CA_CERTS= node https.cjs https://{INJECTED}/hello", False, "as some do that do not trust"),
    ("ssh to a host that no rule names is refused with the reason", "ssh",
     f"ssh -o BatchMode=yes git@{DENIED}", False, f"does not list {DENIED}"),
    ("a remote by SSH at a forge goes by HTTPS and is refused with the reason", "git",
     "git ls-remote git@github.com:acme/widget.git", False, "does not list github.com"),
    ("gh is refused with the reason", "gh", f"GH_TOKEN=x GH_HOST={DENIED} gh api user", False,
     f"does not list {DENIED}"),
    ("gh reaches an injected host", "gh", f"GH_TOKEN=x GH_HOST={INJECTED} gh api hello", True,
     f"answer of {INJECTED}"),
]

INDEX = f"{PACKAGES}/pypi/simple"
TINY = registries.NAME
IN = "mkdir {0} && cd {0} && "

# name, the program, the command, what an installed package says.
INSTALLERS = [
    ("git", "git", f"git clone -q {PACKAGES}/git/probe.git g && cat g/said", "git-cloned"),
    ("pip", PY, f"{PY} -m pip install -q --target p --index-url {INDEX} {TINY} && "
     "PYTHONPATH=p python3 -m tiny_probe", "python-installed"),
    ("uv", f"{BIN}/uv", f"{BIN}/uv pip install -q --python /usr/bin/python3 --target u "
     f"--index-url {INDEX} {TINY} && PYTHONPATH=u python3 -m tiny_probe", "python-installed"),
    ("npm", "npm", IN.format("n") + f"npm install --no-audit --no-fund --registry {PACKAGES}/npm/ {TINY} && "
     f"node -e 'require(\"{TINY}\")'", "node-installed"),
    ("Yarn", f"{NODE}/yarn", IN.format("y") + f"node {NODE}/yarn/bin/yarn.js add --registry {PACKAGES}/npm/ "
     f"{TINY} && node -e 'require(\"{TINY}\")'", "node-installed"),
    ("pnpm", f"{NODE}/pnpm", IN.format("m") + f"node {NODE}/pnpm/bin/pnpm.cjs add --registry={PACKAGES}/npm/ "
     f"{TINY} && node -e 'require(\"{TINY}\")'", "node-installed"),
    ("Bun's installer", f"{BIN}/bun", IN.format("b") + f"{BIN}/bun add "
     f"--registry {PACKAGES}/npm/ {TINY} && node -e 'require(\"{TINY}\")'", "node-installed"),
    ("Deno's npm packages", f"{BIN}/deno", f"NPM_CONFIG_REGISTRY={PACKAGES}/npm/ "
     f"{BIN}/deno eval -q 'import \"npm:{TINY}\"'", "node-installed"),
    ("Cargo", "/opt/rust/bin/cargo", "cargo new -q --vcs none c && cd c && cargo add -q tiny-probe --registry "
     "probe && echo 'fn main() { println!(\"{}\", tiny_probe::said()) }' >src/main.rs && cargo run -q",
     "cargo-installed"),
    ("Go modules", "go", IN.format("o") + f"go mod init probe >/dev/null && export GOSUMDB=off "
     f"GOPROXY={PACKAGES}/go && cp ../tiny.go . && go get {registries.MODULE} && go run tiny.go", "go-installed"),
    ("RubyGems", "gem", f"gem install -q --no-document --install-dir r --clear-sources --source "
     f"{PACKAGES}/gems/ {TINY} && GEM_PATH=r ruby -e 'require \"tiny_probe\"'", "gem-installed"),
    ("Maven", "mvn", IN.format("v") + "cp ../pom.xml ../settings.xml . && mvn -B -q -s settings.xml validate && "
     "cat ~/.m2/repository/probe/example/*/*/*.pom", "maven-installed"),
    ("Composer", "composer", IN.format("k") + "cp ../composer.json . && composer install -q -n && "
     "php vendor/probe/tiny-probe/said.php", "composer-installed"),
    ("APT", "apt-get", IN.format("a") + "mkdir -p lists cache state etc && apt() { apt-get -q -o Dir::State=$PWD/state "
     "-o Dir::State::lists=$PWD/lists -o Dir::State::status=/dev/null -o Dir::Cache=$PWD/cache "
     "-o Dir::Etc=$PWD/etc -o Debug::NoLocking=1 \"$@\"; } && "
     f"echo 'deb [trusted=yes] {PACKAGES}/apt stable main' >etc/sources.list && apt update && apt download {TINY} && "
     "dpkg-deb --fsys-tarfile *.deb | tar -xO ./usr/share/tiny-probe/said", "apt-installed"),
]
FILES |= {
    "tiny.go": f"""
        package main
        import ("fmt"; "{registries.MODULE}")
        func main() {{ fmt.Println(tiny.Said()) }}
    """,
    "pom.xml": f"""
        <project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
        <parent><groupId>probe.example</groupId><artifactId>{TINY}</artifactId>
        <version>{registries.VERSION}</version><relativePath/></parent>
        <artifactId>child</artifactId><packaging>pom</packaging></project>
    """,
    "settings.xml": f"""
        <settings><mirrors><mirror><id>probe</id><mirrorOf>*</mirrorOf><url>{PACKAGES}/maven</url></mirror>
        </mirrors></settings>
    """,
    "composer.json": f"""
        {{"repositories": [{{"type": "composer", "url": "{PACKAGES}/composer"}}, {{"packagist": false}}],
        "require": {{"probe/{TINY}": "*"}}}}
    """,
}


class Answers(http.server.BaseHTTPRequestHandler):
    """The upstream of all hosts: a greeting, and files for who shows the credential."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    files: pathlib.Path

    def do_GET(self):
        host = self.headers.get("Host", "").split(":")[0]
        status, body = self.answer(host, self.path.split("?")[0])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json" if body[:1] == b"{" else "text/html")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def answer(self, host, path):
        if host != TUNNELLED and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, b"the credential is missing"
        if path in ("/hello", "/bucket/hello", "/api/v3/hello"):
            return 200, f"answer of {host}".encode()
        at = (self.files / path.strip("/")).resolve()
        if not at.is_relative_to(self.files):
            return 404, b"no such file"
        for file in (at, at / "index.html", at / "index.json"):
            if file.is_file():
                return 200, file.read_bytes()
        return 404, b"no such file"

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that does not trust us has its own row to say so."""


class AllClaims(Claims):
    """Goes on after a claim that failed, so that one client's trouble does not hide another's."""

    failed = 0

    def holds(self, claim, condition, shown=""):
        if condition:
            return super().holds(claim, condition)
        self.failed += 1
        print(f"FAILED: {claim}\n{shown}", flush=True)

    def close(self):
        print(f"{self.passed} passed, {self.failed} failed", flush=True)
        sys.exit(bool(self.failed))


class Trusting(Place):
    """A place whose host trusts the CA of this place: its bundle holds it, as an operator's does.

    The bundle is put over the host's in a mount namespace of the daemons' own."""

    def start(self, name, argv, **options):
        if name == "up":
            bundle = next(path for path in BUNDLES if os.path.exists(path))
            merged = self.root / "bundle.pem"
            merged.write_bytes(pathlib.Path(bundle).read_bytes() + (self.root / "ca.pem").read_bytes())
            script = f'mount --bind "$0" {bundle} && exec "$@"'
            own = [] if os.getuid() == 0 else ["--map-root-user"]
            argv = ["unshare", *own, "--mount", "sh", "-c", script, str(merged), *argv]
        return super().start(name, argv, **options)


def serve(place, hosts):
    """One TLS server for these hosts; gives its port."""
    contexts = {}
    for host in hosts:
        contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        contexts[host].load_cert_chain(*place.certificate(host))
    front = contexts[hosts[0]]
    front.sni_callback = lambda stream, name, _: setattr(stream, "context", contexts.get(name, front))
    server = Server(("127.0.0.1", 0), Answers)
    server.socket = front.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def repository(files):
    """A git repository as plain files."""
    bare, work = files / "git/probe.git", files / "git-source"
    run = lambda *a: subprocess.run(["git", "-c", "safe.directory=*", "-c", "user.name=t", "-c",
                                     "user.email=t@example.invalid", *a], check=True, capture_output=True)
    run("init", "-q", "-b", "main", str(work))
    (work / "said").write_text("git-cloned\n")
    run("-C", str(work), "add", ".")
    run("-C", str(work), "commit", "-qm", "said")
    run("clone", "-q", "--bare", str(work), str(bare))
    run("-C", str(bare), "update-server-info")


class Matrix:
    def __init__(self, place, claims):
        self.place, self.claims = place, claims
        self.left_out = set()

    def here(self, program):
        """Whether a program is there, as the sandbox will see it."""
        path = program.replace(INSIDE, str(CACHE / "clients")).replace("/opt/rust", str(rust() or "/none"))
        found = os.path.exists(path) if path.startswith("/") else (
            shutil.which(path, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"))
        if not found:
            self.left_out.add(program)
        return found

    def run(self, name, script):
        """A script in a sandbox with a workspace of its own; its files lie there."""
        workspace = self.place.root / "work" / re.sub(r"\W", "_", name)
        workspace.mkdir(parents=True, mode=0o777)
        for file, text in FILES.items():
            (workspace / file).write_text(textwrap.dedent(text).lstrip())
        shutil.copy(self.place.root / "ca.pem", workspace)
        done = self.place.command(
            "exec", "--environment", "clients", "--workspace", str(workspace), "--",
            "bash", "-c", script, timeout=300)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def fetch(self, row):
        name, _, command = row
        results = []
        for host in (INJECTED, TUNNELLED, DENIED):
            results.append((host, *self.run(f"{name} {host}", command.replace("HOST", host))))
        return row, results

    def other(self, row):
        return row, self.run(row[0], row[2])

    def install(self, row):
        name, _, command, said = row
        setup = f"export PATH=/opt/rust/bin:$PATH CARGO_REGISTRIES_PROBE_INDEX=sparse+{PACKAGES}/cargo/; "
        return row, self.run(name, setup + command)


def container(place):
    """Builds an image by the recipe of policy(5), beside the sandboxes; gives what the build printed."""
    context = place.root / "image"
    needed = subprocess.run(["ldd", "/usr/bin/curl"], check=True, capture_output=True, text=True).stdout
    for path in ["/usr/bin/curl", *re.findall(r"/\S+", needed)]:
        copy = context / "rootfs" / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    url = f"https://{INJECTED}/hello"
    (context / "Containerfile").write_text(
        f'FROM scratch\nCOPY rootfs /\nRUN ["/usr/bin/curl", "-sS", "{url}"]\n')
    # Its own storage, and no more of the machine than a build in CI has.
    own = f"--root {place.root}/images --runroot {place.root}/images-run --storage-driver vfs"
    build = (f"buildah {own} bud --isolation chroot --network host --no-cache "
             f'--volume "$SSL_CERT_FILE:/etc/ssl/certs/ca-certificates.crt:ro" {context}')
    done = place.command("lease", "open", "clients", "--", "sh", "-c", build, timeout=300)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def rust():
    if not shutil.which("rustc"):
        return None
    done = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True)
    return pathlib.Path(done.stdout.strip()).resolve()


def mounts():
    shown = [(CACHE / "clients", INSIDE), (rust(), "/opt/rust")]
    return ", ".join(f'{{ source = "{a}", target = "{b}" }}' for a, b in shown if a and a.exists())


def main(place):
    claims = AllClaims()
    files = place.root / "files"
    registries.make(files, PACKAGES)
    repository(files)
    Answers.files = files.resolve()
    hosts = [INJECTED, TUNNELLED, REGISTRY]
    port = serve(place, hosts)
    place.cleanhands({"clients": POLICY.replace("MOUNTS", mounts())}, {host: port for host in hosts})
    place.store_secret("api", TOKEN)
    matrix = Matrix(place, claims)
    seen = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        fetched = pool.map(matrix.fetch, [row for row in FETCHERS if matrix.here(row[1])])
        for (name, *_), results in fetched:
            for host, status, out, err in results:
                seen += [out, err]
                shown = f"status {status}\n{out}\n{err}"
                if host == DENIED:
                    claims.holds(f"{name}: a denied host fails and the reason is read",
                                 status != 0 and f"does not list {host}" in out + err, shown)
                else:
                    kind = "an injected" if host == INJECTED else "a tunnelled"
                    claims.holds(f"{name}: {kind} host is reached with no setting",
                                 status == 0 and f"answer of {host}" in out, shown)
        installed = pool.map(matrix.install, [row for row in INSTALLERS if matrix.here(row[1])])
        for (name, _, _, said), (status, out, err) in installed:
            seen += [out, err]
            claims.holds(f"{name}: installs from a registry that demands the credential",
                         status == 0 and said in out, f"status {status}\n{out}\n{err}")
        others = pool.map(matrix.other, [row for row in OTHERS if matrix.here(row[1])])
        for (name, _, _, succeeds, said), (status, out, err) in others:
            seen += [out, err]
            claims.holds(name, (status == 0) == succeeds and said in out + err,
                         f"status {status}\n{out}\n{err}")
    # Rootless builds need more of the machine than a test can bring.
    if os.getuid() == 0 and matrix.here("buildah"):
        status, out, err = container(place)
        seen += [out, err]
        claims.holds("a container built beside the sandboxes reaches an injected host by the recipe",
                     status == 0 and f"answer of {INJECTED}" in out, f"status {status}\n{out}\n{err}")
    claims.holds("the token is in no output", not any(TOKEN in text for text in seen))
    missing = " ".join(sorted(matrix.left_out)) or "nothing"
    print(f"left out, not on this machine: {missing}", flush=True)
    if not os.environ.get("CLIENTS_LACKING", "not asked").strip():
        claims.holds("no client is left out", missing == "nothing", missing)
    claims.close()


if __name__ == "__main__":
    with Trusting() as place:
        main(place)

"""Environments' templates with the real tools: pip, npm, cargo and APT install packages from a registry
that asks for a credential, once, for all sandboxes that need them.

The registry is made here and served by nginx behind TLS. The image that APT packages go over is an OCI
layout of some of this host's own Debian packages.
"""

import gzip
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tarfile

import registries
from support import Claims, Place

HOST = "registry.example"
URL = f"https://{HOST}"
TOKEN = "SECRET-CANARY-templates-51c07d9ae2"
TINY = registries.NAME
TOOL = "tiny-tool"
RUST = "/toolchain"

POLICIES = {
    "groups": f"""
        [groups]
        registries = ["{HOST}"]
    """,
    "packages": f"""
        [sandbox]
        tool-timeout = "3m"
        processes = 512
        MOUNTS
        [sandbox.env]
        PIP_INDEX_URL = "{URL}/pypi/simple"
        npm_config_registry = "{URL}/npm/"
        CARGO_REGISTRIES_MIRROR_INDEX = "sparse+{URL}/cargo/"
        CARGO_REGISTRY_DEFAULT = "mirror"
        PATH = "{RUST}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        APT_CONFIG = "/apt/apt.conf"
        [[egress.allow]]
        hosts = ["@registries"]
        methods = ["GET", "HEAD"]
        paths = ["/**"]
        credential = "api"
        addresses = ["127.0.0.1/32"]
        [credentials.api]
        secret = "local:api"
        inject = {{ bearer = true }}
        hosts = ["{HOST}"]
    """,
    "python": f"[sandbox]\npackages = {{ pip = ['{TINY}=={registries.VERSION}'] }}\n",
    "node": f"[sandbox]\npackages = {{ npm = ['{TINY}@{registries.VERSION}'] }}\n",
    "rust": f"[sandbox]\npackages = {{ cargo = ['{TOOL}@{registries.VERSION}'] }}\n",
    "all": f"[sandbox]\npackages = {{ pip = ['{TINY}'], npm = ['{TINY}'] }}\n"
           "setup = ['python3 -m tiny_probe > /usr/local/share/said']\n",
    "absent": "[sandbox]\npackages = { pip = ['not-in-this-registry==1'] }\n",
    "built": "[sandbox]\nroot = 'BUILT'\n",
    "debian": f"[sandbox]\nroot = 'IMAGE'\npackages = {{ apt = ['{TINY}'] }}\n",
}
LOCATIONS = f"""
    root FILES; index index.json index.html; absolute_redirect off;
    if ($http_authorization != "Bearer {TOKEN}") {{ return 401; }}
"""


def toolchain():
    """The Rust toolchain of this host, which lies in somebody's home."""
    shown = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True)
    return pathlib.Path(shown.stdout.strip()).resolve()


def tool(root):
    """A crate with a program in it, in the registry of Cargo."""
    manifest = f'[package]\nname = "{TOOL}"\nversion = "{registries.VERSION}"\nedition = "2021"\n'
    crate = registries.archive({
        f"{TOOL}-{registries.VERSION}/Cargo.toml": manifest,
        f"{TOOL}-{registries.VERSION}/src/main.rs": 'fn main() { println!("cargo-installed") }\n'})
    registries.write(root / f"cargo/files/{TOOL}/{registries.VERSION}/download", crate)
    line = {"name": TOOL, "vers": registries.VERSION, "deps": [], "features": {}, "yanked": False,
            "cksum": hashlib.sha256(crate).hexdigest()}
    registries.write(root / f"cargo/{TOOL[:2]}/{TOOL[2:4]}/{TOOL}", json.dumps(line) + "\n")


def debian(layout):
    """An OCI layout of APT, a shell and what these need, out of the packages that this host has."""
    output = lambda *argv: subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    status = pathlib.Path("/var/lib/dpkg/status").read_text().split("\n\n")
    known = {}
    for record in status:
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", record, re.M))
        if fields.get("Status") == "install ok installed":
            known.setdefault(fields["Package"], (fields, record))
    wanted, ready = ["apt", "bash", "dash", "coreutils", "dpkg", "libc-bin", "mawk"], []
    while wanted:
        name = wanted.pop()
        if name in ready or name not in known:
            continue
        ready.append(name)
        fields = known[name][0]
        for entry in ",".join(fields.get(k, "") for k in ("Depends", "Pre-Depends")).split(","):
            wanted += [choice.split()[0].split(":")[0] for choice in entry.split("|") if choice.strip()]
    paths = set()
    for name in ready:
        fields = known[name][0]
        listed = output("dpkg-query", "-L", f"{name}:{fields['Architecture']}"
                        if fields.get("Multi-Arch") == "same" else name)
        paths.update(line for line in listed.splitlines() if line.startswith("/"))
    links = [name for name in ("bin", "sbin", "lib", "lib64") if pathlib.Path("/", name).is_symlink()]
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    with tarfile.open(layout / "layer.tar", "w") as tar:
        for name in links:
            tar.add(f"/{name}", arcname=name)
        for path in sorted(paths):
            merged = path.lstrip("/").split("/")[0] in links
            if re.match(r"/usr/share/(doc|man|locale|i18n)/|/(var|etc|dev|run)/", path):
                continue
            if os.path.lexists(path) and (os.path.islink(path) or os.path.isfile(path)):
                arc = ("/usr" if merged else "") + path
                if path.lstrip("/") not in links:
                    tar.add(path, arcname=arc.lstrip("/"), recursive=False)
        records = layout / "status"
        records.write_text("\n\n".join(known[name][1] for name in ready) + "\n\n")
        tar.add(records, arcname="var/lib/dpkg/status")
    plain = (layout / "layer.tar").read_bytes()
    put = lambda data: blob(blobs, data)
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    config = put(json.dumps({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(plain).hexdigest()]}}).encode())
    kind = "application/vnd.oci.image"
    manifest = put(json.dumps({
        "schemaVersion": 2, "config": {"mediaType": f"{kind}.config.v1+json", **config},
        "layers": [{"mediaType": f"{kind}.layer.v1.tar+gzip", **put(gzip.compress(plain, 1))}]}).encode())
    (layout / "index.json").write_text(json.dumps(
        {"schemaVersion": 2, "manifests": [{"mediaType": f"{kind}.manifest.v1+json", **manifest}]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "layer.tar").unlink()


def blob(blobs, data):
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def built(place):
    """What buildah makes of that image with a layer more, which adds, replaces and removes."""
    own = ["buildah", "--root", f"{place.root}/images", "--runroot", f"{place.root}/images-run",
           "--storage-driver", "vfs"]
    do = lambda *argv: subprocess.run([*own, *argv], capture_output=True, text=True, check=True).stdout.strip()
    container = do("from", f"oci:{place.root}/image")
    tree = pathlib.Path(do("mount", container))
    shutil.rmtree(tree / "usr/share/bash-completion", ignore_errors=True)
    shutil.rmtree(tree / "usr/lib/dpkg")
    (tree / "usr/lib/dpkg").mkdir()
    (tree / "usr/lib/dpkg/new").write_text("new\n")
    (tree / "usr/bin/cksum").unlink()
    (tree / "opt/own").mkdir(parents=True)
    (tree / "opt/own/said").write_text("of buildah\n")
    do("config", "--env", "GREETING=hello", container)
    do("umount", container)
    do("commit", "-q", container, f"oci:{place.root}/built")


def run(place, environment, script):
    done = place.command("exec", "--environment", environment, "--", "/bin/sh", "-c", script, timeout=400)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def requests(place):
    return len((place.root / "nginx-access.log").read_text().splitlines())


def main(place):
    claims, files = Claims(), place.root / "files"
    registries.make(files, URL)
    tool(files)
    for folder in (place.root / "apt", place.root / "image"):
        folder.mkdir(mode=0o755)
    place.root.chmod(0o711)
    (place.root / "apt/apt.conf").write_text('Dir::Etc::sourcelist "/apt/sources";\n'
                                             'Dir::Etc::sourceparts "/dev/null";\n')
    (place.root / "apt/sources").write_text(f"deb [trusted=yes] {URL}/apt stable main\n")
    debian(place.root / "image")
    if os.getuid() == 0:
        built(place)
    port = place.nginx(HOST, LOCATIONS.replace("FILES", str(files)))
    mounts = ", ".join(f'{{ source = "{source}", target = "{target}" }}' for source, target in
                       [(toolchain(), RUST), (place.root / "apt", "/apt")])
    policies = {name: text.replace("MOUNTS", f"mounts = [{mounts}]").replace(
        "IMAGE", str(place.root / "image")).replace("BUILT", str(place.root / "built")) for name, text in POLICIES.items()}
    place.cleanhands(policies, {HOST: port})
    place.store_secret("api", TOKEN)

    seen = []
    for environment, what, script, said in [
        ("python", "pip", "python3 -m tiny_probe", "python-installed"),
        ("node", "npm", f"node -e 'require(\"{TINY}\")'", "node-installed"),
        ("rust", "cargo", TOOL, "cargo-installed"),
        ("debian", "APT over an OCI image", f"cat /usr/share/{TINY}/said", "apt-installed"),
    ]:
        status, out, err = run(place, environment, script)
        seen += [out, err]
        claims.holds(f"{what}: what an environment lists is there, from a registry that asks for a credential",
                     status == 0 and said in out, f"status {status}\n{out}\n{err}")
        claims.holds(f"{what}: whoever waits sees what is done",
                     re.search(r"done in [\d.]+ s", err) and "layer made" in err, err)
        before = requests(place)
        status, out, err = run(place, environment, script)
        claims.holds(f"{what}: the next sandbox installs nothing and asks nobody",
                     status == 0 and said in out and requests(place) == before and "layer" not in err,
                     f"status {status}\n{out}\n{err}")
    # Rootless builds need more of the machine than a test can bring.
    if os.getuid() == 0:
        status, out, err = run(place, "built", "echo $GREETING; cat /opt/own/said; ls /usr/lib/dpkg; "
                               "test -e /usr/bin/cksum || echo removed; test -e /usr/bin/ls && echo kept")
        claims.holds("an image of buildah has what its layers add, replace and remove, and its variables",
                     status == 0 and out == "hello\nof buildah\nnew\nremoved\nkept\n",
                     f"status {status}\n{out}\n{err}")
    status, out, err = run(place, "all", "cat /usr/local/share/said")
    claims.holds("setup commands run after the packages and with them",
                 status == 0 and out == "python-installed\n", f"status {status}\n{out}\n{err}")
    status, out, err = run(place, "python", f"curl -sS --fail-with-body {URL}/pypi/simple/")
    claims.holds("what builds may reach sandboxes may not",
                 status != 0 and f"does not list {HOST}" in out + err, f"status {status}\n{out}\n{err}")
    status, out, err = run(place, "absent", "true")
    claims.holds("a package that is not there is a failure that names it and shows what the tool said",
                 status != 0 and "pip: not-in-this-registry==1" in err and "No matching distribution" in err,
                 f"status {status}\n{out}\n{err}")
    claims.holds("nothing that was shown holds the credential", TOKEN not in "".join(seen))
    layers = place.root / "state/sandboxd/templates"
    # Of the failed one what is left is going just now.
    whole = [layer for layer in layers.iterdir() if not layer.name.startswith(".")]
    held = [path for layer in whole for path in layer.rglob("*") if path.is_file()
            and not path.is_symlink() and TOKEN.encode() in path.read_bytes()]
    claims.holds("no layer holds it", whole and not held, held)
    claims.close()


if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
    raise SystemExit("FAILED: this suite makes an image of a Debian host's packages\n0 passed, 1 failed")
with Place() as opened:
    main(opened)

"""Registries of one tiny package each, as static files: what package managers install from.

Everything is made here, below one directory: a Python index, an npm registry, a sparse Cargo index, a
Go module proxy, a Ruby gem index, a Maven and a Composer repository, an APT archive. Paths are what
the server serves; content that names the registry itself gets its URL.
"""

import base64
import gzip
import hashlib
import io
import json
import pathlib
import shutil
import subprocess
import tarfile
import zipfile

NAME, VERSION = "tiny-probe", "1.0.0"
MODULE = "probe.example/tiny"


def make(root: pathlib.Path, url: str):
    """Makes all registries that can be made here below `root`, which is served at `url`."""
    for registry in (python, npm, cargo, go, maven, composer):
        registry(root, url)
    if shutil.which("gem"):
        gems(root)
    if shutil.which("dpkg-deb"):
        apt(root)


def write(path: pathlib.Path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def archive(files, compress=True):
    """A tar of these texts by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz" if compress else "w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return buffer.getvalue()


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as z:
        for name, text in files.items():
            z.writestr(name, text)
    return buffer.getvalue()


def python(root, url):
    module = NAME.replace("-", "_")
    info = f"{module}-{VERSION}.dist-info"
    wheel = zipped({
        f"{module}.py": "print('python-installed')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    })
    file = f"{module}-{VERSION}-py3-none-any.whl"
    write(root / "pypi" / file, wheel)
    digest = hashlib.sha256(wheel).hexdigest()
    write(root / f"pypi/simple/{NAME}/index.html",
          f'<!DOCTYPE html><html><body><a href="{url}/pypi/{file}#sha256={digest}">{file}</a></body></html>')


def npm(root, url):
    package = {"name": NAME, "version": VERSION, "main": "index.js"}
    tarball = archive({"package/package.json": json.dumps(package),
                       "package/index.js": "console.log('node-installed')\n"})
    write(root / f"npm/files/{NAME}.tgz", tarball)
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    dist = {"tarball": f"{url}/npm/files/{NAME}.tgz", "integrity": integrity,
            "shasum": hashlib.sha1(tarball).hexdigest()}
    write(root / f"npm/{NAME}/index.json", json.dumps({
        "name": NAME, "dist-tags": {"latest": VERSION}, "versions": {VERSION: {**package, "dist": dist}}}))


def cargo(root, url):
    manifest = f'[package]\nname = "{NAME}"\nversion = "{VERSION}"\nedition = "2021"\n'
    crate = archive({f"{NAME}-{VERSION}/Cargo.toml": manifest, f"{NAME}-{VERSION}/src/lib.rs":
                     "pub fn said() -> &'static str { \"cargo-installed\" }\n"})
    write(root / f"cargo/files/{NAME}/{VERSION}/download", crate)
    write(root / "cargo/config.json", json.dumps({"dl": f"{url}/cargo/files"}))
    line = {"name": NAME, "vers": VERSION, "deps": [], "features": {}, "yanked": False,
            "cksum": hashlib.sha256(crate).hexdigest()}
    write(root / f"cargo/{NAME[:2]}/{NAME[2:4]}/{NAME}", json.dumps(line) + "\n")


def go(root, _url):
    at, base = root / "go" / MODULE / "@v", f"{MODULE}@v{VERSION}"
    mod = f"module {MODULE}\n\ngo 1.19\n"
    write(at / "list", f"v{VERSION}\n")
    write(at / f"v{VERSION}.info", json.dumps({"Version": f"v{VERSION}", "Time": "2024-01-01T00:00:00Z"}))
    write(at / f"v{VERSION}.mod", mod)
    write(at / f"v{VERSION}.zip", zipped({
        f"{base}/go.mod": mod,
        f"{base}/tiny.go": 'package tiny\n\nfunc Said() string { return "go-installed" }\n'}))


def maven(root, _url):
    pom = ('<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
           f"<groupId>probe.example</groupId><artifactId>{NAME}</artifactId><version>{VERSION}</version>"
           "<packaging>pom</packaging><name>maven-installed</name></project>")
    file = root / f"maven/probe/example/{NAME}/{VERSION}/{NAME}-{VERSION}.pom"
    write(file, pom)
    write(file.with_suffix(".pom.sha1"), hashlib.sha1(pom.encode()).hexdigest())


def composer(root, url):
    package = {"name": f"probe/{NAME}", "version": VERSION}
    write(root / "composer/tiny.zip", zipped({
        "composer.json": json.dumps(package), "said.php": "<?php echo 'composer-installed';\n"}))
    dist = {"url": f"{url}/composer/tiny.zip", "type": "zip"}
    write(root / "composer/packages.json", json.dumps(
        {"packages": {f"probe/{NAME}": {VERSION: {**package, "dist": dist}}}}))


def gems(root):
    source = root / "gem-source"
    write(source / "lib/tiny_probe.rb", "puts 'gem-installed'\n")
    write(source / "tiny.gemspec", f"""Gem::Specification.new do |s|
      s.name = '{NAME}'; s.version = '{VERSION}'; s.summary = 'tiny'; s.authors = ['t']
      s.files = ['lib/tiny_probe.rb']; s.licenses = ['MIT']; s.homepage = 'https://gems.example'
    end
    """)
    target = root / "gems/gems"
    target.mkdir(parents=True)
    run = lambda *argv, cwd: subprocess.run(argv, cwd=cwd, check=True, capture_output=True)
    run("gem", "build", "--silent", "tiny.gemspec", "-o", str(target / f"{NAME}-{VERSION}.gem"), cwd=source)
    run("gem", "generate_index", "-d", str(root / "gems"), cwd=source)


def apt(root):
    tree = root / "deb-source"
    write(tree / "DEBIAN/control", f"Package: {NAME}\nVersion: {VERSION}\nArchitecture: all\n"
          "Maintainer: t <t@probe.example>\nDescription: tiny\n")
    write(tree / "usr/share/tiny-probe/said", "apt-installed\n")
    deb = root / "apt/pool" / f"{NAME}.deb"
    deb.parent.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(tree), str(deb)], check=True,
                   capture_output=True)
    content = deb.read_bytes()
    packages = (tree / "DEBIAN/control").read_text() + (
        f"Filename: pool/{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n\n")
    index = root / "apt/dists/stable/main"
    for architecture in ("all", "amd64", "arm64"):
        write(index / f"binary-{architecture}/Packages.gz", gzip.compress(packages.encode()))

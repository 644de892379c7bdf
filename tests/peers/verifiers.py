"""The leaves that proxyd shows, judged outside of any sandbox by those who verify certificates for
others: GnuTLS, NSS, Java's PKIX, Go. Each takes the leaf for its host and, where it is the one who
looks at names, for no other.
"""

import os
import pathlib
import subprocess

from support import CACHE

JAVA = """
import java.io.*; import java.security.cert.*; import java.util.*;
class Judge {
    public static void main(String[] args) throws Exception {
        var factory = CertificateFactory.getInstance("X.509");
        var ca = (X509Certificate) factory.generateCertificate(new FileInputStream(args[0]));
        var path = CertPathValidator.getInstance("PKIX");
        for (int i = 1; i < args.length; i++) {
            var leaf = (X509Certificate) factory.generateCertificate(new FileInputStream(args[i]));
            var parameters = new PKIXParameters(Set.of(new TrustAnchor(ca, null)));
            parameters.setRevocationEnabled(false);
            path.validate(factory.generateCertPath(List.of(leaf)), parameters);
            if (!leaf.getExtendedKeyUsage().contains("1.3.6.1.5.5.7.3.1")) throw new Exception("no server");
            if (leaf.getBasicConstraints() != -1) throw new Exception("an authority");
            var names = leaf.getSubjectAlternativeNames();
            System.out.println("taken " + leaf.getSerialNumber().signum() + " " + names);
        }
    }
}
"""
GO = """
package main
import ("crypto/x509"; "encoding/pem"; "fmt"; "os")
func read(path string) *x509.Certificate {
    bytes, err := os.ReadFile(path); if err != nil { panic(err) }
    block, _ := pem.Decode(bytes)
    certificate, err := x509.ParseCertificate(block.Bytes); if err != nil { panic(err) }
    return certificate
}
func main() {
    roots := x509.NewCertPool(); roots.AddCert(read(os.Args[1]))
    for i := 2; i < len(os.Args); i += 2 {
        leaf := read(os.Args[i])
        _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: os.Args[i+1]})
        if err != nil { panic(err) }
        if leaf.VerifyHostname("other.example") == nil { panic("any name will do") }
        fmt.Println("taken")
    }
}
"""


def run(*argv, **options):
    """The output of a command, and whether it ended well."""
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    return done.returncode == 0, done.stdout + done.stderr


def judge(claims, place, authority, leaves):
    """`leaves` maps hosts to files."""
    gnutls(claims, authority, leaves)
    nss(claims, place, authority, leaves)
    java(claims, place, authority, leaves)
    go(claims, place, authority, leaves)


def gnutls(claims, authority, leaves):
    for host, leaf in leaves.items():
        ask = lambda name: run(
            "certtool", "--verify", "--load-ca-certificate", str(authority), "--infile", str(leaf),
            "--verify-hostname", name, "--verify-purpose", "1.3.6.1.5.5.7.3.1")
        taken, shown = ask(host)
        claims.holds(f"GnuTLS takes the leaf for {host[:40]}", taken, shown)
        wrong, shown = ask("other.example")
        claims.holds(f"and for no other than {host[:40]}", not wrong, shown)


def nss(claims, place, authority, leaves):
    store = place.root / "nss"
    store.mkdir()
    certutil = lambda *a: run("certutil", *a, "-d", f"sql:{store}")
    made, shown = certutil("-N", "--empty-password")
    claims.holds("NSS has a store", made, shown)
    taken, shown = certutil("-A", "-n", "authority", "-t", "C,,", "-i", str(authority), "-a")
    claims.holds("NSS takes the authority", taken, shown)
    for number, (host, leaf) in enumerate(leaves.items()):
        name = f"leaf {number}"
        added, shown = certutil("-A", "-n", name, "-t", ",,", "-i", str(leaf), "-a")
        taken, more = certutil("-V", "-n", name, "-u", "V", "-e")
        # The same issuer with the same serial number again would be refused here.
        claims.holds(f"NSS takes the leaf for {host[:40]} as a server's", added and taken, shown + more)
        wrong, more = certutil("-V", "-n", name, "-u", "C", "-e")
        claims.holds(f"and not as a client's, for {host[:40]}", not wrong, more)


def java(claims, place, authority, leaves):
    source = place.root / "Judge.java"
    source.write_text(JAVA)
    # Its own garbage and class-sharing files stay in the place.
    taken, shown = run("java", f"-Djava.io.tmpdir={place.root}", str(source), str(authority),
                       *map(str, leaves.values()))
    lines = [line for line in shown.splitlines() if line.startswith("taken 1 ")]
    claims.holds("Java's PKIX takes every leaf, with a positive serial number",
                 taken and len(lines) == len(leaves), shown)


def go(claims, place, authority, leaves):
    source = place.root / "judge.go"
    source.write_text(GO)
    cache = pathlib.Path(CACHE) / "go-build"
    environment = {**os.environ, "GOCACHE": str(cache), "GO111MODULE": "off", "GOFLAGS": "",
                   "GOPATH": str(place.root / "go"), "HOME": str(place.root)}
    pairs = [text for host, leaf in leaves.items() for text in (str(leaf), host)]
    taken, shown = run("go", "run", str(source), str(authority), *pairs, env=environment)
    claims.holds("Go takes every leaf for its host and no other",
                 taken and shown.splitlines().count("taken") == len(leaves), shown)

"""The chains that proxyd shows inside a sandbox, judged by OpenSSL and Python at their strictest, and
by GnuTLS, NSS, Java and Go; and Python's own processes, queues, threads and terminals there.

`cargo test` has the judgement of rustls alone; rcgen, which makes the chains, is by the same hands.
"""

import calendar
import json
import subprocess
import time

import verifiers
from support import Claims, Place

LABEL = "a" * 63
# The longest name that there is: 253 characters.
LONGEST = f"{LABEL}.{LABEL}.{LABEL}.{'b' * 53}.example"
HOSTS = ["api.example", LONGEST, "xn--bcher-kva.example", "10.9.8.7", "2001:db8::7"]
POLICY = f"""
    [[egress.allow]]
    hosts = {json.dumps(HOSTS)}
    methods = ["GET"]
"""
# VERIFY_X509_STRICT and VERIFY_X509_PARTIAL_CHAIN are what newer Pythons set by themselves.
JUDGE = """
import json, socket, ssl, sys
for host in json.loads(sys.argv[1]):
    for flags in (0, ssl.VERIFY_X509_STRICT, ssl.VERIFY_X509_STRICT | 0x80000):
        context = ssl.create_default_context()
        context.verify_flags |= flags
        with socket.create_connection((host, 443), 30) as plain:
            with context.wrap_socket(plain, server_hostname=host) as stream:
                print("taken", host, flags, len(stream.getpeercert()["subject"]))
"""
RUNTIME = """
import multiprocessing, os, pty, subprocess, tempfile, threading
if __name__ == "__main__":
    said = []
    thread = threading.Thread(target=said.append, args=("thread",)); thread.start(); thread.join()
    print(said, multiprocessing.Pool(2).map(abs, [-1, -2]))
    queue = multiprocessing.Queue(); queue.put(1); print("queue", queue.get())
    print(subprocess.check_output(["echo", "child"]).decode().strip())
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared: print("shm", shared.write(b"x"))
    main, other = pty.openpty(); print("terminal", os.isatty(other))
"""


def openssl(*arguments, text=""):
    return subprocess.run(["openssl", *arguments], input=text, capture_output=True, text=True)


def is_address(host):
    return host[0].isdigit()


def shown_certificate(place, host):
    """What proxyd shows for the host, by OpenSSL's client, which verifies as well; PEM."""
    authority = f"[{host}]:443" if ":" in host else f"{host}:443"
    name = ["-noservername"] if is_address(host) else ["-servername", host]
    inside = place.command(
        "exec", "--environment", "chains", "--", "openssl", "s_client", "-connect", authority, *name,
        "-x509_strict", "-verify_return_error", "-verify", "5",
        "-verify_ip" if is_address(host) else "-verify_hostname", host)
    text = inside.stdout.decode(errors="replace")
    shown = text + inside.stderr.decode(errors="replace")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    if inside.returncode or begin not in text or "Verify return code: 0 (ok)" not in text:
        return None, shown
    return text[text.index(begin):text.index(end) + len(end)] + "\n", shown


with Place() as place:
    claims = Claims()
    place.cleanhands({"chains": POLICY}, {})
    inside = place.command("exec", "--environment", "chains", "--", "cat", "/etc/ssl/cleanhands-ca.pem")
    authority = place.root / "proxyd-ca.pem"
    authority.write_bytes(inside.stdout)
    strict = ["verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", str(authority)]

    own = openssl("verify", "-x509_strict", "-check_ss_sig", "-CAfile", str(authority), str(authority))
    claims.holds("OpenSSL takes the authority itself by its strict rules", own.returncode == 0, own.stderr)
    leaves = {}
    for number, host in enumerate(HOSTS):
        leaf = leaves[host] = place.root / f"leaf-{number}.pem"
        short = host if len(host) < 40 else f"a name of {len(host)} characters"
        kind = "-verify_ip" if is_address(host) else "-verify_hostname"
        pem, shown = shown_certificate(place, host)
        claims.holds(f"OpenSSL's client in a sandbox takes the chain for {short}", pem, shown)
        leaf.write_text(pem)
        right = openssl(*strict, kind, host, str(leaf))
        claims.holds(f"OpenSSL takes the leaf for {short} by its strict rules", right.returncode == 0, right.stderr)
        wrong = openssl(*strict, kind, "10.9.8.9" if is_address(host) else "other.example", str(leaf))
        claims.holds(f"and for no other than {short}", wrong.returncode != 0, wrong.stdout)

    verifiers.judge(claims, place, authority, leaves)

    now = int(time.time())
    end = openssl("x509", "-noout", "-enddate", "-dateopt", "iso_8601", text=pem).stdout.strip()
    ends = calendar.timegm(time.strptime(end, "notAfter=%Y-%m-%d %H:%M:%SZ"))
    for what, moment, expected in [
        ("an hour slow", now - 59 * 60, True),
        ("five minutes fast", now + 5 * 60, True),
        ("three days slow", now - 3 * 86400, False),
        ("past the leaf's end", ends + 1, False),
    ]:
        judged = openssl(*strict, "-attime", str(moment), str(leaf))
        verb = "takes" if expected else "refuses"
        claims.holds(f"OpenSSL {verb} the leaf by a clock that is {what}",
                     (judged.returncode == 0) == expected, judged.stdout + judged.stderr)

    inside = place.command("exec", "--environment", "chains", "--", "python3", "-c", JUDGE, json.dumps(HOSTS))
    shown = (inside.stdout + inside.stderr).decode(errors="replace")
    taken = inside.stdout.decode().splitlines()
    claims.holds("Python in a sandbox takes every chain, strict and not, partial and not",
                 inside.returncode == 0 and len(taken) == 3 * len(HOSTS), shown)
    claims.holds("no leaf has a name in its subject", all(t.endswith(" 0") for t in taken), shown)

    inside = place.command("exec", "--environment", "chains", "--", "python3", "-c", RUNTIME)
    claims.holds("Python's processes, queues, threads and terminals work in a sandbox",
                 inside.stdout.decode() ==
                 "['thread'] [1, 2]\nqueue 1\nchild\nshm 1\nterminal True\n",
                 (inside.stdout + inside.stderr).decode(errors="replace"))
    claims.close()

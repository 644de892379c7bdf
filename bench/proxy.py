"""The proxy rows: requests through proxyd with injection, search and audit, against nginx and direct.

Everything takes turns within one run: in each round every row runs on every peer, another peer first
each round; a row's figures are medians over the rounds. The proxy runs on CPU 1, the generator and
the upstream on CPU 0; for `direct` a second upstream runs on CPU 1, so that each hop crosses CPUs
there too. With --one-cpu everything shares CPU 1, with --no-pin the scheduler places all.

  proxy.py [--one-cpu | --no-pin] [--rounds N] [--rows keep1,keep16,…] [--peers direct,nginx,…]
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import textwrap

from support import Place, free_port, port_answers, wait_for

LOADGEN = os.environ["LOADGEN"]
PROXYD = os.environ.get("PROXYD", f"{os.environ['CLEANHANDS_BIN']} proxyd").split()
HOST = "bench.example"
SECRET = "SECRET-CANARY-bench-0123456789"
RULE = """
    [[egress.allow]]
    hosts = ["bench.example", "*.bench.example"]
    methods = ["GET", "POST"]
    paths = ["/**"]
    addresses = ["127.0.0.1/32"]
"""
POLICIES = {
    # The whole path: a credential goes in, the answer is searched for it.
    "bench": RULE + """
    credential = "bench"
    [credentials.bench]
    secret = "local:bench"
    inject = { bearer = true }
    hosts = ["bench.example", "*.bench.example"]
    """,
    # The same rule without a credential: nothing is injected, so nothing is searched.
    "plain": RULE,
}
# kind of load, connections, seconds, peers that cannot take part
ROWS = {
    "keep1": ("keep", 1, 2, ()),
    "keep16": ("keep", 16, 2.5, ()),
    "keep64": ("keep", 64, 2.5, ()),
    "h2": ("h2", 4, 2.5, ()),
    "new1": ("new", 1, 2, ()),
    "new8": ("new", 8, 2.5, ()),
    "cold": ("cold:{}", 1, 0.4, ()),
    "down": ("down", 1, 3, ()),
    "gzip": ("gzip", 1, 3, ()),
    "up": ("up", 1, 3, ()),
    "sse": ("sse", 1, 2, ()),
    "mem": ("idle", 1000, 1, ("direct",)),
}
NGINX = """
    daemon off; worker_processes 1; worker_rlimit_nofile 20000;
    pid {root}/front.pid; error_log {root}/front-error.log crit;
    {user}
    events {{ worker_connections 8000; }}
    http {{
      access_log off; tcp_nodelay on; keepalive_timeout 900s; keepalive_requests 1000000000;
      client_max_body_size 0;
      client_body_temp_path {root}/n1; proxy_temp_path {root}/n2; fastcgi_temp_path {root}/n3;
      uwsgi_temp_path {root}/n4; scgi_temp_path {root}/n5;
      upstream main {{ server 127.0.0.1:{upstream}; keepalive 1200; keepalive_requests 1000000000;
                       keepalive_timeout 900s; }}
      proxy_http_version 1.1; proxy_set_header Connection ""; proxy_set_header Host $http_host;
      proxy_set_header Authorization "Bearer {secret}";
      proxy_ssl_verify on; proxy_ssl_trusted_certificate {root}/ca.pem; proxy_ssl_name {host};
      proxy_ssl_server_name on; proxy_ssl_protocols TLSv1.3; proxy_max_temp_file_size 0;
      server {{
        listen 127.0.0.1:{port} ssl http2 backlog=4096; server_name _;
        ssl_certificate {root}/front.pem; ssl_certificate_key {root}/front.key;
        ssl_protocols TLSv1.3;
        location / {{ proxy_pass https://main; }}
        location /sse {{ proxy_pass https://main; proxy_buffering off; }}
        location /up {{ proxy_pass https://main; proxy_request_buffering off; }}
      }}
    }}
"""


@contextlib.contextmanager
def on(cpus):
    """What is started inside runs on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    yield
    os.sched_setaffinity(0, before)


def children(pid):
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as f:
            for child in f.read().split():
                found += children(int(child))
    return found


def start_proxyd(place, upstreams):
    """proxyd alone, as `cleanhands up` starts it, with the ports that hosts are dialled at; gives its
    process and that of its vault."""
    for name in ("run", "state", "policies", "config"):
        (place.root / name).mkdir(mode=0o700)
    for name, text in POLICIES.items():
        (place.root / f"policies/{name}.toml").write_text(textwrap.dedent(text))
    (place.root / "config/proxyd.toml").write_text("".join(
        f'[upstreams."{host}"]\ndial = "127.0.0.1:{port}"\nca = "{place.root}/ca.pem"\n'
        for host, port in upstreams.items()))
    for path in [*(place.root / "policies").iterdir(), *(place.root / "config").iterdir()]:
        path.chmod(0o600)
    place.start("proxyd", [
        *PROXYD, "--config", f"{place.root}/config/proxyd.toml", "--runtime-dir",
        f"{place.root}/run", "--state-dir", f"{place.root}/state", "--policies-dir",
        f"{place.root}/policies"])
    proxyd = place.processes[-1][1]

    def served():
        if proxyd.poll() is not None:
            raise SystemExit(f"proxyd ended:\n{place.log('proxyd')}")
        with socket.socket(socket.AF_UNIX) as s:
            return s.connect_ex(f"{place.root}/run/proxyd.sock") == 0

    wait_for("proxyd to serve", 30, served)
    place.store_secret("bench", SECRET)
    return children(proxyd.pid)


def open_lease(place, environment):
    """An explicit lease, as anything that is no sandbox of ours gets one; gives token and CA."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(str(place.root / "run/proxyd-lease.sock"))
    channel.send(json.dumps({
        "type": "open", "version": 1, "lease": f"bench-{environment}", "holder": "explicit",
        "environment": environment, "owner": f"uid:{os.getuid()}", "sandbox": None,
        "session": None, "descriptors": []}).encode())
    answer = json.loads(channel.recv(1 << 20))
    if answer["type"] != "opened":
        raise SystemExit(f"no lease: {answer}")
    ca = place.root / f"lease-{environment}.pem"
    ca.write_text(answer["ca_pem"])
    return {"token": answer["token"], "ca": str(ca), "channel": channel}


def start(place, cpus):
    """The peers by name: how the generator reaches them, and whose CPU time counts."""
    root = place.root

    def upstream(name, where):
        port_file, ca = root / f"{name}-port", root / f"{name}-ca" / "ca.pem"
        ca.parent.mkdir()
        with on(where):
            place.start(name, [LOADGEN, "serve", HOST, str(ca), str(port_file)])
        wait_for(name, 10, lambda: port_file.exists() and port_file.read_text())
        return int(port_file.read_text()), str(ca), place.processes[-1][1].pid

    near, near_ca, near_pid = upstream("upstream-direct", cpus["proxy"])
    port, ca, _ = upstream("upstream", cpus["load"])
    for file in ("ca.pem", "front.pem", "front.key"):
        shutil.copy(root / "upstream-ca" / file, root / file)
    front = free_port()
    (root / "front.conf").write_text(textwrap.dedent(NGINX.format(
        root=root, port=front, upstream=port, host=HOST, secret=SECRET,
        user="user root;" if os.getuid() == 0 else "")))
    with on(cpus["proxy"]):
        program = shutil.which("nginx") or "/usr/sbin/nginx"
        place.start("front", [program, "-p", str(root), "-c", str(root / "front.conf")])
        nginx = place.processes[-1][1].pid
        wait_for("nginx to listen", 15, lambda: port_answers(front))
        ours = start_proxyd(place, dict.fromkeys([HOST, f"*.{HOST}"], port))
    peers = {
        "direct": {"via": f"127.0.0.1:{near}", "ca": near_ca, "pids": [near_pid]},
        "nginx": {"via": f"127.0.0.1:{front}", "ca": ca, "pids": children(nginx)},
    }
    for name, environment in (("proxyd", "bench"), ("proxyd, no credential", "plain")):
        lease = open_lease(place, environment)
        peers[name] = {"via": f"unix:{root}/run/proxyd-egress.sock", "pids": ours, **lease}
    return peers


def measure(peer, row, cold, cpus):
    kind, connections, seconds, _ = ROWS[row]
    argv = [LOADGEN, "load", kind.format(cold), HOST, peer["via"], peer["ca"], str(connections),
            str(seconds), *map(str, peer["pids"])]
    with on(cpus["load"]):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120,
                              env={**os.environ, "LEASE_TOKEN": peer.get("token", "")})
    if done.returncode:
        raise SystemExit(f"load generator failed: {row}: {done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def show(row, results):
    middle = lambda name, key: statistics.median(r[key] for r in results[name])
    for name in results:
        if row == "mem":
            print(f"{row:7} {name:22} idle {middle(name, 'idle_mib'):6.1f} MiB   with 1000 connections"
                  f" {middle(name, 'loaded_mib'):6.1f} MiB   each {middle(name, 'each_kib'):5.1f} KiB")
            continue
        rate = "mb_s" if row in ("down", "gzip", "up") else "rps"
        ratio = lambda base, key: (f"{middle(name, key) / middle(base, key):5.2f}"
                                   if base in results and middle(base, key) else "    -")
        text = f"{row:7} {name:22} {middle(name, rate):9.0f} {'MB/s ' if rate == 'mb_s' else 'req/s'}"
        text += f"  of direct {ratio('direct', rate)}  of nginx {ratio('nginx', rate)}"
        if rate == "mb_s":
            text += f"  CPU {middle(name, 'cpu_s_gib'):5.2f} s/GiB"
        else:
            text += (f"  p50 {middle(name, 'p50_us'):7.0f} us (of direct {ratio('direct', 'p50_us')})"
                     f"  p99 {middle(name, 'p99_us'):7.0f} us  CPU {middle(name, 'cpu_us'):7.2f} us"
                     f" (of nginx {ratio('nginx', 'cpu_us')})")
        if row == "sse":
            text += f"  each event p50 {middle(name, 'event_p50_us'):5.0f} us"
        print(text)


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench/run proxy")
    parser.add_argument("--one-cpu", action="store_true")
    parser.add_argument("--no-pin", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--peers")
    a = parser.parse_args(arguments)
    cpus = {"proxy": {1}, "load": {1} if a.one_cpu else {0}}
    if a.no_pin or os.cpu_count() == 1:
        cpus = {"proxy": None, "load": None}
    with Place() as place:
        peers = start(place, cpus)
        if a.peers:
            peers = {name: peers[name] for name in a.peers.split(",")}
        placed = "one CPU" if a.one_cpu else "unpinned" if a.no_pin else "proxy on its own CPU"
        print(f"proxy     {placed}, medians of {a.rounds} rounds, load average {os.getloadavg()[0]:.1f}")
        cold = 0
        for row in a.rows.split(","):
            results = {}
            rounds = 1 if row == "mem" else a.rounds
            for number in range(rounds):
                order = [name for name in peers if name not in ROWS[row][3]]
                if row == "cold":
                    # nginx has one certificate for all names; the other two forge.
                    order = [name for name in order if name != "proxyd, no credential"]
                for name in order[number % len(order):] + order[:number % len(order)]:
                    results.setdefault(name, []).append(measure(peers[name], row, cold, cpus))
                    if row == "cold" and name == "proxyd":
                        cold += results[name][-1]["requests"] + 1
            show(row, {name: results[name] for name in peers if name in results})
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

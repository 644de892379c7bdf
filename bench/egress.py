"""The way out of a sandbox, and what one sandbox costs the others.

new1, cold, keep1
        a new connection with a request, one to a name not seen before, a request on a kept
        connection: p50 from inside a sandbox, where the way to proxyd is plain TCP and nobody asks
        for a CONNECT, and direct to an upstream outside
touch   a connection and one byte there and back through a tunnel: from inside a sandbox, and by the
        same program outside with a lease
pull    bytes down such a tunnel
busy    requests of ten sandboxes at a hundred a second each, alone and beside a sandbox whose
        sixteen connections ask as fast as they can: the worst of a hundred
audit   records that are on disk, a second, through the audit's own code (proxyd's example
        bench_audit)
render  what a credential costs that the vault's process renders, each for a host not seen before
        (proxyd's example bench_render): time and CPU of both processes

What is compared takes turns; figures are medians over the rounds.

  egress.py [--rounds N] [--rows new1,cold,keep1,touch,pull,busy,audit,render]
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys

from proxy import open_lease
from support import COMMAND, Place, wait_for

LOADGEN = os.environ["LOADGEN"]
ROWS = ("new1", "cold", "keep1", "touch", "pull", "busy", "audit", "render")
WEB, RAW = "web.example", "raw.example"
SECRET = "SECRET-CANARY-egress-0123456789"
POLICY = """
    [sandbox]
    root = "host"
    idle-timeout = "10m"
    mounts = [{{ source = "{tools}", target = "/opt/bench" }}]
    [[egress.allow]]
    hosts = ["web.example", "*.web.example"]
    methods = ["GET"]
    addresses = ["127.0.0.1/32"]
    credential = "web"
    [[egress.allow]]
    hosts = ["raw.example"]
    ports = [{raw}]
    addresses = ["127.0.0.1/32"]
    [credentials.web]
    secret = "local:web"
    inject = {{ bearer = true }}
    hosts = ["web.example", "*.web.example"]
"""
SANDBOXES, SECONDS = 10, 3


def start(place):
    """Upstreams and the daemons; gives the port of the plain one."""
    tools = place.root / "tools"
    tools.mkdir(mode=0o755)
    shutil.copy(LOADGEN, tools / "loadgen")
    ports = {}
    for name, argv in (("web", ["serve", WEB, str(place.root / "ca.pem")]), ("raw", ["raw-serve"])):
        port_file = place.root / f"{name}-port"
        place.start(name, [LOADGEN, *argv, str(port_file)])
        wait_for(name, 10, lambda: port_file.exists() and port_file.read_text())
        ports[name] = int(port_file.read_text())
    place.cleanhands({"bench": POLICY.format(tools=tools, **ports)},
                     {WEB: ports["web"], f"*.{WEB}": ports["web"], RAW: ports["raw"]})
    place.store_secret("web", SECRET)
    return ports


def inside(place, script):
    """The load generator in a sandbox of its own; its words are the shell's."""
    return subprocess.Popen(
        [COMMAND, "exec", "--runtime-dir", str(place.root / "run"), "--environment", "bench", "--",
         "sh", "-c", f"exec /opt/bench/loadgen {script}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outside(arguments, token):
    return subprocess.Popen([LOADGEN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, "LEASE_TOKEN": token})


def ended(process, patience=120):
    out, err = process.communicate(timeout=patience)
    if process.returncode:
        raise SystemExit(f"load generator failed: {out}{err}")
    return json.loads(out.strip().splitlines()[-1])


def of_direct(place, port, row, rounds):
    """Intercepted requests from inside a sandbox, and without anything between outside."""
    kind, found, cold = {"new1": "new", "cold": "cold:{}", "keep1": "keep"}[row], {}, 0
    for _ in range(rounds):
        load, seconds = ["load", kind.format(cold), WEB], "0.5" if row == "cold" else "2"
        via = f'{WEB}:443 "$SSL_CERT_FILE"'
        if row == "cold":
            # Each name has an address of its own in there.
            via = f'names:443 "$SSL_CERT_FILE"'
        sandbox = ended(inside(place, f"{' '.join(load)} {via} 1 {seconds}"))
        direct = ended(outside([*load, f"127.0.0.1:{port}", str(place.root / "ca.pem"), "1",
                                seconds], ""))
        cold += sandbox["requests"] + 1
        for name, one in (("sandbox", sandbox), ("direct", direct)):
            found.setdefault(name, []).append(one["p50_us"])
    sandbox, direct = (statistics.median(found[name]) for name in ("sandbox", "direct"))
    print(f"{row:7} from a sandbox {sandbox:9.0f} us   direct {direct:9.0f} us   ratio "
          f"{sandbox / direct:.2f}   added {sandbox - direct:.0f} us", flush=True)


def both(place, raw, rounds):
    """The same program inside and outside, in turn: touch and pull."""
    lease = open_lease(place, "bench")
    via = f"unix:{place.root}/run/proxyd-egress.sock"
    for row, key, unit in (("touch", "p50_us", "us"), ("pull", "mb_s", "MB/s")):
        found = {"inside": [], "outside": []}
        for _ in range(rounds):
            found["inside"].append(
                ended(inside(place, f"{row} {RAW} {raw} {RAW}:{raw} 2"))[key])
            found["outside"].append(
                ended(outside([row, RAW, str(raw), via, "2"], lease["token"]))[key])
        medians = {name: statistics.median(values) for name, values in found.items()}
        print(f"{row:7} from a sandbox {medians['inside']:9.0f} {unit}   by a lease outside "
              f"{medians['outside']:9.0f} {unit}   ratio {medians['inside'] / medians['outside']:.2f}",
              flush=True)
    lease["channel"].close()


def busy(place, rounds):
    """p99 of ten sandboxes that do little, without and with one that does much."""
    worst = {"quiet": [], "beside one busy": []}
    for _ in range(rounds):
        for name in worst:
            with contextlib.ExitStack() as beside:
                if name != "quiet":
                    loud = inside(place, f'load keep {WEB} {WEB}:443 "$SSL_CERT_FILE" 16 '
                                         f"{SECONDS + 4}")
                    beside.callback(lambda: ended(loud))
                light = [inside(place, f'paced {WEB} {WEB}:443 "$SSL_CERT_FILE" {SECONDS}')
                         for _ in range(SANDBOXES)]
                worst[name].append(statistics.median(ended(one)["p99_us"] for one in light))
    medians = {name: statistics.median(values) for name, values in worst.items()}
    print(f"busy    p99 of {SANDBOXES} sandboxes {medians['quiet']:9.0f} us quiet   "
          f"{medians['beside one busy']:9.0f} us beside a busy one   ratio "
          f"{medians['beside one busy'] / medians['quiet']:.2f}", flush=True)


def audit(place, rounds):
    program = os.environ["BENCH_AUDIT"]
    rates = []
    for number in range(rounds):
        directory = place.root / f"audit-{number}"
        done = subprocess.run([program, str(directory)], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise SystemExit(f"{program} failed: {done.stderr}")
        rates.append(json.loads(done.stdout))
    rate, cpu = (statistics.median(one[key] for one in rates) for key in ("rate", "cpu_us"))
    print(f"audit   {rate:9.0f} durable records/s   CPU {cpu:.2f} us a record", flush=True)


def render(place, rounds):
    program = os.environ["BENCH_RENDER"]
    rates = []
    for number in range(rounds):
        directory = place.root / f"render-{number}"
        done = subprocess.run([program, str(directory)], capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise SystemExit(f"{program} failed: {done.stderr}")
        rates.append(json.loads(done.stdout))
    middle = {key: statistics.median(one[key] for one in rates) for key in rates[0]}
    print(f"render  {middle['render_us']:9.1f} us each, of a round trip on such a socket "
          f"{middle['render_us'] / middle['trip_us']:.2f}   CPU {middle['cpu_us']:.1f} us", flush=True)


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench/run egress")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(ROWS))
    a = parser.parse_args(arguments)
    rows = a.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"{' '.join(unknown)}: there are {', '.join(ROWS)}")
    with Place() as place:
        print(f"egress    medians of {a.rounds} rounds, load average {os.getloadavg()[0]:.1f}")
        if set(rows) - {"audit", "render"}:
            ports = start(place)
            for row in ("new1", "cold", "keep1"):
                if row in rows:
                    of_direct(place, ports["web"], row, a.rounds)
            if {"touch", "pull"} & set(rows):
                both(place, ports["raw"], a.rounds)
            if "busy" in rows:
                busy(place, a.rounds)
        if "audit" in rows:
            audit(place, a.rounds)
        if "render" in rows:
            render(place, a.rounds)


if __name__ == "__main__":
    main(sys.argv[1:])

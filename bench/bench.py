"""The rows `sandbox` and `token` of bench/run. Peer and ours in turn, medians over the rounds."""

import array
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

from support import COMMAND, Place, call, wait_for

LOADGEN = os.environ["LOADGEN"]
HOST = "bench.example"
ROUNDS = 40
POLICIES = {
    "bench": """
        [sandbox]
        root = "host"
        [[egress.allow]]
        hosts = ["bench.example"]
        methods = ["GET"]
        paths = ["/**"]
        credential = "bench"
        addresses = ["127.0.0.1/32"]
        [credentials.bench]
        secret = "local:bench"
        inject = { bearer = true }
        hosts = ["bench.example"]
    """,
}
MODEL_FIRST_TOKEN_MS = 50
SCRIPT = {"turns": [{"text": "A short answer with no tool.", "first_token_ms": MODEL_FIRST_TOKEN_MS, "chunk_ms": 0}]}
BWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin",
         "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc",
         "--dev", "/dev", "--tmpfs", "/tmp", "/bin/true"]


def timed(run):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def spawned(argv):
    return lambda: subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def executed(path):
    """One Exec over sandboxd's socket, as the command itself does it, without a process of its own."""
    null = os.open(os.devnull, os.O_RDWR)
    request = json.dumps({"type": "exec", "environment": "bench", "argv": ["/bin/true"], "env": [],
                          "path": None}).encode()

    def run():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.connect(path)
            s.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 3))])
            while True:
                answer = json.loads(s.recv(65536))
                if answer["type"] == "refused":
                    raise SystemExit(f"sandboxd refused: {answer}")
                if answer["type"] == "exited":
                    assert answer["exit_code"] == 0, answer
                    return
    return run


def sandbox(place):
    runs = {
        "bare exec": spawned(["/bin/true"]),
        "bubblewrap": spawned(BWRAP),
        "exec over the socket": executed(str(place.root / "run/sandboxd-exec.sock")),
    }
    times = {name: [] for name in runs}
    for _ in range(5):
        for run in runs.values():
            run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(timed(run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"sandbox   {name:24} p50 {value:7.2f} ms   of bubblewrap {value / medians['bubblewrap']:5.2f}"
              f"   of a bare exec {value / medians['bare exec']:5.2f}")


def token(path):
    environment = call(path, "POST", "/v1/environments", {
        "name": "bench", "metadata": {"policy": "bench"}, "config": {"type": "cloud"}})["id"]
    agent = call(path, "POST", "/v1/agents", {
        "name": "bench", "model": "scripted", "tools": [{"type": "agent_toolset_20260401"}]})["id"]
    added = []
    for _ in range(ROUNDS):
        session = call(path, "POST", "/v1/sessions", {"agent": agent, "environment_id": environment})["id"]
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
            s.sendall(f"GET /v1/sessions/{session}/events/stream?event_deltas%5B%5D=agent.message HTTP/1.1\r\n"
                      "host: localhost\r\n\r\n".encode())
            seen = s.recv(65536)
            start = time.perf_counter()
            call(path, "POST", f"/v1/sessions/{session}/events", {"events": [
                {"type": "user.message", "content": [{"type": "text", "text": "hello"}]}]})
            s.settimeout(30)
            while b"event: event_delta" not in seen:
                seen += s.recv(65536)
            added.append((time.perf_counter() - start) * 1000)
    p50 = statistics.median(added)
    p95 = sorted(added)[int(len(added) * 0.95)]
    print(f"token     the model's own first token {MODEL_FIRST_TOKEN_MS} ms; seen by the client after p50 {p50:.1f} ms"
          f" (x{p50 / MODEL_FIRST_TOKEN_MS:.2f}), p95 {p95:.1f} ms; no sandbox was made")


def main():
    with Place() as place:
        port_file = place.root / "upstream-port"
        place.start("upstream", [LOADGEN, "serve", HOST, str(place.root / "ca.pem"), str(port_file)])
        wait_for("the upstream", 10, lambda: port_file.exists() and port_file.read_text())
        port = int(port_file.read_text())
        script = place.root / "script.json"
        script.write_text(json.dumps(SCRIPT))
        path = place.cleanhands(POLICIES, {HOST: port}, f"""
            default-environment = "bench"
            [models."*"]
            provider = "scripted"
            script = "{script}"
        """)
        place.store_secret("bench", "SECRET-CANARY-bench-0123456789")
        model = pathlib.Path("/proc/cpuinfo").read_text().split("model name")[1].split("\n")[0].strip("\t: ")
        print(f"machine   {os.cpu_count()} processors ({model}), Linux {os.uname().release}", flush=True)
        rows = {"sandbox": lambda: sandbox(place), "token": lambda: token(str(path))}
        for name in sys.argv[1:] or rows:
            rows[name]()
            sys.stdout.flush()


main()

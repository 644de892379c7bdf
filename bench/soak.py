"""A soak: proxyd under load for a long time, with policies that change and an upstream that dies.

Load of every kind goes to one host without a pause: not one request of it may fail. Clients of
another host meet an upstream whose connections are reset every few seconds and refused for a while:
they are answered or cut off while it is down, and answered again when it is up. Meanwhile the policy
file changes, by rewriting it and by SIGHUP in turn. Before and after, with everything idle, memory,
descriptors and threads of proxyd are compared.

  soak.py [--minutes N]
"""

import argparse
import collections
import json
import os
import pathlib
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time

import proxy
from support import Place, free_port, wait_for

DYING = "dying.bench.example"
# One after the other, again and again: kind, connections.
LOADS = [("keep", 16), ("h2", 4), ("new", 8), ("sse", 2), ("down", 2), ("up", 2)]
LOAD_SECONDS = 10
# Idle connections are kept for up to a minute, leaves and renderings longer.
SETTLE_SECONDS = 80
CLIENTS = 8
# An answer may take this long to notice that the upstream has gone or is back.
SLACK_SECONDS = 2
SPARE_RULE = '\n[[egress.allow]]\nhosts = ["spare.bench.example"]\nmethods = ["GET"]\n'


class Upstream:
    """Passes connections on to a port, until it is told to die: then it resets them all."""

    def __init__(self, target):
        self.port, self.target = free_port(), target
        self.open, self.lock, self.listener = set(), threading.Lock(), None
        # When it was down, as (from, to); `to` is open-ended while it is.
        self.outages = []
        self.rise()

    def rise(self):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        self.listener = listener
        if self.outages:
            self.outages[-1][1] = time.monotonic()
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()

    def die(self):
        self.outages.append([time.monotonic(), float("inf")])
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            for one in self.open:
                # Closing with no time to linger is a reset.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def accept(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self.carry, args=(a, b), daemon=True).start()

    def carry(self, source, sink):
        with self.lock:
            self.open.add(source)
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            with self.lock:
                self.open.discard(source)
            for one in (source, sink):
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            source.close()

    def was_down(self, begin, end):
        return any(begin < to + SLACK_SECONDS and end > since - SLACK_SECONDS
                   for since, to in self.outages)


class Client(threading.Thread):
    """Asks the dying host again and again, and keeps what came of it."""

    def __init__(self, path, lease, upstream, ended):
        super().__init__(daemon=True)
        self.path, self.lease, self.upstream, self.ended = path, lease, upstream, ended
        self.outcomes, self.faults = collections.Counter(), []
        self.context = ssl.create_default_context(cafile=lease["ca"])

    def run(self):
        stream = None
        while not self.ended.is_set():
            begin = time.monotonic()
            try:
                stream = stream or self.connect()
                status = self.ask(stream)
            except TimeoutError:
                status, stream = "silence", None
            except OSError as error:
                status, stream = f"cut off ({type(error).__name__})", None
            self.outcomes[status] += 1
            if status != 200:
                stream = None
            if status == "silence" or status != 200 and not self.upstream.was_down(
                    begin, time.monotonic()):
                self.faults.append(f"{status} after {time.monotonic() - begin:.1f} s while it was up")
            self.ended.wait(0.02)

    def connect(self):
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(30)
        plain.connect(self.path)
        plain.sendall(f"CONNECT {DYING}:443 HTTP/1.1\r\nHost: {DYING}:443\r\n"
                      f"Proxy-Authorization: Bearer {self.lease['token']}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            part = plain.recv(1)
            if not part:
                raise ConnectionError("no tunnel")
            head += part
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(head.split(b"\r\n")[0].decode())
        return self.context.wrap_socket(plain, server_hostname=DYING)

    def ask(self, stream):
        stream.sendall(f"GET /200 HTTP/1.1\r\nHost: {DYING}\r\n\r\n".encode())
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.part(stream)
        head, body = data.split(b"\r\n\r\n", 1)
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n")
                      if line.lower().startswith(b"content-length:"))
        while len(body) < length:
            body += self.part(stream)
        return int(head.split(b" ")[1])

    @staticmethod
    def part(stream):
        part = stream.recv(65536)
        if not part:
            raise ConnectionError("ended")
        return part


def state(pids):
    """Memory in MiB, descriptors and threads of the processes together."""
    memory = files = threads = 0
    for pid in pids:
        fields = dict(line.split(":", 1) for line in
                      pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        memory += int(fields["VmRSS"].split()[0]) / 1024
        threads += int(fields["Threads"])
        files += len(os.listdir(f"/proc/{pid}/fd"))
    return memory, files, threads


def settled(pids):
    """The state once nothing moves any more: the lowest number of descriptors within the time."""
    best = None
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        best = min(best or state(pids), state(pids), key=lambda s: s[1])
        time.sleep(1)
    return min(best, state(pids), key=lambda s: s[1])


def load(kind, connections, peer, seconds):
    argv = [proxy.LOADGEN, "load", kind, proxy.HOST, peer["via"], peer["ca"], str(connections),
            str(seconds), *map(str, peer["pids"])]
    return subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60,
                          env={**os.environ, "LEASE_TOKEN": peer["token"]})


def change_policies(place, pid, ended):
    """Every other second a rule that nobody uses comes or goes; counts the changes."""
    path, text = place.root / "policies/bench.toml", None
    text, count = path.read_text(), 0
    while not ended.wait(2):
        new = place.root / "policies/next"
        new.write_text(text + (SPARE_RULE if count % 2 == 0 else ""))
        new.chmod(0o600)
        new.rename(path)
        if count % 2:
            os.kill(pid, signal.SIGHUP)
        count += 1
    return count


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench/run soak")
    parser.add_argument("--minutes", type=float, default=30)
    a = parser.parse_args(arguments)
    problems = []
    with Place() as place:
        port_file, ca = place.root / "port", place.root / "ca.pem"
        place.start("upstream", [proxy.LOADGEN, "serve", proxy.HOST, str(ca), str(port_file)])
        wait_for("the upstream", 10, lambda: port_file.exists() and port_file.read_text())
        port = int(port_file.read_text())
        dying = Upstream(port)
        pids = proxy.start_proxyd(place, {proxy.HOST: port, DYING: dying.port})
        lease = proxy.open_lease(place, "bench")
        path = str(place.root / "run/proxyd-egress.sock")
        peer = {"via": f"unix:{path}", "pids": pids, **lease}

        for kind, connections in LOADS:
            done = load(kind, connections, peer, 2)
            if done.returncode:
                raise SystemExit(f"warm-up: {kind}: {done.stdout}{done.stderr}")
        base = settled(pids)
        print(f"soak      idle before: {base[0]:.1f} MiB, {base[1]} descriptors, {base[2]} threads", flush=True)

        ended = threading.Event()
        clients = [Client(path, lease, dying, ended) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        changes = []
        changer = threading.Thread(target=lambda: changes.append(change_policies(place, pids[0], ended)))
        changer.start()

        def kill_upstream():
            while not ended.wait(7):
                dying.die()
                ended.wait(1.5)
                dying.rise()

        killer = threading.Thread(target=kill_upstream)
        killer.start()
        requests, peak, begin, number = collections.Counter(), 0, time.monotonic(), 0
        while time.monotonic() - begin < a.minutes * 60:
            kind, connections = LOADS[number % len(LOADS)]
            number += 1
            done = load(kind, connections, peer, LOAD_SECONDS)
            if done.returncode:
                problems.append(f"{kind}: {done.stdout.strip()} {done.stderr.strip()}")
                print(f"soak      FAILED after {time.monotonic() - begin:.0f} s: {problems[-1]}", flush=True)
            else:
                requests[kind] += json.loads(done.stdout.strip().splitlines()[-1]).get("requests", 0)
            peak = max(peak, state(pids)[0])
        ended.set()
        for thread in [*clients, changer, killer]:
            thread.join(60)
        outcomes = sum((client.outcomes for client in clients), collections.Counter())
        faults = [fault for client in clients for fault in client.faults]
        after = settled(pids)
        print(f"soak      {a.minutes:g} minutes; requests {dict(requests)}; {changes[0]} changes of policy;"
              f" upstream died {len(dying.outages)} times, seen as {dict(outcomes)}")
        print(f"soak      idle after: {after[0]:.1f} MiB (peak {peak:.1f}), {after[1]} descriptors,"
              f" {after[2]} threads", flush=True)
        if faults:
            problems.append(f"{len(faults)} faults at the dying upstream, the first: {faults[0]}")
        if not outcomes[200] or not dying.outages or not requests:
            problems.append("the soak did not do what it is for")
        if after[1] > base[1] + 4 or after[2] > base[2] + 1:
            problems.append("descriptors or threads did not come back to what they were")
        if after[0] > base[0] * 1.25 + 8:
            problems.append("memory did not come back to what it was")
    for problem in problems:
        print(f"soak      FAILED: {problem}")
    print(f"{0 if problems else 1} passed, {len(problems)} failed")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

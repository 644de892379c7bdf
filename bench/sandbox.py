"""What a sandbox costs: start, second command, density, end, against a bare exec and peers.

Ours and the peers in turn, medians over the rounds; ratios hold for this machine and moment.
"""

import array
import contextlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import sys
import time

from support import Place, call, wait_for

ROUNDS = int(os.environ.get("ROUNDS", "60"))
IDLE = int(os.environ.get("IDLE", "1000"))
POLICY = '[sandbox]\nroot = "host"\nidle-timeout = "1h"\n'
TRUE = "/bin/true"
# What is measured when a program of that name is here; each with all the namespaces it offers.
USR = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
       "--symlink", "usr/lib64", "/lib64"]
PEERS = {
    "bubblewrap": ["bwrap", "--unshare-all", *USR, "--proc", "/proc", "--dev", "/dev",
                   "--tmpfs", "/tmp", TRUE],
    "unshare": ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc",
                "--uts", "--cgroup", "--fork", TRUE],
    "nsjail": ["nsjail", "-Q", "-Mo", "-R", "/usr", "-R", "/lib", "-R", "/lib64", "-R", "/bin",
               "--", TRUE],
    "srt": ["srt", TRUE],
}


def timed(run):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def spawned(argv):
    """A whole process, from the call that starts it to its status."""
    program = shutil.which(argv[0])
    null = os.open(os.devnull, os.O_RDWR)
    actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)]

    def run():
        pid = os.posix_spawn(program, argv, os.environ, file_actions=actions)
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{argv[0]} ended with status {os.waitstatus_to_exitcode(status)}")
    return run


class Held:
    """An exec whose sandbox lives for as long as its connection does."""

    def __init__(self, path, argv):
        null = os.open(os.devnull, os.O_RDWR)
        request = json.dumps({"type": "exec", "environment": "bench", "argv": argv, "env": [],
                              "path": None}).encode()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)
        self.socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS,
                                         array.array("i", [null] * 3))])
        os.close(null)

    def wait_for(self, kind):
        while True:
            answer = json.loads(self.socket.recv(1 << 16) or b'{"type":"closed"}')
            if answer["type"] == kind:
                return answer
            if answer["type"] in ("refused", "closed"):
                raise SystemExit(f"sandboxd: {answer}")


def executed(path):
    def run():
        held = Held(path, [TRUE])
        assert held.wait_for("exited")["exit_code"] == 0
        held.socket.close()
    return run


def called(path, session, number=iter(range(1 << 30))):
    """`/bin/true` as a tool call in a session whose sandbox lives."""
    def run():
        receipt = call(path, "POST", "/v1/execute", {
            "call": f"bench-{session}-{next(number)}", "session": session,
            "owner": f"uid:{os.getuid()}", "fence": 1, "journal": None, "environment": "bench",
            "workspace": None, "tool": "bash", "input": {"command": TRUE}})
        assert receipt["exit_code"] == 0, receipt
    return run


def memory(field="MemAvailable"):
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])


def show(name, value, medians):
    ratios = "".join(f"   of {peer} {value / medians[peer]:6.2f}"
                     for peer in ("bare exec", "bubblewrap") if peer in medians)
    print(f"sandbox   {name:34} p50 {value:8.3f} ms{ratios}", flush=True)


def starts(place, kind, measured, pause):
    sockets = place.root / "run"
    runs = {"bare exec": spawned([TRUE])}
    runs |= {name: spawned(argv) for name, argv in PEERS.items()
             if shutil.which(argv[0]) and (kind == "none ready" or name == "bubblewrap")}
    runs[f"exec over the socket, {kind}"] = executed(str(sockets / "sandboxd-exec.sock"))
    if kind == "none ready":
        runs["second call of a session"] = called(str(sockets / "sandboxd.sock"), "session-bench")
        runs["second call of a session"]()
    for _ in range(5):
        for run in runs.values():
            run()
            time.sleep(pause)
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(timed(run))
            time.sleep(pause)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        if name not in measured:
            show(name, value, medians)
    measured |= medians


def idle(place):
    path = str(place.root / "run/sandboxd-exec.sock")
    time.sleep(1)
    before, unreclaimable = memory(), memory("SUnreclaim")
    began = time.perf_counter()
    held = []
    for _ in range(IDLE):
        held.append(Held(path, ["/bin/sleep", "infinity"]))
        held[-1].wait_for("started")
    made = time.perf_counter() - began
    time.sleep(2)
    each, slab = (before - memory()) / IDLE, (memory("SUnreclaim") - unreclaimable) / IDLE
    print(f"sandbox   {IDLE} made one after another in {made:.2f} s ({IDLE / made:.0f}/s); each with a "
          f"sleeping command takes {each:.0f} KiB, {slab:.0f} of it slab", flush=True)
    began = time.perf_counter()
    for one in held:
        one.socket.close()
    control = str(place.root / "run/sandboxd.sock")
    wait_for("sandboxes to end", 60, lambda: not call(control, "GET", "/v1/sandboxes")["sandboxes"])
    print(f"sandbox   {IDLE} ended in {time.perf_counter() - began:.2f} s", flush=True)
    run = executed(path)
    after = [timed(run) for _ in range(10)]
    print(f"sandbox   the next starts took p50 {statistics.median(after):.2f} ms", flush=True)


def main():
    rows = ["none", "ready", "idle"]
    wanted = sys.argv[1:] or rows
    if unknown := [word for word in wanted if word not in rows]:
        print(f"bench/sandbox: {' '.join(unknown)}: there are {', '.join(rows)}", file=sys.stderr)
        sys.exit(2)
    measured = {}
    for row, kind, cells, pause in (("none", "none ready", 0, 0), ("ready", "cell ready", 8, 0.02)):
        if row in wanted:
            with place_with(cells) as place:
                starts(place, kind, measured, pause)
    if "idle" in wanted:
        with place_with(0) as place:
            idle(place)


@contextlib.contextmanager
def place_with(cells):
    """proxyd and sandboxd alone, in directories of their own."""
    with Place() as place:
        for name in ("run", "state", "policies"):
            (place.root / name).mkdir(mode=0o700)
        files = {"policies/bench.toml": POLICY, "sandboxd.toml":
                 f"cells-ready = {cells}\nsandboxes-max = {IDLE + 100}\n"}
        for name, text in files.items():
            path = place.root / name
            path.write_text(text)
            path.chmod(0o600)
        where = [f for name in ("runtime", "state", "policies")
                 for f in (f"--{name}-dir", str(place.root / name.replace("runtime", "run")))]
        place.start("proxyd", [os.environ["PROXYD_BIN"], "--log", "warn", *where])
        wait_for("proxyd", 20, (place.root / "run/proxyd-lease.sock").exists)
        place.start("sandboxd", [os.environ["SANDBOXD_BIN"], "--log", "warn", "--config",
                                 str(place.root / "sandboxd.toml"), *where])
        wait_for("sandboxd", 20, (place.root / "run/sandboxd-exec.sock").exists)
        yield place


if __name__ == "__main__":
    main()

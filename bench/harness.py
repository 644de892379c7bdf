"""harnessd: the log, the first token, turns, many sessions, deaths. Each row is a ratio of this run.

log      appends and wakes against raw SQLite and a short session (examples/bench_log)
token    first token decoupled, against a client that first has a sandbox made that takes so long
turn     what a turn costs beyond its model and its tool
scale    1,000 sessions at once, their turns, harnessd's memory
deaths   harnessd killed with 100 sessions in the middle of a turn, until each has its next request
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import tempfile
import time

from support import Place, call

RELEASE = pathlib.Path(os.environ["CLEANHANDS_BIN"]).parent
MODEL_MS = 50
SESSIONS = 1000
DEATHS = 100


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


class Harness:
    def __init__(self, path):
        self.path = str(path)
        self.environment = call(self.path, "POST", "/v1/environments", {
            "name": f"bench{random.random()}", "metadata": {"policy": "bench"}, "config": {"type": "cloud"}})["id"]
        self.agents = {}

    def session(self, model):
        if model not in self.agents:
            self.agents[model] = call(self.path, "POST", "/v1/agents", {
                "name": model, "model": model, "tools": [{"type": "agent_toolset_20260401"}]})["id"]
        return call(self.path, "POST", "/v1/sessions", {
            "agent": self.agents[model], "environment_id": self.environment})["id"]

    def say(self, session):
        call(self.path, "POST", f"/v1/sessions/{session}/events", {"events": [
            {"type": "user.message", "content": [{"type": "text", "text": "hello"}]}]})

    def log(self, session):
        return call(self.path, "GET", f"/cleanhands/v1/sessions/{session}/log?after=0&limit=1000")["events"]

    def until_idle(self, session):
        while True:
            events = self.log(session)
            if events[-1]["kind"] == "status_idle":
                return events
            time.sleep(0.02)

    def first_token(self, session, delay=0.0):
        """Seconds from the client's word to the first piece of the answer."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            s.connect(self.path)
            s.sendall(f"GET /v1/sessions/{session}/events/stream?event_deltas%5B%5D=agent.message HTTP/1.1\r\n"
                      "host: localhost\r\n\r\n".encode())
            seen = s.recv(65536)
            start = time.perf_counter()
            time.sleep(delay)
            self.say(session)
            while b"event: event_delta" not in seen:
                seen += s.recv(65536)
            return time.perf_counter() - start


def log_rows():
    with tempfile.TemporaryDirectory(prefix="cleanhands-bench.", dir="/var/tmp") as folder:
        subprocess.run([RELEASE / "examples/bench_log", folder], check=True)


def first_tokens(harness):
    ours = [harness.first_token(harness.session("quick")) * 1000 for _ in range(40)]
    added = [value - MODEL_MS for value in ours]
    print(f"token     added to the model's own first token ({MODEL_MS} ms): p50 {statistics.median(added):.1f} ms, "
          f"p99 {percentile(added, 0.99):.1f} ms")
    for setup, rounds in ((0.005, 40), (0.5, 20), (5.0, 6)):
        # The coupled variant: whoever wants an answer has a sandbox made first. 70% never use one.
        coupled = [harness.first_token(harness.session("quick"), setup) * 1000 for _ in range(rounds)]
        less = [100 * (1 - part(ours) / part(coupled)) for part in (
            statistics.median, lambda v: percentile(v, 0.95))]
        print(f"token     against a sandbox of {setup * 1000:.0f} ms made first: p50 {less[0]:.0f}% less, "
              f"p95 {less[1]:.0f}% less")


def turns(harness):
    floor, beyond = [], []
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        for _ in range(200):
            file.write(b"x" * 512)
            file.flush()
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            floor.append((time.perf_counter() - start) * 1000)
    for _ in range(30):
        session = harness.session("tool")
        harness.say(session)
        spent = {}
        for event in harness.until_idle(session):
            at = time.mktime(time.strptime(event["time"][:19], "%Y-%m-%dT%H:%M:%S")) * 1000 + int(event["time"][20:23])
            spent.setdefault(event["kind"], []).append((at, event["body"]))
        whole = spent["status_idle"][0][0] - spent["status_running"][0][0]
        model = sum(body["duration_ms"] for _, body in spent["model_request_ended"])
        tool = sum(body["receipt"]["duration_ms"] + (body["receipt"]["provision_us"] or 0) / 1000
                   for _, body in spent["tool_result"])
        beyond.append(whole - model - tool)
    sync = statistics.median(floor)
    print(f"turn      two requests and a tool, beyond both: p50 {statistics.median(beyond):.1f} ms; "
          f"a disk sync here takes {sync:.2f} ms (x{statistics.median(beyond) / sync:.1f})")


def memory(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def pid_of_harnessd(harness):
    return call(harness.path, "GET", "/cleanhands/v1/health")["pid"]


def scale(harness):
    pid = pid_of_harnessd(harness)
    sessions = [harness.session("slow") for _ in range(SESSIONS)]
    before = memory(pid)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        list(pool.map(harness.say, sessions))
        time.sleep(0.5)
        most = memory(pid)
        logs = list(pool.map(harness.until_idle, sessions))
    took = time.perf_counter() - start
    beyond = []
    for events in logs:
        times = {event["kind"]: event for event in events}
        stamp = lambda kind: int(times[kind]["time"][17:19]) * 1000 + int(times[kind]["time"][20:23])
        whole = (stamp("status_idle") - stamp("status_running")) % 60000
        beyond.append(whole - times["model_request_ended"]["body"]["duration_ms"])
    print(f"scale     {SESSIONS} sessions at once: all done in {took:.1f} s; a turn beyond its model p50 "
          f"{statistics.median(beyond):.0f} ms, p99 {percentile(beyond, 0.99):.0f} ms; "
          f"{(most - before) / SESSIONS:.0f} KiB each")


def deaths(harness, place):
    sessions = [harness.session("slow") for _ in range(DEATHS)]
    for session in sessions:
        harness.say(session)
    pid = pid_of_harnessd(harness)
    os.kill(pid, signal.SIGKILL)
    start = time.perf_counter()
    while True:
        try:
            if pid_of_harnessd(harness) != pid:
                break
        except (OSError, SystemExit, ValueError):
            pass
        if place.processes[-1][1].poll() is not None:
            place.start("up", place.processes[-1][1].args)
        time.sleep(0.01)
    served = time.perf_counter() - start
    late = []
    for session in sessions:
        events = harness.until_idle(session)
        kinds = [event["kind"] for event in events]
        if "note" in kinds:
            at = kinds.index("note")
            stamp = lambda event: int(event["time"][17:19]) * 1000 + int(event["time"][20:23])
            again = next(e for e in events[at:] if e["kind"] == "model_request_started")
            late.append((stamp(again) - stamp(events[at])) % 60000)
        report = call(harness.path, "GET", f"/cleanhands/v1/sessions/{session}/verify")
        if report["problems"]:
            raise SystemExit(f"{session}: {report['problems']}")
    print(f"deaths    {len(late)} of {DEATHS} sessions were in the middle of a turn; served again after "
          f"{served * 1000:.0f} ms; from taking one up to its next request p50 {statistics.median(late):.0f} ms, "
          f"p99 {percentile(late, 0.99):.0f} ms; every chain is whole")


def script(place, name, turns):
    path = place.root / f"{name}.json"
    path.write_text(json.dumps({"turns": turns}))
    return f'[models.{name}]\nprovider = "scripted"\nscript = "{path}"\n'


def main():
    argparse.ArgumentParser(prog="bench/run harness").parse_args()
    log_rows()
    with Place() as place:
        quick = {"text": "A short answer.", "first_token_ms": MODEL_MS, "chunk_ms": 0}
        slow = {"text": "A short answer.", "first_token_ms": 3000, "chunk_ms": 0}
        tool = {"tools": [{"name": "bash", "input": {"command": "true"}}], "first_token_ms": 5, "chunk_ms": 0}
        models = 'default-environment = "bench"\n' + script(place, "quick", [quick]) + script(
            place, "slow", [slow, slow]) + script(place, "tool", [tool, {**quick, "first_token_ms": 5}])
        path = place.cleanhands({"bench": "[sandbox]\nroot = \"host\"\n"}, {}, models)
        harness = Harness(path)
        first_tokens(harness)
        turns(harness)
        scale(harness)
        deaths(harness, place)


main()

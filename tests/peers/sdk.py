"""The official SDK, unchanged, over the Unix socket: environment, agent, session, stream, send, list."""

import json
import pathlib
import subprocess
import sys

from support import Place

POLICY = """
    description = "No way out; local tools only"
    [sandbox]
    root = "host"
"""
SCRIPT = {"turns": [
    {"text": "I will write the file.",
     "tools": [{"name": "bash", "input": {"command": "echo forty-two > answer.txt; cat answer.txt"}}]},
    {"text": "The answer is forty-two.", "expect": "forty-two"},
]}

with Place() as place:
    script = place.root / "script.json"
    script.write_text(json.dumps(SCRIPT))
    socket = place.cleanhands(
        {"dev": POLICY}, {},
        f"""
        default-environment = "dev"
        [models."*"]
        provider = "scripted"
        script = "{script}"
        """)
    quickstart = pathlib.Path(__file__).parent / "sdk" / "quickstart.py"
    done = subprocess.run([sys.executable, str(quickstart), str(socket)])
    if done.returncode:
        print(place.log("up"), file=sys.stderr)
    sys.exit(done.returncode)

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
CUSTOM_TOOLS = {"turns": [
    {"text": "I ask the client.",
     "tools": [{"name": "lookup", "input": {"city": "Bern"}}, {"name": "fail", "input": {}}]},
    {"text": "Thank you.", "expect": "MARK-134591"},
]}

FILES = {"turns": [
    {"text": "I read it.", "tools": [
        {"name": "bash", "input": {"command": "head -n 2 /mnt/session/uploads/in/data.csv"}},
        {"name": "bash", "input": {"command": "echo x > /mnt/session/uploads/in/other"}}]},
    {"text": "Read.", "expect": "MARK-77431"},
]}

with Place() as place:
    script = place.root / "script.json"
    script.write_text(json.dumps(SCRIPT))
    custom_tools = place.root / "custom-tools.json"
    custom_tools.write_text(json.dumps(CUSTOM_TOOLS))
    files = place.root / "files.json"
    files.write_text(json.dumps(FILES))
    socket = place.cleanhands(
        {"dev": POLICY}, {},
        f"""
        default-environment = "dev"
        [models."*"]
        provider = "scripted"
        script = "{script}"
        [models."custom-tools"]
        provider = "scripted"
        script = "{custom_tools}"
        [models."files"]
        provider = "scripted"
        script = "{files}"
        """)
    for name in ("quickstart.py", "custom_tools.py", "files.py"):
        program = pathlib.Path(__file__).parent / "sdk" / name
        done = subprocess.run([sys.executable, str(program), str(socket)])
        if done.returncode:
            print(place.log("up"), file=sys.stderr)
            sys.exit(done.returncode)

"""MCP servers that others wrote, called by agents of the official SDK through the real proxyd.

A fastmcp server behind TLS wants a bearer token, which proxyd's vault alone has; the reference
server `everything` stands behind nginx. The model is a script.

MCP_PACKAGES (set by tests/run) is a directory with a virtual environment and node_modules.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import uuid

import anthropic

import secrecy
from support import Claims, Place, free_port, port_answers, wait_for

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE / "sdk"))
from quickstart import client_of, message  # noqa: E402

PACKAGES = pathlib.Path(os.environ["MCP_PACKAGES"])
EVERYTHING = PACKAGES / "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
TOKEN = "TOKEN-CANARY-" + os.urandom(12).hex()
WRONG = "WRONG-CANARY-" + os.urandom(12).hex()
SECONDS = 60
NOTES, EVERY, DOWN, OTHER = (f"https://{name}.example/mcp" for name in (
    "notes", "everything", "down", "elsewhere"))
POLICY = """
    description = "MCP servers, and no other way out"
    [sandbox]
    root = "host"
    [mcp.notes]
    url = "https://notes.example/mcp"
    credential = "notes"
    addresses = ["127.0.0.1/32"]
    [mcp.everything]
    url = "https://everything.example/mcp"
    addresses = ["127.0.0.1/32"]
    [mcp.down]
    url = "https://down.example/mcp"
    addresses = ["127.0.0.1/32"]
    [credentials.notes]
    secret = "local:%s"
    inject = { bearer = true }
    hosts = ["notes.example"]
"""
LONG = {"duration": 2, "steps": 20}


def call(name, **values):
    return {"name": name, "input": values}


# What the model of this name says, turn by turn.
SCRIPTS = {
    "allowed": [
        {"text": "I write it down.", "tools": [call("mcp__notes__write", text="MARK-1")]},
        {"text": "I ask back.", "expect": "noted: MARK-1", "tools": [
            call("mcp__notes__ask_back"), call("mcp__notes__fail")]},
        {"text": "Both answered.", "expect": "the client is there"},
        {"text": "Again.", "tools": [call("mcp__notes__write", text="MARK-9")]},
        {"text": "Noted again.", "expect": "noted: MARK-9"},
    ],
    "asks": [
        {"text": "May I?", "tools": [call("mcp__notes__write", text="MARK-2")]},
        {"text": "And this?", "expect": "noted: MARK-2", "tools": [
            call("mcp__notes__burn", text="MARK-3")]},
        {"text": "Then not.", "expect": "not the notes"},
    ],
    "troubles": [
        {"text": "I answer without them."},
        {"text": "Once more.", "tools": [call("mcp__notes__write", text="MARK-4")]},
        {"text": "It is back.", "expect": "noted: MARK-4"},
    ],
    "everything": [
        {"text": "First.", "tools": [
            call("mcp__everything__echo", message="MARK-5"),
            call("mcp__everything__get-sum", a=19, b=23)]},
        {"text": "Now a picture.", "expect": "is 42.", "tools": [
            call("mcp__everything__get-tiny-image")]},
        {"text": "Now slowly.", "expect": "the MCP logo", "tools": [
            call("mcp__everything__trigger-long-running-operation", **LONG)]},
        {"text": "Now wrongly.", "expect": "operation completed", "tools": [
            call("mcp__everything__get-resource-reference", resourceId=-1)]},
        {"text": "All seen.", "expect": "Invalid resourceId"},
    ],
    "interrupted": [
        {"text": "I hold it.", "tools": [call("mcp__notes__hold", text="MARK-7")]},
        {"text": "I heard.", "expect": "cancelled by the user"},
    ],
    "killed": [
        {"text": "I hold it.", "tools": [call("mcp__notes__hold", text="MARK-6")]},
        {"text": "I do not know.", "expect": "whether it did its work is unknown"},
    ],
}


class Peers:
    """The servers of this suite."""

    def __init__(self, place):
        self.root = place.root / "notes"
        self.root.mkdir(mode=0o700)
        token = self.root / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        cert, key = place.certificate("notes.example")
        self.notes, plain, self.down = free_port(), free_port(), free_port()
        place.start("notes", [
            str(PACKAGES / "venv/bin/python"), str(HERE / "mcp/notes.py"), str(self.root),
            str(self.notes), str(cert), str(key)])
        place.start("everything", ["node", str(EVERYTHING), "streamableHttp"],
                    env={**os.environ, "PORT": str(plain)})
        self.log = place.root / "everything-calls.log"
        seen = ('{"method":"$request_method","status":$status,"sent":$body_bytes_sent,'
                '"session":"$http_mcp_session_id","body":"$request_body",'
                '"authorization":"$http_authorization"}')
        self.everything = place.nginx("everything.example", f"""location / {{
            proxy_pass http://127.0.0.1:{plain}; proxy_http_version 1.1; proxy_buffering off;
            access_log {self.log} seen; }}""", f"log_format seen escape=json '{seen}';")
        for name, port in (("the notes", self.notes), ("everything", plain)):
            wait_for(f"{name} to listen", SECONDS, lambda port=port: port_answers(port))

    def calls(self):
        """What the tools of the notes were called with."""
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def seen(self):
        """The requests to `everything` that have ended."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]


class Talk:
    """A session with an agent of its own."""

    def __init__(self, client, model, servers, policy="dev", permission="always_allow"):
        self.sessions = client.beta.sessions
        toolset = {"type": "mcp_toolset"}
        if permission:
            toolset["default_config"] = {"permission_policy": {"type": permission}}
        agent = client.beta.agents.create(
            name=model, model=model,
            mcp_servers=[{"type": "url", "name": n, "url": u} for n, u in servers.items()],
            tools=[{**toolset, "mcp_server_name": name} for name in servers])
        environment = client.beta.environments.create(
            name=f"mcp-{uuid.uuid4()}", metadata={"policy": policy})
        self.id = self.sessions.create(agent=agent.id, environment_id=environment.id).id

    def turn(self):
        """One turn to its end; gives its events."""
        before = {event.id for event in self.history()}
        self.send(message("Go on."))
        return self.idle("end_turn", before)

    def send(self, *events):
        self.sessions.events.send(self.id, events=list(events))

    def history(self):
        return list(self.sessions.events.list(self.id))

    def idle(self, kind, before=frozenset()):
        """Waits until the session is idle for this reason; gives the events not in `before`."""
        def settled():
            # The daemon may be away.
            with contextlib.suppress(anthropic.APIConnectionError):
                events = [event for event in self.history() if event.id not in before]
                last = [e for e in events if e.type.startswith("session.status_")][-1:]
                ended = last and last[0].type == "session.status_idle"
                return ended and last[0].stop_reason.type == kind and events
            return None
        return wait_for(f"the session to be idle: {kind}", SECONDS, settled)


def of(events, kind):
    return [event for event in events if event.type == kind]


def said(events):
    return [block.text for event in of(events, "agent.message") for block in event.content]


def results(events):
    """The text of each tool's result, by the tool's name, and whether it is an error."""
    names = {event.id: event.name for event in of(events, "agent.mcp_tool_use")}
    text = lambda event: "".join(getattr(block, "text", "") for block in event.content)
    return {names[event.mcp_tool_use_id]: (text(event), event.is_error)
            for event in of(events, "agent.mcp_tool_result")}


def listed(place, session):
    """The session's log, where its tools stand as the model is shown them."""
    path = place.root / f"{session}.export"
    done = place.command("session", "export", session, str(path))
    if done.returncode:
        raise SystemExit(f"FAILED: session export: {done.stderr.decode()}\n0 passed, 1 failed")
    return path.read_text()


def allowed(claims, client, place, peers):
    talk = Talk(client, "allowed", {"notes": NOTES})
    events = talk.turn()
    uses = of(events, "agent.mcp_tool_use")
    shown = [event.to_dict() for event in events]
    claims.holds("a tool of a fastmcp server is called, and its result is the agent's",
                 results(events).get("write") == ("noted: MARK-1", False), shown)
    claims.holds("the event names server, tool, input and that nobody was to be asked",
                 (uses[0].mcp_server_name, uses[0].name, uses[0].input) == (
                     "notes", "write", {"text": "MARK-1"})
                 and uses[0].evaluated_permission == "allow", shown)
    claims.holds("a server that asks back in the middle of a call is answered",
                 results(events).get("ask_back") == ("the client is there", False), shown)
    text, failed = results(events).get("fail", ("", None))
    claims.holds("a tool that fails is a result that is an error",
                 failed and "MARK-77" in text, shown)
    claims.holds("the model sees the results and ends its turn",
                 said(events)[-1] == "Both answered.", shown)
    claims.holds("each call came to the server once",
                 sorted(peers.calls()) == ["ask_back", "fail", "write MARK-1"], peers.calls())
    log = listed(place, talk.id)
    claims.holds("all pages of its list are known, with their descriptions", all(
        f"mcp__notes__{name}" in log for name in ("write", "burn", "hold", "ask_back", "fail"))
                 and "Holds a note until somebody releases it." in log, log[:4000])
    return talk


def asks(claims, client, peers):
    before = peers.calls()
    talk = Talk(client, "asks", {"notes": NOTES}, permission=None)
    talk.send(message("Go on."))
    events = talk.idle("requires_action")
    use = of(events, "agent.mcp_tool_use")[-1]
    idle = of(events, "session.status_idle")[-1]
    claims.holds("a toolset that says nothing asks: the session waits for an answer to this call",
                 use.evaluated_permission == "ask"
                 and idle.stop_reason.event_ids == [use.id], events)
    claims.holds("and the server has heard of no call", peers.calls() == before, peers.calls())
    talk.send({"type": "user.tool_confirmation", "tool_use_id": use.id, "result": "allow"})

    def next_question():
        events = talk.idle("requires_action")
        uses = of(events, "agent.mcp_tool_use")
        return uses[-1].id != use.id and events

    events = wait_for("the second question", SECONDS, next_question)
    claims.holds("a confirmation lets it go",
                 results(events).get("write") == ("noted: MARK-2", False), events)
    burn = of(events, "agent.mcp_tool_use")[-1]
    talk.send({"type": "user.tool_confirmation", "tool_use_id": burn.id, "result": "deny",
               "deny_message": "not the notes"})
    events = talk.idle("end_turn")
    text, failed = results(events).get("burn", ("", None))
    claims.holds("a denial and its reason are the result, and the model is told",
                 failed and "not the notes" in text and said(events)[-1] == "Then not.", events)
    claims.holds("the server has heard of the confirmed call and not of the denied one",
                 peers.calls() == [*before, "write MARK-2"], peers.calls())


def troubles(claims, client, place, peers):
    before = peers.calls()
    talk = Talk(client, "troubles", {"notes": NOTES, "down": DOWN, "elsewhere": OTHER}, "stale")
    events = talk.turn()
    errors = {e.error.mcp_server_name: e.error for e in of(events, "session.error")}
    kinds = {name: error.type for name, error in errors.items()}
    claims.holds(
        "a wrong token, a server that is down and one outside the policy are errors by name",
        kinds == {"notes": "mcp_authentication_failed_error", "down": "mcp_connection_failed_error",
                  "elsewhere": "mcp_connection_failed_error"}, errors)
    claims.holds("the message says what failed", "401" in errors["notes"].message
                 and "could not pass" in errors["down"].message
                 and "denied" in errors["elsewhere"].message, errors)
    claims.holds("the session goes on and answers",
                 said(events) == ["I answer without them."], events)
    place.store_secret("stale", TOKEN)
    events = talk.turn()
    claims.holds("with the right token in the vault the next turn has the server's tools",
                 results(events).get("write") == ("noted: MARK-4", False)
                 and said(events)[-1] == "It is back."
                 and peers.calls() == [*before, "write MARK-4"], events)


def everything(claims, client, place, peers):
    talk = Talk(client, "everything", {"everything": EVERY})
    events = talk.turn()
    found = results(events)
    shown = [event.to_dict() for event in events]
    claims.holds("the reference server echoes and adds",
                 found.get("echo") == ("Echo: MARK-5", False)
                 and found.get("get-sum") == ("The sum of 19 and 23 is 42.", False), shown)
    picture = next(e for e in of(events, "agent.mcp_tool_result") if len(e.content) == 3)
    kinds = [block.type for block in picture.content]
    source = picture.content[1].source if kinds[1] == "image" else None
    claims.holds("a picture is a picture", kinds == ["text", "image", "text"]
                 and source.media_type == "image/png"
                 and source.data.startswith("iVBORw0KGgo"), shown)
    text, failed = found.get("trigger-long-running-operation", ("", None))
    claims.holds("a long call comes to its end", not failed and "Steps: 20" in text, shown)
    text, failed = found.get("get-resource-reference", ("", None))
    claims.holds("a tool's error is an error, and the model sees it",
                 failed and "Invalid resourceId" in text and said(events)[-1] == "All seen.", shown)

    wait_for("the session at the server to be ended", SECONDS,
             lambda: [s for s in peers.seen() if s["method"] == "DELETE"])
    requests = peers.seen()
    posted = [(s, json.loads(s["body"])) for s in requests if s["method"] == "POST"]
    methods = [body["method"] for _, body in posted]
    claims.holds("one handshake, one list, five calls, one end",
                 sorted(methods) == sorted(["initialize", "notifications/initialized", "tools/list",
                                            *["tools/call"] * 5]), methods)
    sessions = {s["session"] for s in requests} - {""}
    claims.holds("all in one session, without a credential",
                 len(sessions) == 1 and not any(s["authorization"] for s in requests), requests)
    long = next(s for s, _ in posted if '"trigger-long-running-operation"' in s["body"])
    claims.holds("the long call was told of on the way",
                 "progressToken" in long["body"] and long["sent"] > LONG["steps"] * 80, long)
    tools = listed(place, talk.id)
    claims.holds("tools with annotations and output schemas are listed", all(
        f"mcp__everything__{name}" in tools for name in (
            "echo", "get-sum", "get-tiny-image", "get-structured-content")), tools[:4000])


def interrupted(claims, client, peers):
    before = peers.calls()
    talk = Talk(client, "interrupted", {"notes": NOTES})
    talk.send(message("Go on."))
    wait_for("the call to begin", SECONDS, lambda: peers.calls() != before)
    talk.send({"type": "user.interrupt"})
    events = talk.idle("end_turn")
    text, failed = results(events).get("hold", ("", None))
    claims.holds("an interrupt ends a call, whose outcome is said to be unknown",
                 failed and "cancelled by the user" in text and "unknown" in text, events)
    cancelled = peers.root / "cancelled"
    heard = wait_for("the server to hear of it", SECONDS,
                     lambda: cancelled.exists() and cancelled.read_text())
    claims.holds("and the server hears of it", heard == "MARK-7", heard)


def killed(claims, client, place, peers):
    before = peers.calls()
    talk = Talk(client, "killed", {"notes": NOTES})
    talk.send(message("Go on."))
    wait_for("the call to begin", SECONDS, lambda: peers.calls() != before)
    running = map(secrecy.Process, secrecy.children(place.up.pid))
    harness = [process for process, _ in secrecy.looked(running, secrecy.Process.learn)
               if process.role == "harnessd"]
    claims.holds("harnessd runs while the call does", len(harness) == 1, harness)
    os.kill(int(harness[0].place.name), signal.SIGKILL)
    events = talk.idle("end_turn")
    text, failed = results(events).get("hold", ("", None))
    claims.holds("after kill -9 in a call its result is that its outcome is unknown",
                 failed and "whether it did its work is unknown" in text, events)
    claims.holds("the model is told, and the turn ends",
                 said(events)[-1] == "I do not know.", events)
    (peers.root / "release").touch()
    claims.holds("the call came to the server once", peers.calls() == [*before, "hold MARK-6"],
                 peers.calls())


def main():
    with Place() as place:
        claims = Claims()
        peers = Peers(place)
        models = 'default-environment = "dev"\n'
        for name, turns in SCRIPTS.items():
            script = place.root / f"{name}.json"
            script.write_text(json.dumps({"turns": turns}))
            models += f'[models.{name}]\nprovider = "scripted"\nscript = "{script}"\n'
        socket = place.cleanhands(
            {"dev": POLICY % "notes", "stale": POLICY % "stale"},
            {"notes.example": peers.notes, "everything.example": peers.everything,
             "down.example": peers.down}, models)
        place.store_secret("notes", TOKEN)
        place.store_secret("stale", WRONG)
        client = client_of(str(socket), [])

        talk = allowed(claims, client, place, peers)
        asks(claims, client, peers)
        troubles(claims, client, place, peers)
        everything(claims, client, place, peers)
        interrupted(claims, client, peers)
        killed(claims, client, place, peers)

        search = secrecy.Search(place.secrets)
        told = json.dumps([event.to_dict() for event in talk.history()], default=str).encode()
        claims.holds("no event holds the token", b"MARK-1" in told and not search.found(told))
        place.hosts = ["notes.example"]
        secrecy.check(claims, "mcp", place, talk.turn)
        claims.close()


main()

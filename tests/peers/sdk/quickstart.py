"""The quickstart of the official SDK, unchanged, over harnessd's Unix socket.

Usage: quickstart.py SOCKET. The daemon's default environment exists, and its model, whatever it is
called, ends a turn after one message. One line for each claim; exit status 0 when all hold.
"""

import contextlib
import sys
import threading
import uuid

import anthropic
import httpx2
from anthropic import Anthropic, DefaultHttpxClient
from anthropic.lib.sessions import accumulate_managed_agents_event

TURN_SECONDS = 60
PREVIEWS = ("event_start", "event_delta")


class Claims:
    def __init__(self):
        self.passed = 0

    def holds(self, claim, condition, shown=""):
        if not condition:
            print(f"FAILED: {claim}\n{shown}", flush=True)
            print(f"{self.passed} passed, 1 failed", flush=True)
            sys.exit(1)
        self.passed += 1
        print(f"ok: {claim}", flush=True)

    def raises(self, claim, kind, call, words=""):
        try:
            answer = call()
        except kind as error:
            self.holds(claim, words in str(error) and error.request_id, str(error))
            return error
        except anthropic.APIError as error:
            self.holds(claim, False, f"{type(error).__name__}: {error}")
        self.holds(claim, False, f"no error: {answer}")

    def close(self):
        print(f"{self.passed} passed, 0 failed", flush=True)


def client_of(socket, requests):
    """A client whose every request, repeated ones too, is added to `requests`."""
    transport = httpx2.HTTPTransport(uds=socket)
    http_client = DefaultHttpxClient(
        transport=transport, timeout=TURN_SECONDS, event_hooks={"request": [requests.append]})
    return Anthropic(
        base_url="http://localhost", api_key="any", http_client=http_client,
        timeout=TURN_SECONDS)


def message(text):
    return {"type": "user.message", "content": [{"type": "text", "text": text}]}


def one_turn(sessions, session, text, **options):
    """Opens the stream, says something, and gives every event until the session is idle."""
    events = []
    with sessions.events.stream(session, **options) as stream:
        sent = sessions.events.send(session, events=[message(text)])
        for event in stream:
            events.append(event)
            if event.type == "session.status_idle" and event.stop_reason.type == "end_turn":
                return events, sent
    return events, sent


def settled(events):
    """The stream as the history shows it: a client's event counts when it was processed."""
    last = {event.id: at for at, event in enumerate(events)}
    return [event for at, event in enumerate(events) if last[event.id] == at]


def environments(claims, client):
    name = f"quickstart-{uuid.uuid4()}"
    config = {"type": "cloud", "networking": {"type": "unrestricted"}}
    environment = client.beta.environments.create(name=name, config=config)
    claims.holds(
        "an environment comes back whole: networking and all six package lists",
        environment.id.startswith("env_") and environment.config.networking.type == "unrestricted"
        and environment.config.packages.gem == [] and environment.archived_at is None,
        environment)
    claims.raises(
        "a second environment of that name is a conflict", anthropic.ConflictError,
        lambda: client.beta.environments.create(name=name, config=config))
    claims.raises(
        "an environment of an unknown policy is refused and the file is named",
        anthropic.BadRequestError,
        lambda: client.beta.environments.create(
            name=f"{name}-x", config=config, metadata={"policy": "no-such-policy"}),
        "no-such-policy.toml")
    claims.raises(
        "a host outside the policy file is refused by name", anthropic.BadRequestError,
        lambda: client.beta.environments.create(name=f"{name}-y", config={
            "type": "cloud",
            "networking": {"type": "limited", "allowed_hosts": ["evil.invalid"]}}),
        "evil.invalid")
    return environment


def agents(claims, client, requests):
    agent = client.beta.agents.create(
        name="Quickstart", model="claude-quickstart", system="You are brief.",
        tools=[{"type": "agent_toolset_20260401"}])
    toolset = agent.tools[0]
    tools = {config.name: config.enabled for config in toolset.configs}
    claims.holds(
        "an agent is version 1, with its model and toolset spelled out",
        agent.version == 1 and agent.model.id == "claude-quickstart" and tools["bash"]
        and toolset.default_config.permission_policy.type == "always_allow",
        agent)
    second = client.beta.agents.update(agent.id, version=1, system="You are very brief.")
    same = client.beta.agents.update(agent.id, version=2, system="You are very brief.")
    claims.holds(
        "an update makes version 2, and one that changes nothing makes none",
        (second.version, same.version) == (2, 2), (second, same))
    before = len(requests)
    claims.raises(
        "an update of an old version is a conflict", anthropic.ConflictError,
        lambda: client.beta.agents.update(agent.id, version=1, name="late"))
    claims.holds("which the SDK does not send again", len(requests) == before + 1)
    claims.holds(
        "the first version stays what it was, and the history lists both",
        client.beta.agents.retrieve(agent.id, version=1).system == "You are brief."
        and [a.version for a in client.beta.agents.versions.list(agent.id)] == [2, 1])
    refused = [
        ("name", {"name": "", "model": "m"}),
        ("skills", {"name": "n", "model": "m", "skills": [{"type": "custom", "skill_id": "s"}]}),
        ("tools[0].type", {"name": "n", "model": "m", "tools": [{"type": "later_2031"}]}),
        ("mcp_servers", {"name": "n", "model": "m", "mcp_servers": [
            {"type": "url", "name": "x", "url": "https://mcp.invalid/"}]}),
    ]
    for field, body in refused:
        claims.raises(
            f"what cannot be done is refused, and the message names {field}",
            anthropic.BadRequestError, lambda body=body: client.beta.agents.create(**body), field)
    return second


def a_turn(claims, client, agent, environment):
    sessions = client.beta.sessions
    session = sessions.create(agent=agent.id, environment_id=environment.id, title="Quickstart")
    claims.holds(
        "a session is idle, holds the agent as it was, and its lists are empty, not absent",
        session.status == "idle" and session.agent.version == agent.version
        and session.resources == [] and session.vault_ids == [] and session.title == "Quickstart",
        session)

    events, sent = one_turn(sessions, session.id, "Begin.")
    kinds = [event.type for event in events]
    claims.holds(
        "send echoes the event with an id, queued",
        sent.data[0].id.startswith("sevt_") and sent.data[0].type == "user.message", sent)
    claims.holds(
        "the stream shows it twice under that id: queued, then processed",
        [e.processed_at is None for e in events if e.id == sent.data[0].id] == [True, False], kinds)
    claims.holds(
        "a turn begins with running, then the processed message",
        kinds.index("session.status_running")
        < max(at for at, e in enumerate(events) if e.id == sent.data[0].id)
        < kinds.index("span.model_request_start") < kinds.index("agent.message"), kinds)
    claims.holds(
        "a turn ends with thread idle, usage, idle", kinds[-3:] == [
            "session.thread_status_idle", "session.usage", "session.status_idle"], kinds)
    uses = [e.id for e in events if e.type == "agent.tool_use"]
    results = [e.tool_use_id for e in events if e.type == "agent.tool_result"]
    claims.holds("every tool call has one result, by event id", sorted(uses) == sorted(results), kinds)
    claims.holds(
        "every model request that began has ended",
        kinds.count("span.model_request_start") == kinds.count("span.model_request_end"), kinds)

    listed = list(sessions.events.list(session.id))
    streamed = settled(events)
    claims.holds(
        "the history equals the stream: same events, same order, same content",
        [e.to_dict() for e in listed] == [e.to_dict() for e in streamed],
        ([e.type for e in listed], [e.type for e in streamed]))
    by_two = [e.id for e in sessions.events.list(session.id, limit=2)]
    claims.holds("pages of two give the same", by_two == [e.id for e in listed], by_two)
    backwards = [e.id for e in sessions.events.list(session.id, limit=3, order="desc")]
    claims.holds("and the same backwards", backwards[::-1] == by_two, backwards)
    messages = list(sessions.events.list(session.id, types=["agent.message"]))
    claims.holds(
        "types[] filters", messages and {e.type for e in messages} == {"agent.message"}, messages)
    late = list(sessions.events.list(session.id, created_at_gt=listed[-1].processed_at))
    claims.holds("created_at[gt] behind the last event gives nothing", late == [], late)
    return session, events


def previews(claims, client, session):
    kinds = ["agent.message", "agent.thinking"]
    events, _ = one_turn(client.beta.sessions, session.id, "Again.", event_deltas=kinds)
    open_previews, prefix = {}, True
    for event in events:
        if event.type in PREVIEWS:
            key = event.event.id if event.type == "event_start" else event.event_id
            open_previews[key] = accumulate_managed_agents_event(open_previews.get(key), event)
        elif event.type == "agent.message" and event.id in open_previews:
            shown = "".join(b.text for b in open_previews[event.id].content)
            prefix = prefix and "".join(b.text for b in event.content).startswith(shown)
    starts = [e.event.id for e in events if e.type == "event_start"]
    messages = [e.id for e in events if e.type == "agent.message"]
    claims.holds(
        "previews begin once for each message, and what they show is a prefix of it",
        starts == messages and prefix, (starts, messages))
    claims.holds(
        "previews are never part of the history",
        not [e for e in client.beta.sessions.events.list(session.id) if e.type in PREVIEWS])
    claims.raises(
        "previews of other events are refused", anthropic.BadRequestError,
        lambda: client.beta.sessions.events.stream(session.id, event_deltas=["user.message"]),
        "event_deltas")


def states(claims, client, agent, environment, session):
    sessions = client.beta.sessions
    read = sessions.retrieve(session.id)
    claims.holds(
        "retrieve shows idle, times and tokens",
        read.status == "idle" and read.stats.active_seconds >= 0
        and read.usage.output_tokens is not None, read)
    claims.holds(
        "the session is listed among its agent's, newest first",
        [s.id for s in sessions.list(agent_id=agent.id, statuses=["idle"])][0] == session.id)
    changed = sessions.update(session.id, title="Renamed", metadata={"a": "1"})
    claims.holds(
        "title and metadata can be changed",
        (changed.title, changed.metadata) == ("Renamed", {"a": "1"}), changed)
    last = list(sessions.events.list(session.id))[-1]
    claims.holds(
        "which is an event that says only what changed",
        last.type == "session.updated" and last.title == "Renamed" and last.agent is None, last)
    claims.raises(
        "an unknown session is a 404", anthropic.NotFoundError,
        lambda: sessions.retrieve("sesn_does_not_exist"))
    claims.raises(
        "an unknown event is a 400 that names the field", anthropic.BadRequestError,
        lambda: sessions.events.send(session.id, events=[{"type": "user.shrug"}]), "events[0].type")
    claims.raises(
        "an answer to no call is a 400", anthropic.BadRequestError,
        lambda: sessions.events.send(session.id, events=[{
            "type": "user.tool_confirmation", "tool_use_id": "sevt_none", "result": "allow"}]))
    claims.raises(
        "a budget is refused by name", anthropic.BadRequestError,
        lambda: sessions.create(agent=agent.id, environment_id=environment.id, budget={
            "type": "limit", "max_list_cost": {"amount": "100", "currency": "USD"}}), "budget")
    sessions.events.send(session.id, events=[{"type": "user.interrupt"}])

    archived = sessions.archive(settle(sessions, session.id))
    claims.holds(
        "archive ends the session", archived.status == "terminated" and archived.archived_at,
        archived)
    claims.raises(
        "an archived session takes no events", anthropic.BadRequestError,
        lambda: sessions.events.send(session.id, events=[message("hello?")]))
    claims.holds(
        "lists leave it out unless asked",
        session.id not in [s.id for s in sessions.list()]
        and session.id in [s.id for s in sessions.list(include_archived=True)])


def settle(sessions, session):
    """Waits until the session is idle; gives its id."""
    stop = threading.Event()
    timer = threading.Timer(TURN_SECONDS, stop.set)
    timer.start()
    while sessions.retrieve(session).status != "idle" and not stop.is_set():
        stop.wait(0.05)
    timer.cancel()
    return session


def deletion(claims, client, agent, environment):
    sessions = client.beta.sessions
    session = sessions.create(agent=agent.id, environment_id=environment.id)
    with sessions.events.stream(session.id) as stream:
        answer = sessions.delete(session.id)
        seen = [event.type for event in stream]
    claims.holds(
        "delete says so", (answer.id, answer.type) == (session.id, "session_deleted"), answer)
    claims.holds("and ends open streams", seen[-1:] == ["session.deleted"], seen)
    claims.raises(
        "afterwards there is no such session", anthropic.NotFoundError,
        lambda: sessions.retrieve(session.id))


def overrides(claims, client, agent, environment):
    sessions = client.beta.sessions
    session = sessions.create(
        agent={"type": "agent_with_overrides", "id": agent.id, "version": 1, "tools": []},
        environment_id=environment.id, initial_events=[message("Begin at once.")])
    claims.holds(
        "a session with initial events runs at once, with its agent's overrides",
        session.status == "running" and session.agent.version == 1 and session.agent.tools == [],
        session)
    with contextlib.suppress(anthropic.ConflictError):
        sessions.delete(settle(sessions, session.id))


def main(socket):
    claims = Claims()
    requests = []
    client = client_of(socket, requests)
    environment = environments(claims, client)
    agent = agents(claims, client, requests)
    session, _ = a_turn(claims, client, agent, environment)
    previews(claims, client, session)
    states(claims, client, agent, environment, session)
    deletion(claims, client, agent, environment)
    overrides(claims, client, agent, environment)
    client.beta.agents.archive(agent.id)
    claims.raises(
        "an archived agent starts no session", anthropic.BadRequestError,
        lambda: client.beta.sessions.create(agent=agent.id, environment_id=environment.id))
    claims.raises(
        "an environment with sessions cannot be deleted", anthropic.ConflictError,
        lambda: client.beta.environments.delete(environment.id))
    claims.holds(
        "but archived", client.beta.environments.archive(environment.id).archived_at is not None)
    claims.close()


if __name__ == "__main__":
    main(sys.argv[1])

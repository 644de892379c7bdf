"""Tools that the client runs: the official SDK's own session tool runner, over the Unix socket.

Usage: custom_tools.py SOCKET. The daemon's model `custom-tools` calls `lookup` with {"city": "Bern"}
and `fail` with {} in one answer, and ends its turn with a text once both were answered.
"""

import asyncio
import sys
import uuid

import httpx2
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient, beta_async_tool

from quickstart import Claims, message


@beta_async_tool
async def lookup(city: str) -> str:
    """Looks a city up.

    Args:
        city: Its name.
    """
    return f"{city} has MARK-134591 inhabitants"


@beta_async_tool
async def fail() -> str:
    """Fails."""
    raise ValueError("this tool always fails")


def definition(tool):
    return {
        "type": "custom", "name": tool.name, "description": tool.description,
        "input_schema": tool.input_schema,
    }


async def main(socket):
    claims = Claims()
    transport = httpx2.AsyncHTTPTransport(uds=socket)
    client = AsyncAnthropic(
        base_url="http://localhost", api_key="any",
        http_client=DefaultAsyncHttpxClient(transport=transport))
    environment = await client.beta.environments.create(name=f"custom-tools-{uuid.uuid4()}")
    agent = await client.beta.agents.create(
        name="Custom tools", model="custom-tools", tools=[definition(lookup), definition(fail)])
    sessions = client.beta.sessions
    session = await sessions.create(
        agent=agent.id, environment_id=environment.id, initial_events=[message("Look it up.")])

    calls = {}
    async for call in sessions.events.tool_runner(session.id, tools=[lookup, fail], max_idle=0.5):
        calls[call.name] = call
    events = [event async for event in sessions.events.list(session.id)]

    claims.holds("the runner ran both tools", sorted(calls) == ["fail", "lookup"], calls)
    uses = {e.id for e in events if e.type == "agent.custom_tool_use"}
    results = {e.custom_tool_use_id: e for e in events if e.type == "user.custom_tool_result"}
    claims.holds("each call has one result", uses == set(results), events)
    failed = [bool(results[e.id].is_error) for e in events if e.type == "agent.custom_tool_use"]
    claims.holds("and only the failing one is an error", sorted(failed) == [False, True], results)
    idles = [e.stop_reason for e in events if e.type == "session.status_idle"]
    claims.holds(
        "the session waited for these calls by their event ids, then ended its turn",
        idles[-1].type == "end_turn"
        and all(set(r.event_ids) <= uses for r in idles if r.type == "requires_action"), idles)
    last = [e for e in events if e.type == "agent.message"][-1]
    claims.holds("the model saw the result", last.content[0].text == "Thank you.", last)
    claims.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

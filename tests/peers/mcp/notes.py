"""An MCP server by fastmcp, over TLS, for whoever shows its bearer token.

Usage: notes.py DIRECTORY PORT CERTIFICATE KEY. The directory holds the file `token`; each call of a
tool is one line of its file `calls`, written before the call does anything; `release` ends `hold`,
and `cancelled` says which note's was cancelled.
Its list of tools comes in pages of two.
"""

import asyncio
import pathlib
import sys

from fastmcp import Context, FastMCP
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from mcp.shared.message import ServerMessageMetadata
from mcp.types import EmptyResult, PingRequest

PLACE = pathlib.Path(sys.argv[1])
TOKEN = (PLACE / "token").read_text()
server = FastMCP(
    "notes", list_page_size=2,
    auth=StaticTokenVerifier({TOKEN: {"client_id": "harness", "scopes": []}}))


def begun(call):
    with open(PLACE / "calls", "a", encoding="utf-8") as calls:
        calls.write(f"{call}\n")


@server.tool
def write(text: str) -> str:
    """Writes a note."""
    begun(f"write {text}")
    return f"noted: {text}"


@server.tool
def burn(text: str) -> str:
    """Burns a note."""
    begun(f"burn {text}")
    return f"burnt: {text}"


@server.tool
async def hold(text: str) -> str:
    """Holds a note until somebody releases it."""
    begun(f"hold {text}")
    try:
        while not (PLACE / "release").exists():
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        (PLACE / "cancelled").write_text(text)
        raise
    return f"released: {text}"


@server.tool
async def ask_back(context: Context) -> str:
    """Answers once its client has answered it, in the middle of the call."""
    begun("ask_back")
    # On the call's own stream: a client need not have another one open.
    await context.session.send_request(
        PingRequest(), EmptyResult, request_read_timeout_seconds=20,
        metadata=ServerMessageMetadata(related_request_id=context.request_id))
    return "the client is there"


@server.tool
def fail() -> str:
    """Fails."""
    begun("fail")
    raise ValueError("MARK-77 cannot be done")


if __name__ == "__main__":
    server.run(
        transport="http", host="127.0.0.1", port=int(sys.argv[2]), path="/mcp", show_banner=False,
        allowed_hosts=["notes.example"],
        uvicorn_config={"ssl_certfile": sys.argv[3], "ssl_keyfile": sys.argv[4]})

"""A WebSocket client of another project in a sandbox: prints one line for each claim that holds."""

import asyncio
import os
import sys

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

HOST = sys.argv[1]


def holds(claim, condition, shown=""):
    if not condition:
        sys.exit(f"FAILED: {claim} {shown}")
    print(f"holds: {claim}", flush=True)


async def open_one():
    connection = await connect(f"wss://{HOST}/socket", max_size=None, ping_interval=None, open_timeout=60)
    return connection, await connection.recv()


async def closed_by(connection):
    try:
        await asyncio.wait_for(connection.recv(), 60)
        return None, "a message came"
    except ConnectionClosed as closed:
        return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (None, "no close frame")


async def main():
    connection, first = await open_one()
    holds("opens with the credential, uncompressed", first == "compressed: False", first)
    for message in ["hello", "", "\u2713" * 1000, b"\x00\xff" * 100, os.urandom(4 << 20)]:
        await connection.send(message)
        back = await connection.recv()
        holds(f"echo of {len(message)}", back == message)
    # Messages that end in every byte there is: none may wait for the next.
    for number in range(256):
        await connection.send(bytes([1, number]))
        assert await asyncio.wait_for(connection.recv(), 60) == bytes([1, number]), number
    print("holds: every last byte", flush=True)
    await connection.send(["in ", "three ", "fragments"])
    holds("fragments up", await connection.recv() == "in three fragments")
    await connection.send("fragments")
    holds("fragments down", await connection.recv() == "one, two, three")
    await (await connection.ping(b"from here"))
    await connection.send("ping me")
    holds("ping and pong both ways", await connection.recv() == "you are")
    await connection.send("close")
    closed = await closed_by(connection)
    holds("close code", closed == (4001, "as you wish"), closed)

    connection, _ = await open_one()
    await connection.send("vanish")
    closed = await closed_by(connection)
    holds("an upstream that vanishes is no close", closed[0] is None, closed)

    for parts in [[os.environ["API_TOKEN"]], list(os.environ["API_TOKEN"])]:
        connection, _ = await open_one()
        try:
            await connection.send(["token: ", *parts])
        except ConnectionClosed:
            pass
        closed = await closed_by(connection)
        holds(f"a placeholder in {len(parts)} fragments is refused",
              closed[0] == 1008 and "placeholder" in closed[1], closed)
    connection, _ = await open_one()
    await connection.close(1000, "done")
    holds("closes in order", connection.close_code == 1000)


asyncio.run(main())

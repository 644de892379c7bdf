"""Servers that others wrote, each behind TLS and a bearer token: gRPC, WebSocket, event streams.

Started as `servers.py KIND PORT CERT KEY TOKEN`; serves until it is ended.
"""

import asyncio
import collections
import concurrent.futures
import http
import ssl
import sys
import threading

KIND, PORT, CERT, KEY, TOKEN = sys.argv[1], int(sys.argv[2]), *sys.argv[3:6]
WANTED = f"Bearer {TOKEN}"


def context(*protocols):
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(CERT, KEY)
    made.set_alpn_protocols(protocols)
    return made


def grpc_server():
    import grpc

    def known(ctx):
        if dict(ctx.invocation_metadata()).get("authorization") != WANTED:
            ctx.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        ctx.set_trailing_metadata((("x-trailer", "one"), ("x-binary-bin", bytes(range(256)))))

    def echo(request, ctx):
        known(ctx)
        return request

    def count(request, ctx):
        known(ctx)
        for number in range(int(request)):
            yield b"%d" % number

    def total(requests, ctx):
        known(ctx)
        return b"%d" % sum(len(part) for part in requests)

    def talk(requests, ctx):
        known(ctx)
        for part in requests:
            yield part[::-1]

    def fail(request, ctx):
        known(ctx)
        yield b"first"
        ctx.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today: 100% \u2713")

    # What became of a call of Wait, by its name: its beginning and its end, whoever ended it.
    begun, ended = (collections.defaultdict(threading.Event) for _ in range(2))

    def wait(request, ctx):
        known(ctx)
        if ctx.add_callback(ended[request].set):
            begun[request].set()
            ended[request].wait(120)
        return b""

    def tell(events):
        def told(request, ctx):
            known(ctx)
            return b"yes" if events[request].wait(30) else b"no"
        return told

    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Count": grpc.unary_stream_rpc_method_handler(count),
        "Total": grpc.stream_unary_rpc_method_handler(total),
        "Talk": grpc.stream_stream_rpc_method_handler(talk),
        "Fail": grpc.unary_stream_rpc_method_handler(fail),
        "Wait": grpc.unary_unary_rpc_method_handler(wait),
        "HasBegun": grpc.unary_unary_rpc_method_handler(tell(begun)),
        "HasEnded": grpc.unary_unary_rpc_method_handler(tell(ended)),
    }
    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(16),
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peer", methods),))
    with open(KEY, "rb") as key, open(CERT, "rb") as cert:
        credentials = grpc.ssl_server_credentials([(key.read(), cert.read())])
    server.add_secure_port(f"127.0.0.1:{PORT}", credentials)
    server.start()
    server.wait_for_termination()


async def websocket_server():
    from websockets.asyncio.server import serve

    def known(connection, request):
        if request.headers.get("Authorization") != WANTED:
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "no token\n")

    async def answer(connection):
        compressed = bool(connection.protocol.extensions)
        await connection.send(f"compressed: {compressed}")
        async for message in connection:
            if message == "ping me":
                await (await connection.ping(b"are you there"))
                await connection.send("you are")
            elif message == "fragments":
                await connection.send(["one, ", "two, ", "three"])
            elif message == "close":
                await connection.close(4001, "as you wish")
            elif message == "vanish":
                connection.transport.abort()
            else:
                await connection.send(message)

    async with serve(answer, "127.0.0.1", PORT, ssl=context("http/1.1"), process_request=known,
                     max_size=None, ping_interval=None):
        await asyncio.get_running_loop().create_future()


async def events_server():
    from aiohttp import web
    acknowledged = {}

    def known(request):
        if request.headers.get("Authorization") != WANTED:
            raise web.HTTPUnauthorized()

    async def events(request):
        """Says the next event only after the client has said that it got the one before."""
        known(request)
        kind, stream = request.query["type"], request.query["stream"]
        queue = acknowledged.setdefault(stream, asyncio.Queue())
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for number in range(20):
            # The last bytes are such as a value could begin with: they must come all the same.
            await response.write(b"data: %d S" % number)
            assert await asyncio.wait_for(queue.get(), 60) == number
        return response

    async def acknowledge(request):
        known(request)
        queue = acknowledged.setdefault(request.query["stream"], asyncio.Queue())
        queue.put_nowait(int(request.query["number"]))
        return web.Response(text="ok")

    async def upload(request):
        """Reads slowly where it is asked to, and says how much came and in how many pieces."""
        known(request)
        length = 0
        while piece := await request.content.read(64 * 1024):
            length += len(piece)
            if "slow" in request.query:
                await asyncio.sleep(0.001)
        return web.Response(text=f"{length} {request.headers.get('Content-Length')}")

    application = web.Application(client_max_size=0)
    application.add_routes([
        web.get("/events", events), web.post("/acknowledge", acknowledge),
        web.post("/upload", upload), web.put("/upload", upload)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", PORT, ssl_context=context("http/1.1")).start()
    await asyncio.get_running_loop().create_future()


match KIND:
    case "grpc":
        grpc_server()
    case "websocket":
        asyncio.run(websocket_server())
    case "events":
        asyncio.run(events_server())

"""Every kind of gRPC call, in a sandbox, with no token: prints one line for each claim that holds."""

import os
import sys
import threading

import grpc

HOST, WRONG = sys.argv[1:3]
with open(os.environ["SSL_CERT_FILE"], "rb") as roots:
    credentials = grpc.ssl_channel_credentials(roots.read())
options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
channel = grpc.secure_channel(f"{HOST}:443", credentials, options)
path = "/test.Peer/{}".format
LIMIT = 60


def holds(claim, condition, shown=""):
    if not condition:
        sys.exit(f"FAILED: {claim} {shown}")
    print(f"holds: {claim}", flush=True)


answer, call = channel.unary_unary(path("Echo")).with_call(b"hello", timeout=LIMIT)
trailers = dict(call.trailing_metadata())
holds("unary", answer == b"hello")
holds("trailers", trailers["x-trailer"] == "one" and trailers["x-binary-bin"] == bytes(range(256)))
large = os.urandom(20 << 20)
holds("large message", channel.unary_unary(path("Echo"))(large, timeout=LIMIT) == large)
numbers = [int(part) for part in channel.unary_stream(path("Count"))(b"500", timeout=LIMIT)]
holds("server stream", numbers == list(range(500)))
parts = [os.urandom(1000) for _ in range(300)]
holds("client stream", channel.stream_unary(path("Total"))(iter(parts), timeout=LIMIT) == b"300000")

# Each message leaves only after the answer to the one before has come.
turn = threading.Semaphore(1)


def one_by_one():
    for number in range(256):
        turn.acquire()
        # Messages that end in every byte there is: none may wait for the next.
        yield bytes([number, 1])


got = []
for part in channel.stream_stream(path("Talk"))(one_by_one(), timeout=LIMIT):
    got.append(part)
    turn.release()
holds("both ways, message by message", got == [bytes([1, number]) for number in range(256)])

failing = channel.unary_stream(path("Fail"))(b"", timeout=LIMIT)
seen = []
try:
    seen.extend(failing)
    holds("error after a message", False)
except grpc.RpcError as error:
    told = (error.code(), error.details())
    holds("error after a message",
          len(seen) <= 1 and told == (grpc.StatusCode.FAILED_PRECONDITION, "not today: 100% \u2713"), told)
try:
    channel.unary_unary(path("Wait"))(b"deadline", timeout=1)
    holds("deadline", False)
except grpc.RpcError as error:
    holds("deadline", error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error)
cancelled = channel.unary_unary(path("Wait")).future(b"cancelled")
for claim, told in [("a call without a deadline reaches the server", "HasBegun"),
                    ("and when it is cancelled the server sees it end", "HasEnded")]:
    holds(claim, channel.unary_unary(path(told))(b"cancelled", timeout=LIMIT) == b"yes")
    cancelled.cancel()
try:
    channel.unary_unary("/other.Peer/Echo")(b"", timeout=LIMIT)
    holds("denied method", False)
except grpc.RpcError as error:
    told = (error.code(), error.details())
    holds("denied method", told[0] == grpc.StatusCode.PERMISSION_DENIED and "path_not_listed" in told[1], told)
holds("after all that", channel.unary_unary(path("Echo"))(b"still", timeout=LIMIT) == b"still")

"""Python clients of other projects in a sandbox: prints one line for each claim that holds."""

import asyncio
import sys
import threading

import aiohttp
import httpx
import requests

WEB, EVENTS = sys.argv[1:3]


def holds(claim, condition, shown=""):
    if not condition:
        sys.exit(f"FAILED: {claim} {shown}")
    print(f"holds: {claim}", flush=True)


for claim, version, call in [
    ("requests", 11, lambda: requests.get(f"https://{WEB}/hello", timeout=60)),
    ("httpx", "HTTP/1.1", lambda: httpx.get(f"https://{WEB}/hello", timeout=60)),
    ("httpx over HTTP/2", "HTTP/2", lambda: httpx.Client(http2=True).get(f"https://{WEB}/hello", timeout=60)),
]:
    got = call()
    spoken = got.raw.version if claim == "requests" else got.http_version
    holds(claim, got.text == "hello\n" and spoken == version, (got.status_code, got.text, spoken))


async def with_aiohttp():
    async with aiohttp.ClientSession() as session:
        async with session.get(f"https://{WEB}/hello") as got:
            holds("aiohttp", await got.text() == "hello\n", got.status)

asyncio.run(with_aiohttp())

# Each event is sent only after the one before was acknowledged: what is held back hangs for ever.
for kind in ["text/event-stream", "application/x-ndjson", "text/plain", "application/octet-stream"]:
    stream = kind.replace("/", "-")
    side = requests.Session()
    with requests.get(f"https://{EVENTS}/events", params={"type": kind, "stream": stream}, stream=True,
                      timeout=60) as got:
        seen = b""
        for piece in got.iter_content(None):
            seen += piece
            number = seen.count(b"S") - 1
            if seen.endswith(b" S"):
                query = {"stream": stream, "number": number}
                side.post(f"https://{EVENTS}/acknowledge", params=query, timeout=60).raise_for_status()
    holds(f"events as {kind}", seen == b"".join(b"data: %d S" % n for n in range(20)), seen)

# Slow readers and slow answerers, with and without a length.
for size in [135 * 1024, 1 << 20, 50 << 20]:
    chunks = [b"x" * 65536] * (size // 65536) + [b"x" * (size % 65536)] * bool(size % 65536)
    query = {"slow": "yes"} if size <= 1 << 20 else {}
    got = requests.post(f"https://{EVENTS}/upload", params=query, data=b"".join(chunks), timeout=100)
    holds(f"upload of {size}", got.text == f"{size} {size}", got.text)
    got = requests.post(f"https://{EVENTS}/upload", params=query, data=iter(chunks), timeout=100)
    holds(f"upload of {size} in chunks", got.text == f"{size} None", got.text)

# Many at once on one connection and on many.
failures = []
with httpx.Client(http2=True, timeout=100) as client:
    def fetch():
        got = client.get(f"https://{WEB}/hello")
        if got.text != "hello\n":
            failures.append(got.status_code)
    threads = [threading.Thread(target=fetch) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
holds("sixty at once", not failures, failures)

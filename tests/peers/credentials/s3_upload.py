"""Puts an object with a signature of our own making, in one of the ways that S3 has for the body: what AWS's
clients for Python do not send. `s3_upload.py ENDPOINT PATH WAY BYTES [spoil]` prints the answer's status.

WAY is the value of x-amz-content-sha256, or `hash`; `spoil` breaks the signature of the second chunk.
"""

import base64
import datetime
import hashlib
import hmac
import http.client
import os
import sys
import urllib.parse
import zlib

END, PATH, WAY, SIZE = urllib.parse.urlsplit(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
SPOIL = sys.argv[5:] == ["spoil"]
KEY, SECRET = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
CHUNK = 64 << 10
BODY = bytes(range(256)) * (SIZE // 256 + 1)
BODY = BODY[:SIZE]
NOW = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
SCOPE = f"{NOW[:8]}/eu-central-1/s3/aws4_request"
NOTHING = hashlib.sha256(b"").hexdigest()


def mac(key, text):
    return hmac.new(key, text.encode(), hashlib.sha256)


def sign(kind, *lines):
    key = b"AWS4" + SECRET.encode()
    for part in SCOPE.split("/"):
        key = mac(key, part).digest()
    return mac(key, "\n".join([kind, NOW, SCOPE, *lines])).hexdigest()


chunked, trailer = WAY.startswith("STREAMING-"), WAY.endswith("-TRAILER")
headers = {"host": END.netloc, "x-amz-date": NOW,
           "x-amz-content-sha256": hashlib.sha256(BODY).hexdigest() if WAY == "hash" else WAY}
if chunked:
    headers["content-encoding"] = "aws-chunked"
    headers["x-amz-decoded-content-length"] = str(SIZE)
if trailer:
    headers["x-amz-trailer"] = "x-amz-checksum-crc32"
names = ";".join(sorted(headers))
canonical = "\n".join(["PUT", urllib.parse.quote(PATH), "", *(f"{n}:{headers[n]}" for n in sorted(headers)), "",
                       names, headers["x-amz-content-sha256"]])
seed = sign("AWS4-HMAC-SHA256", hashlib.sha256(canonical.encode()).hexdigest())
headers["authorization"] = (f"AWS4-HMAC-SHA256 Credential={KEY}/{SCOPE}, SignedHeaders={names}, Signature={seed}")


def chunks():
    last = seed
    for number, start in enumerate([*range(0, SIZE, CHUNK), None]):
        piece = b"" if start is None else BODY[start:start + CHUNK]
        last = sign("AWS4-HMAC-SHA256-PAYLOAD", last, NOTHING, hashlib.sha256(piece).hexdigest())
        shown = "0" * 64 if SPOIL and number == 1 else last
        head = f"{len(piece):x};chunk-signature={shown}\r\n".encode()
        # Behind the last chunk, which is empty, the trailer stands in the place of its end.
        yield head + piece + (b"" if start is None and trailer else b"\r\n")
    if trailer:
        line = "x-amz-checksum-crc32:" + base64.b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode()
        signed = sign("AWS4-HMAC-SHA256-TRAILER", last, hashlib.sha256(f"{line}\n".encode()).hexdigest())
        yield f"{line}\r\nx-amz-trailer-signature:{signed}\r\n\r\n".encode()


body = b"".join(chunks()) if chunked else BODY
kind = http.client.HTTPSConnection if END.scheme == "https" else http.client.HTTPConnection
client = kind(END.netloc, timeout=120)
try:
    client.request("PUT", urllib.parse.quote(PATH), body, headers)
except OSError as error:
    # A server may answer, and close, before it has read all.
    print(f"sending ended: {error}", file=sys.stderr)
answer = client.getresponse()
text = answer.read().decode(errors="replace")
print(answer.status, *([] if answer.status == 200 else [text]))

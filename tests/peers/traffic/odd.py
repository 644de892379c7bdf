"""Sends odd requests over raw TLS, each followed by a plain one; prints how each was answered."""

import json
import re
import socket
import ssl
import sys

HOST = sys.argv[1]
context = ssl.create_default_context()
HEAD = "POST /odd/{n}/first HTTP/1.1\r\nHost: {h}\r\n"
NEXT = "GET /odd/{n}/next HTTP/1.1\r\nHost: {h}\r\nConnection: close\r\n\r\n"
CASES = [
    "Content-Length: 5\r\n\r\nhello",
    "Content-Length: 05\r\n\r\nhello",
    "Content-Length:5\r\n\r\nhello",
    "Content-Length: 5 \r\n\r\nhello",
    "Content-Length: 0\r\n\r\n",
    "\r\n",
    "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello",
    "Content-Length: 5, 5\r\n\r\nhello",
    "Content-Length: +5\r\n\r\nhello",
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n05\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n5;a=\"\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n5 ;a\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    "Transfer-Encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\r\n",
    "Transfer-Encoding: chunked\r\n\r\n00\r\n\r\n",
    "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    " Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "X: \0\r\nContent-Length: 0\r\n\r\n",
    "Transfer_Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    "Content_Length: 9\r\nContent-Length: 5\r\n\r\nhello",
    "Connection: Content-Length\r\nContent-Length: 5\r\n\r\nhello",
    "Connection: X-A, close\r\nX-A: 1\r\nContent-Length: 0\r\n\r\n",
    "Content-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    "X: {long}\r\nContent-Length: 5\r\n\r\nhello",
    "Content-Length: 18446744073709551621\r\n\r\nhello",
]

results = []
for number, case in enumerate(CASES):
    fill = lambda text: text.replace("{n}", str(number)).replace("{h}", HOST).replace("{long}", "y" * 3000)
    sent = fill(HEAD) + fill(case) + fill(NEXT)
    got = b""
    with context.wrap_socket(socket.create_connection((HOST, 443), 60), server_hostname=HOST) as stream:
        try:
            stream.sendall(sent.encode("latin-1"))
            while piece := stream.recv(65536):
                got += piece
        except OSError:
            pass
    finals = [int(status) for status in re.findall(rb"(?:^|\n)HTTP/1\.1 ([2-5]\d\d) ", got)]
    results.append([number, case, finals])
print(json.dumps(results))

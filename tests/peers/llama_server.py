"""Serves one model with llama.cpp's HTTP server: llama_server.py WEIGHTS TEMPLATE KEY_FILE PORT.

The API key is read from KEY_FILE, which is removed at once: from then on this process and the
client's vault are the only places that have it. The wheel has no TLS: the suite puts nginx before it.
"""

import os
import pathlib
import signal
import sys

import xllamacpp

weights, template, key_file, port = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = weights
params.model_alias = {"smollm2-135m"}
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.n_ctx = 8192
params.n_parallel = 2
params.cpuparams.n_threads = 2
params.n_gpu_layers = 0
params.use_jinja = True
params.chat_template = pathlib.Path(template).read_text()
params.api_keys = [pathlib.Path(key_file).read_text()]
pathlib.Path(key_file).unlink()
server = xllamacpp.Server(params)
print("serving", flush=True)
signal.sigwait([signal.SIGTERM, signal.SIGINT])
# Its threads have nothing to save.
os._exit(0)

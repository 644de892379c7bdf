"""One search for secrets through all that an installation leaves and holds: its files, and of each of its
processes the open files, the arguments, the environment and the memory. They may be in the peers' own files and
in the memory of the vault's processes, and nowhere else."""

import base64
import contextlib
import os
import pathlib
import re
import time
import urllib.parse

# What proxyd's processes that may hold secrets are told to be.
KEEPERS = ("vault", "vault-fetch", "vault-run", "vault-command")
# Directories of an installation, and its log; what else lies beside them is the peers'.
OURS = ("run", "state", "policies", "config", "up.log")
# After the last exchange the traffic process holds what it put into it for five seconds.
PATIENCE = 60


def parts(value):
    """What of a stored value is secret by itself."""
    keys = re.findall(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?)-----END", value, re.S)
    if keys:
        bodies = [b"".join(key.split()) for key in keys]
        # A part of a key is one too: each of its lines.
        lines = [line for key in keys for line in key.split() if len(line) >= 32]
        return [base64.b64decode(body) for body in bodies] + bodies + lines
    key = re.fullmatch(rb"(A[A-Z0-9]{11,}):([^:]+)(?::([^:]+))?", value)
    return [part for part in key.groups()[1:] if part] if key else [value]


def forms(value):
    """The value and its usual encodings; of base64 what the value alone decides."""
    yield value
    for before in range(3):
        first, end = (8 * before + 5) // 6, (8 * before + 8 * len(value)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(b"x" * before + value)[first:end]
    for digits in (value.hex(), value.hex().upper()):
        yield digits.encode()
        yield b"".join(b"%" + digits[at:at + 2].encode() for at in range(0, len(digits), 2))
    yield urllib.parse.quote_from_bytes(value, safe="").encode()


class Search:
    def __init__(self, values):
        """`values` maps a value to what it is called in a report: nothing else of it is shown."""
        self.needles = {}
        for value, name in values.items():
            for part in parts(value):
                for form in forms(part):
                    self.needles.setdefault(form, name)

    def found(self, content):
        return {name for needle, name in self.needles.items() if needle in content}


def files(place):
    """Files of the installation, and of the peers, with their content."""
    for path in place.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                ours = path.relative_to(place.root).parts[0] in OURS
                yield str(path), ours, path.read_bytes()


def children(pid):
    """A process and all that it started."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Its name may hold anything but ends with the last parenthesis.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, last = [pid], [pid]
    while last:
        last = [child for child, parent in parents.items() if parent in last]
        found += last
    return found


class Process:
    def __init__(self, pid):
        self.place = pathlib.Path(f"/proc/{pid}")

    def learn(self):
        self.arguments = self.place.joinpath("cmdline").read_bytes()
        words = [word.decode(errors="replace") for word in self.arguments.split(b"\0")[1:5]]
        # `cleanhands up` starts daemons so that they end with it.
        words = words[2:] if words[:1] == ["attached"] else words[:2]
        self.role = " ".join(word for word in words if re.fullmatch("[a-z][a-z-]*", word)) or "?"
        self.keeps = bool(set(self.role.split()) & set(KEEPERS))
        self.name = f"{self.role} ({self.place.name})"

    def texts(self):
        """Its arguments, its environment and the files that it has open, by name."""
        texts = [(name, (self.place / name).read_bytes()) for name in ("cmdline", "environ")]
        for descriptor in (self.place / "fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.is_file():
                    texts.append((f"open file {descriptor.readlink()}", descriptor.read_bytes()))
        return texts

    def memory(self):
        """What it has written to, without pages of zeros."""
        zeros = bytes(4096)
        pieces = []
        with open(self.place / "mem", "rb", buffering=0) as memory:
            for line in (self.place / "maps").read_text().splitlines():
                fields = line.split()
                if fields[1][1] != "w" or fields[-1] in ("[vvar]", "[vsyscall]"):
                    continue
                first, end = (int(number, 16) for number in fields[0].split("-"))
                with contextlib.suppress(OSError, OverflowError, ValueError):
                    memory.seek(first)
                    content = memory.read(end - first)
                    pages = (content[at:at + 4096] for at in range(0, len(content), 4096))
                    kept = b"".join(page for page in pages if page != zeros)
                    pieces.append(kept)
        if not (self.place / "maps").read_bytes():
            # It has ended in the middle of it.
            raise ProcessLookupError
        # A value does not go on from one mapping to another.
        return b"\0\0\0\0".join(pieces)

    def limits(self):
        line = re.search(r"^Max core file size\s+(\S+)\s+(\S+)", (self.place / "limits").read_text(), re.M)
        return line.groups()


def check_search(claims, place):
    """The search finds what is there, in every form."""
    value = b"MARKER-" + os.urandom(20).hex().encode() + b"?>~+/"
    search = Search({value: "the marker"})
    path = place.root / "run/marker"
    missed = []
    try:
        for form in forms(value):
            path.write_bytes(b"before " + form + b" after")
            hits = [name for name, ours, content in files(place) if ours and search.found(content)]
            missed += [form] if hits != [str(path)] else []
    finally:
        path.unlink(missing_ok=True)
    claims.holds("the search finds a marker in every form", not missed, str(missed))


def check(claims, what, place, exercise):
    """Searches the installation of `place` for all that it has stored and that its peers gave out. `exercise`
    uses the secrets once more: what an operator stores goes through the process that carries traffic, so that
    one is a new one by then."""
    check_search(claims, place)
    search = Search(place.secrets)
    found, read = [], 0
    for path, ours, content in files(place):
        read += 1
        found += [(path, name) for name in search.found(content) if ours]
    claims.holds(f"{what}: of {len(place.secrets)} secrets in {len(search.needles)} forms none is in the "
                 f"installation's files ({read} read)", not found and read > 10, str(found))
    place.restart()
    exercise()
    search = Search(place.secrets)
    running = [process for process, _ in looked(map(Process, children(place.up.pid)), Process.learn)]
    roles = {process.role for process in running}
    claims.holds(f"{what}: all processes are looked into",
                 sum(process.keeps for process in running) >= 2 and len(running) >= 6, str(roles))
    for process in running:
        if process.keeps:
            claims.holds(f"{what}: no core can be made of {process.role}", process.limits() == ("0", "0"))
    if os.getuid() != 0:
        # Undumpable: nobody but root may look, also not whose processes they are. Others hold nothing.
        running = [process for process in running if reads(process)]
        sees = [process.name for process in running if process.role.startswith(("proxyd", "harnessd"))]
        claims.holds(f"{what}: nobody but root can look into what sees secrets", running and not sees, str(sees))
    found = [(process.name, part, name) for process, texts in looked(running, Process.texts)
             for part, content in texts for name in search.found(content)]
    claims.holds(f"{what}: no secret is in arguments, environments and open files", not found, str(found))
    memories = list(looked(running, Process.memory))
    blind = [process.name for process, memory in memories if process.arguments not in memory]
    traffic = [memory for process, memory in memories if process.role == "proxyd"]
    blind += [host for memory in traffic for host in place.hosts if host.encode() not in memory]
    claims.holds(f"{what}: the search sees their memory",
                 not blind and len(traffic) == (os.getuid() == 0), str(blind))
    others = [process for process in running if not process.keeps]
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [(process.name, name) for process, memory in looked(others, Process.memory)
                 for name in search.found(memory)]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(1)
    claims.holds(f"{what}: and in the memory of none but the vault's", not found, str(found))


def looked(processes, look):
    """What is seen of each; a process that has ended meanwhile, as those of a sandbox do, is passed over."""
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield process, look(process)


def reads(process):
    try:
        return bool(process.memory())
    except OSError:
        return False

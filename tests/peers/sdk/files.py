"""Files by the official SDK: uploaded, given to a session, read in its sandbox, taken away again.

Usage: files.py SOCKET. The daemon's model `files` runs `cat /mnt/session/uploads/in/data.csv`, expects
MARK-77431 in what it printed, tries to write beside it, and ends its turn with a text.
"""

import sys
import uuid

import anthropic

from quickstart import Claims, client_of, one_turn

TEXT = b"city,mark\nBern,MARK-77431\n" + b"x,y\n" * 700_000


def uploads(claims, client):
    file = client.files.upload(file=("data.csv", TEXT, "text/csv"))
    claims.holds(
        "an upload comes back whole", file.id.startswith("file_") and file.filename == "data.csv"
        and file.mime_type == "text/csv" and file.size_bytes == len(TEXT)
        and file.downloadable is False and file.expires_at is None and file.scope is None, file)
    brief = client.beta.files.upload(file=("brief.txt", b"brief"), expires_in_seconds=3600)
    claims.holds("one with an end says when", brief.expires_at > brief.created_at, brief)
    claims.holds(
        "both are listed, the newest first, in pages of one too",
        [f.id for f in client.files.list(limit=1)] == [brief.id, file.id]
        and [f.id for f in client.files.list(ids=[file.id, "file_none"])] == [file.id])
    claims.holds("one is read about", client.files.retrieve_metadata(file.id) == file)
    claims.raises(
        "what was uploaded is not given out", anthropic.BadRequestError,
        lambda: client.files.download(file.id), "not downloadable")
    claims.raises(
        "a life of a minute is refused by name", anthropic.BadRequestError,
        lambda: client.files.upload(file=("x", b"x"), expires_in_seconds=60), "expires_in_seconds")
    claims.holds("one is deleted", client.files.delete(brief.id).type == "file_deleted")
    claims.raises(
        "and gone", anthropic.NotFoundError, lambda: client.files.retrieve_metadata(brief.id))
    return file


def a_session(claims, client, file):
    sessions = client.beta.sessions
    environment = client.beta.environments.create(name=f"files-{uuid.uuid4()}")
    agent = client.beta.agents.create(
        name="Files", model="files", tools=[{"type": "agent_toolset_20260401"}])
    new = {"agent": agent.id, "environment_id": environment.id}
    claims.raises(
        "a repository is refused by name", anthropic.BadRequestError,
        lambda: sessions.create(**new, resources=[{
            "type": "github_repository", "url": "https://github.com/acme/widget"}]),
        "resources[0].type")
    claims.raises(
        "a file that is not there is a 404", anthropic.NotFoundError,
        lambda: sessions.create(**new, resources=[{"type": "file", "file_id": "file_none"}]))
    session = sessions.create(**new, resources=[
        {"type": "file", "file_id": file.id, "mount_path": "/in/data.csv"}])
    given = session.resources[0]
    claims.holds(
        "a session says what it was given, and where",
        given.mount_path == "/mnt/session/uploads/in/data.csv" and given.file_id != file.id, given)
    client.files.delete(file.id)

    events, _ = one_turn(sessions, session.id, "Read it.")
    results = [e for e in events if e.type == "agent.tool_result"]
    last = [e for e in events if e.type == "agent.message"][-1]
    claims.holds(
        "a sandbox of the session reads it, though the file is deleted, and cannot write there",
        last.content[0].text == "Read." and results[1].is_error
        and "Read-only" in results[1].content[0].text, [e.to_dict() for e in events])
    return session, given


def changes(claims, client, session, given):
    resources = client.beta.sessions.resources
    note = client.files.upload(file=("note.txt", b"a note"))
    added = resources.add(session.id, type="file", file_id=note.id)
    claims.holds(
        "a file can be added later, under its id where no place is named",
        added.mount_path == f"/mnt/session/uploads/{note.id}", added)
    claims.holds(
        "the list has both", [r.id for r in resources.list(session.id)] == [given.id, added.id]
        and resources.retrieve(added.id, session_id=session.id) == added)
    copies = list(client.beta.files.list(scope_id=session.id))
    claims.holds(
        "the session's copies are found by its id",
        {f.id for f in copies} == {given.file_id, added.file_id}
        and {f.scope.id for f in copies} == {session.id}, copies)
    gone = resources.delete(given.id, session_id=session.id)
    claims.holds(
        "and one can be taken away", gone.type == "session_resource_deleted"
        and [r.id for r in resources.list(session.id)] == [added.id], gone)


def main(socket):
    claims = Claims()
    client = client_of(socket, [])
    file = uploads(claims, client)
    session, given = a_session(claims, client, file)
    changes(claims, client, session, given)
    claims.close()


if __name__ == "__main__":
    main(sys.argv[1])

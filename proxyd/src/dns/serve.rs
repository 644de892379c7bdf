//! The two ways a sandbox's questions arrive: packets on the lease's UDP socket, and connections
//! to port 53.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::message;
use crate::Daemon;
use crate::audit::Line;
use crate::lease::Lease;
use crate::lease::notes::End;
use crate::relay::stream::Stream;
use crate::sys::packet;

/// Longest question. Ours never need more, and what is longer asks for nothing we answer.
const PACKET_BYTES_MAX: usize = 4096;
/// A connection that asks nothing for so long is closed.
const IDLE: Duration = Duration::from_secs(10);

/// Answers packets until the lease ends.
pub async fn udp(daemon: Arc<Daemon>, lease: Arc<Lease>, socket: OwnedFd) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    let socket = watched(socket)?;
    let mut buffer = vec![0u8; PACKET_BYTES_MAX];
    loop {
        let mut ready = socket.readable().await?;
        let asked = match packet::receive(socket.get_ref(), &mut buffer) {
            Ok(Some(asked)) => asked,
            Ok(None) => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ready.clear_ready();
                continue;
            }
            // An earlier answer could not be delivered; the socket is as good as before.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error),
        };
        let packet = &buffer[..asked.length.min(PACKET_BYTES_MAX)];
        let (answer, refused) = match asked.truncated {
            true => (message::too_long(packet), None),
            false => respond(&daemon, &lease, packet),
        };
        if let Some(bytes) = answer {
            // UDP may lose answers; the client asks again.
            let _ = packet::answer(socket.get_ref(), &asked, &bytes);
        }
        if let Some(line) = refused {
            record(&daemon, &line).await;
        }
    }
}

#[expect(deprecated, reason = "the replacement is unsafe, and OwnedFd meets what it asks")]
fn watched(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(socket)
}

/// Answers questions on one connection to port 53 (RFC 1035 section 4.2.2).
pub async fn tcp(daemon: &Daemon, lease: &Lease, mut stream: Stream) -> io::Result<()> {
    loop {
        let length = match timeout(IDLE, stream.read_u16()).await {
            Ok(Ok(length)) => usize::from(length),
            _ => return Ok(()),
        };
        if length > PACKET_BYTES_MAX {
            return Ok(());
        }
        let mut packet = vec![0u8; length];
        let Ok(read) = timeout(IDLE, stream.read_exact(&mut packet)).await else { return Ok(()) };
        read?;
        let (answer, refused) = respond(daemon, lease, &packet);
        // A client that reads no answer has asked as well.
        if let Some(line) = refused {
            record(daemon, &line).await;
        }
        let Some(bytes) = answer else { return Ok(()) };
        let length = u16::try_from(bytes.len()).expect("answers are shorter than questions allow");
        stream.write_u16(length).await?;
        stream.write_all(&bytes).await?;
        stream.flush().await?;
    }
}

/// The answer, and the audit's line where it is a refusal.
fn respond(daemon: &Daemon, lease: &Lease, packet: &[u8]) -> (Option<Vec<u8>>, Option<Line>) {
    let Some((policy, generation)) = lease.policy(&daemon.policies.current()) else {
        return (None, None);
    };
    let mut line = None;
    let answer = super::respond(&policy, &lease.names, packet, |name, reason| {
        line = Some(Line {
            entry: Some("dns".to_owned()),
            host: Some(name.to_owned()),
            reason: Some(reason.to_string()),
            generation,
            ..lease.line()
        });
    });
    if let Some(line) = &line {
        lease.notes.add(line, End::Refused, None);
    }
    (answer, line)
}

/// Records or counts a refused lookup. A disk that is behind holds up this lease's next lookup over
/// UDP, or the connection's: what waits to be recorded has a bound.
async fn record(daemon: &Daemon, line: &Line) {
    // Nothing left on behalf of the question, so a record that fails lets nothing out.
    if let Err(error) = daemon.audit.deny(line).await {
        tracing::error!(%error, "cannot record a refused lookup");
    }
}

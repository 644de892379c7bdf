//! Which of several addresses answers first (RFC 8305, "happy eyeballs").
//!
//! Families take turns, IPv6 first; each attempt has a short head start over the next and goes on
//! beside it. What became of every address is told when none answers.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// How long an attempt is alone before the next one starts beside it (RFC 8305, section 5).
const HEAD_START: Duration = Duration::from_millis(250);

/// Why none of the addresses answered.
#[derive(Debug, PartialEq, Eq)]
pub enum Lost {
    /// What each address said.
    Refused(String),
    /// These had not answered when the time was up.
    Silent(String),
}

/// Connects to the address that answers first, within `patience` for all of them together.
pub async fn race(
    addresses: &[SocketAddr],
    patience: Duration,
) -> Result<(TcpStream, SocketAddr), Lost> {
    if let [address] = addresses {
        return alone(*address, patience).await;
    }
    let deadline = Instant::now() + patience;
    let mut waiting = interleaved(addresses).into_iter();
    let mut attempts = JoinSet::new();
    let mut open = Vec::new();
    let mut failures = Vec::new();
    let mut next_start = Instant::now();
    let mut next = waiting.next();
    loop {
        // Not by a timer that rings at once: those ring a millisecond late.
        if next_start <= Instant::now()
            && let Some(address) = next.take()
        {
            open.push(address);
            attempts.spawn(async move { (address, TcpStream::connect(address).await) });
            next = waiting.next();
            next_start = Instant::now() + HEAD_START;
        }
        if next.is_none() && attempts.is_empty() {
            return Err(Lost::Refused(failures.join("; ")));
        }
        tokio::select! {
            biased;
            Some(ended) = attempts.join_next(), if !attempts.is_empty() => {
                // Attempts are aborted only when this function is left.
                let Ok((address, outcome)) = ended else { continue };
                open.retain(|other| *other != address);
                match outcome {
                    Ok(stream) => return Ok((stream, address)),
                    Err(error) => {
                        let error: std::io::Error = error;
                        failures.push(format!("{address}: {}", said(&error)));
                        next_start = Instant::now();
                    }
                }
            }
            () = sleep_until(next_start), if next.is_some() => {}
            () = sleep_until(deadline) => {
                failures.extend(open.iter().map(|address| format!("{address}: no answer")));
                return Err(Lost::Silent(failures.join("; ")));
            }
        }
    }
}

/// The same with one address, which is what most names have: no task besides this one.
async fn alone(address: SocketAddr, patience: Duration) -> Result<(TcpStream, SocketAddr), Lost> {
    match timeout(patience, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => Ok((stream, address)),
        Ok(Err(error)) => Err(Lost::Refused(format!("{address}: {}", said(&error)))),
        Err(_) => Err(Lost::Silent(format!("{address}: no answer"))),
    }
}

/// The error without its number.
fn said(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        ErrorKind::ConnectionReset => "connection reset".to_owned(),
        ErrorKind::HostUnreachable => "no route to the host".to_owned(),
        ErrorKind::NetworkUnreachable => "no route to its network".to_owned(),
        ErrorKind::TimedOut => "no answer".to_owned(),
        _ => error.to_string(),
    }
}

/// One of each family in turn, each family in its own order.
fn interleaved(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let of = |v6: bool| addresses.iter().copied().filter(move |a| a.is_ipv6() == v6);
    let (mut six, mut four) = (of(true), of(false));
    let mut order = Vec::with_capacity(addresses.len());
    loop {
        match (six.next(), four.next()) {
            (None, None) => return order,
            (first, second) => order.extend(first.into_iter().chain(second)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// A port of loopback that refuses: nothing listens there any more.
    async fn refusing() -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    }

    #[test]
    fn families_take_turns() {
        let order = interleaved(&addresses(&["1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1", "[::2]:1"]));

        assert_eq!(order, addresses(&["[::2]:1", "1.1.1.1:1", "1.1.1.2:1", "1.1.1.3:1"]));
    }

    #[tokio::test]
    async fn an_address_that_answers_wins_over_those_that_refuse_or_stay_silent() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let answering = listener.local_addr().unwrap();
        // A backlog that is full leaves further connections without an answer.
        let (full, _held) = silent();
        let list = [refusing().await, full, answering];

        let (_, reached) = race(&list, Duration::from_secs(20)).await.unwrap();

        assert_eq!(reached, answering);
    }

    #[tokio::test]
    async fn what_became_of_every_address_is_told() {
        let (first, second) = (refusing().await, refusing().await);

        let lost = race(&[first, second], Duration::from_secs(20)).await.unwrap_err();

        let expected = format!("{first}: connection refused; {second}: connection refused");
        assert_eq!(lost, Lost::Refused(expected));
    }

    #[tokio::test]
    async fn silence_ends_when_the_time_is_up() {
        let (full, _held) = silent();

        let lost = race(&[full], Duration::from_millis(50)).await.unwrap_err();

        assert_eq!(lost, Lost::Silent(format!("{full}: no answer")));
    }

    /// A listener whose backlog is full, and what fills it.
    fn silent() -> (SocketAddr, Vec<std::net::TcpStream>) {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        rustix::net::bind(&socket, &any).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let listener = std::net::TcpListener::from(socket);
        let address = listener.local_addr().unwrap();
        let mut held = Vec::new();
        // The first is taken into the queue; once one is left without an answer, it is full.
        while let Ok(stream) =
            std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1))
        {
            held.push(stream);
        }
        // The listener stays open for as long as the process: tests end before.
        std::mem::forget(listener);
        (address, held)
    }
}

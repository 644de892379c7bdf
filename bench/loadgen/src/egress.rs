//! Loads that a sandbox can make itself: plain TCP through a tunnel, and requests at a pace.
//!
//! `raw-serve` is the other end of the first two: a connection's first byte says what it wants.
//! VIA is as in `load`; a name in it is looked up once, before anything is measured.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::Failure;
use crate::client::{Socket, Target, read_answer};

const ECHO: u8 = b'e';
const FLOOD: u8 = b'f';
const PIECE_BYTES: usize = 256 * 1024;
const WARM_UP: Duration = Duration::from_millis(300);
/// Time between two requests of a client that does little.
const PACE: Duration = Duration::from_millis(10);

/// Gives a byte back, or as many as are taken.
pub async fn serve(port_out: &str) -> Result<(), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    std::fs::write(port_out, listener.local_addr()?.port().to_string())?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let mut wish = [0u8; 1];
            if stream.read_exact(&mut wish).await.is_err() {
                return;
            }
            if wish[0] == FLOOD {
                let piece = vec![b'x'; PIECE_BYTES];
                while stream.write_all(&piece).await.is_ok() {}
            } else {
                // A client that is gone already has what it wanted.
                let _ = stream.write_all(&wish).await;
            }
        });
    }
}

/// Connections one after the other, each for one byte there and back.
pub async fn touch(target: Target, port: u16, seconds: f64) -> Result<(), Failure> {
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs_f64(seconds);
    let mut times = Vec::new();
    loop {
        let start = Instant::now();
        if start >= end {
            break;
        }
        let mut socket = target.reach(&target.host, port).await?;
        socket.write_all(&[ECHO]).await?;
        socket.read_exact(&mut [0; 1]).await?;
        if start >= begin {
            times.push(start.elapsed());
        }
    }
    report(times)
}

/// Bytes as fast as they come, on one connection.
pub async fn pull(target: Target, port: u16, seconds: f64) -> Result<(), Failure> {
    let mut socket: Socket = target.reach(&target.host, port).await?;
    socket.write_all(&[FLOOD]).await?;
    let mut buffer = vec![0; PIECE_BYTES];
    let begin = Instant::now() + WARM_UP;
    let (mut counted, mut since) = (0u64, None);
    loop {
        let length = socket.read(&mut buffer).await?;
        if length == 0 {
            return Err("the connection ended".into());
        }
        let now = Instant::now();
        let Some(since) = since else {
            since = (now >= begin).then_some(now);
            continue;
        };
        counted += u64::try_from(length)?;
        let spent = now.duration_since(since).as_secs_f64();
        if spent >= seconds {
            println!("{{\"mb_s\":{:.0}}}", counted as f64 / 1e6 / spent);
            return Ok(());
        }
    }
}

/// Requests at a pace on one kept connection.
pub async fn paced(target: Target, seconds: f64) -> Result<(), Failure> {
    let mut connection = target.open(&target.host, false).await?;
    let ask = format!("GET /x HTTP/1.1\r\nhost: {}\r\naccept: */*\r\n\r\n", target.host);
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs_f64(seconds);
    let (mut times, mut buffer) = (Vec::new(), vec![0; 64 * 1024]);
    let mut tick = tokio::time::interval(PACE);
    loop {
        tick.tick().await;
        let start = Instant::now();
        if start >= end {
            return report(times);
        }
        connection.write_all(ask.as_bytes()).await?;
        connection.flush().await?;
        read_answer(&mut connection, &mut buffer).await?;
        if start >= begin {
            times.push(start.elapsed());
        }
    }
}

fn report(mut times: Vec<Duration>) -> Result<(), Failure> {
    times.sort_unstable();
    let at = |share: f64| {
        let place = (times.len().saturating_sub(1) as f64 * share) as usize;
        times.get(place).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    let (p50, p99) = (at(0.5), at(0.99));
    println!("{{\"requests\":{},\"p50_us\":{p50:.1},\"p99_us\":{p99:.1}}}", times.len());
    Ok(())
}

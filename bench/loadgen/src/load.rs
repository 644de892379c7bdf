//! The kinds of load, each with a warm-up that does not count.

use std::str::FromStr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::Failure;
use crate::client::{Target, read_answer, read_head};
use crate::serve::{EVENTS, GZIP_BYTES, LARGE_BYTES};

/// Connections, leaf certificates and caches are warm by then.
const WARM_UP: Duration = Duration::from_millis(700);
const STREAMS: usize = 16;
const BUFFER_BYTES: usize = 64 * 1024;

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// Requests one after the other on kept connections.
    Keep,
    /// The same on HTTP/2, with [`STREAMS`] at once on each connection.
    Http2,
    /// A connection for each request.
    New,
    /// A connection for each request, each to a name not seen before: `h0.HOST` counted from here.
    Cold(usize),
    Down,
    /// A compressed answer; its bytes are counted as they are without that.
    Gzip,
    Up,
    /// Event streams: time to the first byte, and how long each event took from there.
    Events,
    /// Connections that did one request and rest.
    Idle,
}

impl FromStr for Kind {
    type Err = Failure;
    fn from_str(text: &str) -> Result<Self, Failure> {
        Ok(match text.split_once(':') {
            Some(("cold", first)) => Self::Cold(first.parse()?),
            _ => match text {
                "keep" => Self::Keep,
                "h2" => Self::Http2,
                "new" => Self::New,
                "down" => Self::Down,
                "gzip" => Self::Gzip,
                "up" => Self::Up,
                "sse" => Self::Events,
                "idle" => Self::Idle,
                _ => return Err(format!("no such load: {text}").into()),
            },
        })
    }
}

pub struct Plan {
    pub kind: Kind,
    pub connections: usize,
    pub time: Duration,
    pub pids: Vec<u32>,
}

/// The clock that all processes of this host share, in nanoseconds.
pub fn now_ns() -> u128 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos())
}

#[derive(Clone, Copy)]
struct Window {
    begin: Instant,
    end: Instant,
}

/// What one connection measured: times of requests, and for events those of each event.
#[derive(Default)]
struct Times {
    requests: Vec<u64>,
    events: Vec<u64>,
}

pub async fn run(target: Target, plan: Plan) -> Result<(), Failure> {
    if plan.kind == Kind::Idle {
        return idle(target, plan).await;
    }
    let warm = if matches!(plan.kind, Kind::Cold(_)) { Duration::ZERO } else { WARM_UP };
    let begin = Instant::now() + warm;
    let window = Window { begin, end: begin + plan.time };
    let tasks: Vec<_> = (0..plan.connections)
        .map(|_| tokio::spawn(client(target.clone(), plan.kind, window)))
        .collect();
    tokio::time::sleep_until(window.begin.into()).await;
    let cpu = cpu(&plan.pids)?;
    let mut all = Times::default();
    for task in tasks {
        let times = task.await??;
        all.requests.extend(times.requests);
        all.events.extend(times.events);
    }
    let spent = window.begin.elapsed();
    report(&plan, all, self::cpu(&plan.pids)?.saturating_sub(cpu), spent);
    Ok(())
}

fn report(plan: &Plan, mut times: Times, cpu: Duration, spent: Duration) {
    let at = |list: &mut Vec<u64>, share: f64| {
        list.sort_unstable();
        list.get((list.len().saturating_sub(1) as f64 * share) as usize).copied().unwrap_or(0)
    };
    let requests = times.requests.len();
    let per = cpu.as_secs_f64() * 1e6 / requests.max(1) as f64;
    let bytes = match plan.kind {
        Kind::Down | Kind::Up => requests * LARGE_BYTES,
        Kind::Gzip => requests * GZIP_BYTES,
        _ => 0,
    } as f64;
    let gib = (bytes / f64::from(1 << 30)).max(f64::MIN_POSITIVE);
    println!(
        "{{\"requests\":{requests},\"rps\":{:.1},\"p50_us\":{:.1},\"p99_us\":{:.1},\
         \"cpu_us\":{per:.2},\"mb_s\":{:.0},\"cpu_s_gib\":{:.3},\"event_p50_us\":{:.1}}}",
        requests as f64 / spent.as_secs_f64(),
        at(&mut times.requests, 0.5) as f64 / 1e3,
        at(&mut times.requests, 0.99) as f64 / 1e3,
        bytes / 1e6 / spent.as_secs_f64(),
        if bytes > 0.0 { cpu.as_secs_f64() / gib } else { 0.0 },
        at(&mut times.events, 0.5) as f64 / 1e3,
    );
}

/// User and system time of the processes (proc_pid_stat(5), fields 14 and 15).
fn cpu(pids: &[u32]) -> Result<Duration, Failure> {
    let mut ticks = 0u64;
    for pid in pids {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let rest = stat.rsplit_once(") ").ok_or("no such stat")?.1;
        ticks += rest.split(' ').skip(11).take(2).flat_map(str::parse::<u64>).sum::<u64>();
    }
    Ok(Duration::from_millis(ticks * 10))
}

/// What is in memory, with a fair share of what processes share (proc_pid_smaps(5)).
fn resident_kib(pids: &[u32]) -> Result<u64, Failure> {
    let mut sum = 0;
    for pid in pids {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
        sum += line.and_then(|l| l.trim().split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(sum)
}

async fn client(target: Target, kind: Kind, window: Window) -> Result<Times, Failure> {
    match kind {
        Kind::Http2 => streams(&target, window).await,
        Kind::Events => events(&target, window).await,
        _ => requests(&target, kind, window).await,
    }
}

async fn requests(target: &Target, kind: Kind, window: Window) -> Result<Times, Failure> {
    let host = &target.host;
    let ask = match kind {
        Kind::Down => format!("GET /down HTTP/1.1\r\nhost: {host}\r\n\r\n"),
        Kind::Gzip => {
            format!("GET /gzip HTTP/1.1\r\nhost: {host}\r\naccept-encoding: gzip\r\n\r\n")
        }
        Kind::Up => {
            format!("POST /up HTTP/1.1\r\nhost: {host}\r\ncontent-length: {LARGE_BYTES}\r\n\r\n")
        }
        _ => format!("GET /x HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n\r\n"),
    };
    let (mut buffer, body) = (vec![0u8; BUFFER_BYTES], vec![b'u'; BUFFER_BYTES]);
    let (mut times, mut kept, mut number) = (Times::default(), None, 0);
    loop {
        let start = Instant::now();
        if start >= window.end {
            return Ok(times);
        }
        let mut connection = match (kept.take(), kind) {
            (Some(connection), _) => connection,
            (None, Kind::Cold(first)) => {
                let name = format!("h{}.{host}", first + number);
                number += 1;
                let mut connection = target.open(&name, false).await?;
                let ask = format!("GET /x HTTP/1.1\r\nhost: {name}\r\naccept: */*\r\n\r\n");
                connection.write_all(ask.as_bytes()).await?;
                connection
            }
            (None, _) => target.open(host, false).await?,
        };
        if !matches!(kind, Kind::Cold(_)) {
            connection.write_all(ask.as_bytes()).await?;
        }
        if kind == Kind::Up {
            for _ in 0..LARGE_BYTES / BUFFER_BYTES {
                connection.write_all(&body).await?;
            }
        }
        connection.flush().await?;
        read_answer(&mut connection, &mut buffer).await?;
        if start >= window.begin {
            times.requests.push(u64::try_from(start.elapsed().as_nanos())?);
        }
        if !matches!(kind, Kind::New | Kind::Cold(_)) {
            kept = Some(connection);
        }
    }
}

async fn streams(target: &Target, window: Window) -> Result<Times, Failure> {
    let stream = target.open(&target.host, true).await?;
    let (sender, connection) = h2::client::handshake(stream).await?;
    tokio::spawn(async move {
        // Its streams see the same error.
        let _ = connection.await;
    });
    let tasks: Vec<_> = (0..STREAMS)
        .map(|_| tokio::spawn(stream_after_stream(sender.clone(), target.host.clone(), window)))
        .collect();
    let mut times = Times::default();
    for task in tasks {
        times.requests.extend(task.await??);
    }
    Ok(times)
}

async fn stream_after_stream(
    mut sender: h2::client::SendRequest<Bytes>,
    host: String,
    window: Window,
) -> Result<Vec<u64>, Failure> {
    let mut times = Vec::new();
    loop {
        let start = Instant::now();
        if start >= window.end {
            return Ok(times);
        }
        sender = sender.ready().await?;
        let request = http::Request::get(format!("https://{host}/x")).body(())?;
        let answer = sender.send_request(request, true)?.0.await?;
        if answer.status() != 200 {
            return Err(format!("answered {}", answer.status()).into());
        }
        let mut body = answer.into_body();
        while let Some(data) = body.data().await {
            body.flow_control().release_capacity(data?.len())?;
        }
        if start >= window.begin {
            times.push(u64::try_from(start.elapsed().as_nanos())?);
        }
    }
}

async fn events(target: &Target, window: Window) -> Result<Times, Failure> {
    let host = &target.host;
    let ask = format!("GET /sse HTTP/1.1\r\nhost: {host}\r\naccept: text/event-stream\r\n\r\n");
    let mut connection = target.open(host, false).await?;
    let (mut times, mut buffer) = (Times::default(), vec![0u8; BUFFER_BYTES]);
    loop {
        let start = Instant::now();
        if start >= window.end {
            return Ok(times);
        }
        connection.write_all(ask.as_bytes()).await?;
        connection.flush().await?;
        let (_, from, held) = read_head(&mut connection, &mut buffer).await?;
        let first = start.elapsed();
        let (mut text, mut seen, mut late) = (buffer[from..held].to_vec(), 0, Vec::new());
        loop {
            let here = now_ns();
            let mark = b"data: ";
            let found = text.windows(mark.len()).enumerate().filter(|(_, w)| w == mark);
            let stamps: Vec<_> = found.map(|(at, _)| at + mark.len()).collect();
            for at in stamps.iter().skip(seen) {
                let Some(digits) = text.get(*at..at + 20) else { break };
                let sent: u128 = std::str::from_utf8(digits)?.parse()?;
                late.push(u64::try_from(here.saturating_sub(sent))?);
                seen += 1;
            }
            if seen == EVENTS && text.ends_with(b"0\r\n\r\n") {
                break;
            }
            let count = connection.read(&mut buffer).await?;
            if count == 0 {
                return Err("the event stream broke off".into());
            }
            text.extend_from_slice(&buffer[..count]);
        }
        if start >= window.begin {
            times.requests.push(u64::try_from(first.as_nanos())?);
            // The first event comes with the head and is counted there.
            times.events.extend(&late[1..]);
        }
    }
}

async fn idle(target: Target, plan: Plan) -> Result<(), Failure> {
    let before = resident_kib(&plan.pids)?;
    let (mut held, mut buffer) = (Vec::new(), vec![0u8; BUFFER_BYTES]);
    let ask = format!("GET /x HTTP/1.1\r\nhost: {}\r\n\r\n", target.host);
    for _ in 0..plan.connections {
        let mut connection = target.open(&target.host, false).await?;
        connection.write_all(ask.as_bytes()).await?;
        connection.flush().await?;
        read_answer(&mut connection, &mut buffer).await?;
        held.push(connection);
    }
    tokio::time::sleep(plan.time).await;
    let after = resident_kib(&plan.pids)?;
    let each = after.saturating_sub(before) as f64 / plan.connections as f64;
    println!(
        "{{\"idle_mib\":{:.1},\"loaded_mib\":{:.1},\"each_kib\":{each:.1}}}",
        before as f64 / 1024.0,
        after as f64 / 1024.0
    );
    Ok(())
}

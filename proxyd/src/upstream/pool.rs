//! Connections kept between requests.
//!
//! A key holds everything that may make two connections differ in what they may do: environment,
//! scheme, host, port and the credential that requests on it carry.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use policies::{Host, Scheme};

use super::Want;
use crate::relay::stream::Stream;

/// How long an idle connection is kept: below the 15 s after which some upstreams close theirs.
pub const IDLE: Duration = Duration::from_secs(10);
/// How long for a request that must not be sent twice.
const IDLE_FRESH: Duration = Duration::from_secs(1);
/// Idle connections of one key, and of all.
const KEY_CONNECTIONS_MAX: usize = 32;
const CONNECTIONS_MAX: usize = 1024;

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key {
    pub environment: String,
    pub scheme: Scheme,
    pub host: Host,
    pub port: u16,
    pub credential: Option<String>,
}

struct Idle {
    stream: Stream,
    address: SocketAddr,
    since: Instant,
}

struct Shared {
    sender: SendRequest<Bytes>,
    address: SocketAddr,
    /// The upstream speaks nothing else.
    only: bool,
    used: Instant,
}

#[derive(Default)]
struct Kept {
    idle: HashMap<Key, Vec<Idle>>,
    shared: HashMap<Key, Shared>,
    count: usize,
}

/// Kept connections. Clones share them.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Kept>>);

impl Pool {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// An idle HTTP/1.1 connection that is still open as far as we can see.
    pub fn idle(&self, key: &Key, fresh: bool) -> Option<(Stream, SocketAddr)> {
        let life = if fresh { IDLE_FRESH } else { IDLE };
        let mut kept = self.kept();
        let list = kept.idle.get_mut(key)?;
        let mut dropped = 0;
        let found = loop {
            // The last one kept has had the least time to go stale.
            let Some(mut idle) = list.pop() else { break None };
            dropped += 1;
            if idle.since.elapsed() < life && idle.stream.is_quiet() {
                break Some((idle.stream, idle.address));
            }
        };
        kept.count -= dropped;
        found
    }

    pub fn keep(&self, key: Key, stream: Stream, address: SocketAddr) {
        let mut kept = self.kept();
        if kept.count >= CONNECTIONS_MAX {
            return;
        }
        let list = kept.idle.entry(key).or_default();
        if list.len() < KEY_CONNECTIONS_MAX {
            list.push(Idle { stream, address, since: Instant::now() });
            kept.count += 1;
        }
    }

    /// An HTTP/2 connection for one more stream.
    pub fn shared(&self, key: &Key, want: Want) -> Option<(SendRequest<Bytes>, SocketAddr)> {
        let mut kept = self.kept();
        let shared = kept.shared.get_mut(key)?;
        if want == Want::Http1Only || want == Want::Http1 && !shared.only {
            return None;
        }
        shared.used = Instant::now();
        Some((shared.sender.clone(), shared.address))
    }

    pub fn share(&self, key: &Key, sender: SendRequest<Bytes>, address: SocketAddr, only: bool) {
        let shared = Shared { sender, address, only, used: Instant::now() };
        self.kept().shared.insert(key.clone(), shared);
    }

    pub fn forget(&self, key: &Key) {
        self.kept().shared.remove(key);
    }

    pub fn sweep(&self) {
        let mut kept = self.kept();
        kept.idle.retain(|_, list| {
            list.retain(|idle| idle.since.elapsed() < IDLE);
            !list.is_empty()
        });
        kept.count = kept.idle.values().map(Vec::len).sum();
        // Running streams keep their own handle; only the entry for new ones goes.
        kept.shared.retain(|_, shared| shared.used.elapsed() < IDLE * 6);
    }
}

//! Connections kept between requests.
//!
//! A key holds everything that may make two connections differ in what they may do: owner and
//! environment, scheme, host, port, the credential that requests on it carry, the certificate that
//! it was opened with, and the way: CA, proxy and all else that the operator's table says about the
//! host.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use policies::{Host, Scheme};

use super::dial::Endpoint;
use super::way::Way;
use crate::relay::h1::client::Connection;
use crate::sys::process;
use crate::vault::Shown;

/// How long an idle connection is kept: below the 15 s after which some upstreams close theirs.
pub const IDLE: Duration = Duration::from_secs(10);
/// How long for a request that must not be sent twice.
const IDLE_FRESH: Duration = Duration::from_secs(1);
/// Idle connections of one key, and of all.
const KEY_CONNECTIONS_MAX: usize = 256;
const CONNECTIONS_MAX: usize = 1024;
/// The part of all descriptors that idle connections may have.
const DESCRIPTORS_PART: usize = 16;

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key {
    /// The thread that carries the connection.
    pub shard: Option<usize>,
    /// Owner and environment: what one owner's request left in an upstream's connection is never
    /// met by another's.
    pub tenant: Arc<str>,
    pub way: Arc<Way>,
    pub scheme: Scheme,
    pub host: Host,
    pub port: u16,
    pub credential: Option<String>,
    /// The certificate that it was opened with, by credential, definition and content.
    pub shown: Option<Arc<Shown>>,
}

struct Idle {
    connection: Box<Connection>,
    address: Endpoint,
    since: Instant,
}

struct Kept {
    idle: HashMap<Key, Vec<Idle>>,
    count: usize,
    count_max: usize,
}

impl Default for Kept {
    fn default() -> Self {
        let count_max = idle_max(process::descriptors());
        Self { idle: HashMap::default(), count: 0, count_max }
    }
}

/// How many of a number of descriptors idle connections may have.
pub fn idle_max(descriptors: usize) -> usize {
    CONNECTIONS_MAX.min(descriptors / DESCRIPTORS_PART)
}

/// Kept connections. Clones share them.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Kept>>);

impl Pool {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// An idle HTTP/1.1 connection that is still open as far as we can see.
    pub fn idle(&self, key: &Key, fresh: bool) -> Option<(Box<Connection>, Endpoint)> {
        let life = if fresh { IDLE_FRESH } else { IDLE };
        let mut kept = self.kept();
        let list = kept.idle.get_mut(key)?;
        let mut dropped = 0;
        let found = loop {
            // The last one kept has had the least time to go stale.
            let Some(mut idle) = list.pop() else { break None };
            dropped += 1;
            if idle.since.elapsed() < life && idle.connection.is_quiet() {
                break Some((idle.connection, idle.address));
            }
        };
        kept.count -= dropped;
        found
    }

    pub fn keep(&self, key: Key, connection: Box<Connection>, address: Endpoint) {
        if key.way.is_wanted() {
            return;
        }
        let mut kept = self.kept();
        if kept.count >= kept.count_max {
            return;
        }
        let list = kept.idle.entry(key).or_default();
        if list.len() < KEY_CONNECTIONS_MAX {
            list.push(Idle { connection, address, since: Instant::now() });
            kept.count += 1;
        }
    }

    /// Closes the idle connections of a way, so that others find a place.
    pub fn evict(&self, way: &Way) {
        let mut kept = self.kept();
        kept.idle.retain(|key, _| *key.way != *way);
        kept.count = kept.idle.values().map(Vec::len).sum();
    }

    pub fn sweep(&self) {
        let mut kept = self.kept();
        kept.idle.retain(|_, list| {
            list.retain(|idle| idle.since.elapsed() < IDLE);
            !list.is_empty()
        });
        kept.count = kept.idle.values().map(Vec::len).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::super::way::Ways;
    use super::*;
    use crate::config::WayOut;
    use crate::relay::stream::Stream;

    fn key() -> Key {
        let host = Host::parse("a.test").unwrap();
        Key {
            shard: None,
            tenant: "uid:1 dev".into(),
            way: Ways::load(&WayOut::default(), None).unwrap().of(&host),
            scheme: Scheme::Https,
            host,
            port: 443,
            credential: Some("api".to_owned()),
            shown: None,
        }
    }

    #[tokio::test]
    async fn a_kept_connection_serves_only_what_may_do_the_same_in_every_respect() {
        let own = key();
        let others = [
            ("shard", Key { shard: Some(1), ..own.clone() }),
            ("owner", Key { tenant: "uid:2 dev".into(), ..own.clone() }),
            ("environment", Key { tenant: "uid:1 other".into(), ..own.clone() }),
            ("way", Key { way: key().way, ..own.clone() }),
            ("scheme", Key { scheme: Scheme::Http, ..own.clone() }),
            ("host", Key { host: Host::parse("b.test").unwrap(), ..own.clone() }),
            ("port", Key { port: 444, ..own.clone() }),
            ("credential", Key { credential: Some("other".to_owned()), ..own.clone() }),
            ("no credential", Key { credential: None, ..own.clone() }),
            ("certificate", Key { shown: Some(Shown::in_test(1)), ..own.clone() }),
        ];
        let pool = Pool::default();
        let (_upstream, end) = tokio::io::duplex(64);
        let connection = Box::new(Connection::new(Stream::new(end)));
        pool.keep(own.clone(), connection, Endpoint::direct("127.0.0.1:443".parse().unwrap()));

        for (what, other) in others {
            assert!(pool.idle(&other, false).is_none(), "another {what}");
        }
        assert!(pool.idle(&own, false).is_some());
        // The same certificate read again is the same.
        let showing = |id| Key { shown: Some(Shown::in_test(id)), ..own.clone() };
        assert!(showing(1) == showing(1) && showing(1) != showing(2));
    }
}

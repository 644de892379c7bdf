//! The one resolution of a permitted name, by the operator's resolvers or by those of the host.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig,
};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use tokio::time::timeout;

use super::UpstreamError;

const DEADLINE: Duration = Duration::from_secs(10);
/// Most addresses used of one name.
const ADDRESSES_MAX: usize = 8;
/// The host's own configuration. A long-lived process must not ask yesterday's servers.
const FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// Asks for the addresses of names that a rule allowed, and of no others.
pub struct Resolver {
    /// From proxyd's configuration; empty: those of the host's.
    servers: Vec<SocketAddr>,
    kept: Mutex<Option<(Stamps, TokioResolver)>>,
}

/// What the files looked like when they were read.
type Stamps = [Option<(u64, u64, i64, i64)>; FILES.len()];

impl Resolver {
    pub fn new(servers: Vec<SocketAddr>) -> Self {
        Self { servers, kept: Mutex::new(None) }
    }

    /// The addresses of a name; at least one.
    pub async fn addresses(&self, name: &str, port: u16) -> Result<Vec<SocketAddr>, UpstreamError> {
        let failed = |reason: String| UpstreamError::Resolve { host: name.to_owned(), reason };
        let resolver = self.current().map_err(failed)?;
        // The last dot: no search list of the host's is tried.
        let lookup = timeout(DEADLINE, resolver.lookup_ip(format!("{name}.")))
            .await
            .map_err(|_| failed(format!("no answer within {} s", DEADLINE.as_secs())))?
            .map_err(|error| failed(unresolved(&error)))?;
        let found: Vec<_> =
            lookup.iter().take(ADDRESSES_MAX).map(|ip| SocketAddr::new(ip, port)).collect();
        if found.is_empty() {
            return Err(failed("the name has no address".to_owned()));
        }
        Ok(found)
    }

    /// The resolver, made again when the host's files have changed. Files that cannot be read any
    /// more leave the former one in use.
    fn current(&self) -> Result<TokioResolver, String> {
        let mut kept = self.kept.lock().expect("no holder of this lock panics");
        let stamps = FILES.map(stamp);
        if let Some((since, resolver)) = &*kept
            && *since == stamps
        {
            return Ok(resolver.clone());
        }
        let resolver = match (self.build(), kept.take()) {
            (Ok(resolver), _) => resolver,
            (Err(error), Some((_, former))) => {
                tracing::warn!(%error, "changed name servers are not used, the former stay");
                former
            }
            (Err(error), None) => return Err(error.to_string()),
        };
        *kept = Some((stamps, resolver.clone()));
        Ok(resolver)
    }

    fn build(&self) -> Result<TokioResolver, NetError> {
        let mut builder = if self.servers.is_empty() {
            TokioResolver::builder_tokio()?
        } else {
            let servers = self.servers.iter().copied().map(server).collect();
            let config = ResolverConfig::from_name_servers(servers);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        };
        builder.options_mut().ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
        builder.build()
    }
}

fn server(address: SocketAddr) -> NameServerConfig {
    let ways = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
    let ways = ways.map(|mut way| {
        way.port = address.port();
        way
    });
    NameServerConfig::new(address.ip(), true, ways.into())
}

fn stamp(path: &str) -> Option<(u64, u64, i64, i64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// Why a name was not resolved. The resolver's own words for the two usual cases are its query in
/// debug form.
fn unresolved(error: &NetError) -> String {
    if error.is_nx_domain() {
        "there is no such name".to_owned()
    } else if error.is_no_records_found() {
        "the name server gives no address".to_owned()
    } else {
        error.to_string()
    }
}

//! Connections on the daemon's own behalf: to servers that give tokens for secrets.
//!
//! A policy names them and its writer is trusted with that, so no rule judges their addresses. The
//! operator's table says where to dial and whom to trust, as for every upstream; the name that TLS
//! verifies is the one in the policy.

use std::net::SocketAddr;
use std::sync::Arc;

use policies::Host;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::UpstreamError;
use super::dial::HANDSHAKE;
use super::eyeballs::{self, Lost};
use super::resolve::Resolver;
use super::trust::{self, Alpn, TrustError};
use super::way::{Way, Ways};
use crate::config::WayOut;
use crate::relay::stream::Stream;

/// The way to token servers.
pub struct Outbound {
    ways: Ways,
    resolver: Arc<Resolver>,
}

impl Outbound {
    pub fn new(config: &WayOut, servers: Vec<SocketAddr>) -> Result<Self, TrustError> {
        Ok(Self { ways: Ways::load(config, None)?, resolver: Arc::new(Resolver::new(servers)) })
    }

    /// The same after the operator's table, or a file that it names, may have changed.
    pub fn again(former: &Self, config: &WayOut) -> Result<Self, TrustError> {
        let ways = Ways::load(config, Some(&former.ways))?;
        Ok(Self { ways, resolver: Arc::clone(&former.resolver) })
    }

    /// A verified connection that speaks HTTP/1.1.
    pub async fn connect(&self, host: &Host, port: u16) -> Result<Stream, UpstreamError> {
        let way = self.ways.of(host);
        let stream = self.reach(&way, host, port).await?;
        let failed = |reason: String| UpstreamError::Tls {
            host: host.to_string(),
            address: host.authority(port),
            reason,
        };
        let name = trust::server_name(host).map_err(failed)?;
        let connecting = TlsConnector::from(way.offers.of(Alpn::Http1)).connect(name, stream);
        match timeout(HANDSHAKE, connecting).await {
            Ok(Ok(stream)) => Ok(Stream::new(stream)),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("no TLS handshake in time".to_owned())),
        }
    }

    async fn reach(&self, way: &Way, host: &Host, port: u16) -> Result<Stream, UpstreamError> {
        let patience = way.row.connect_timeout;
        if let Some(proxy) = way.proxy(host) {
            let authorization = proxy.authorization_of_file()?;
            let stream = proxy.reach(&self.resolver, patience).await?;
            let authority = host.authority(port);
            return proxy.tunnel(stream, &authority, authorization.as_ref(), patience).await;
        }
        let addresses = match (&way.row.dial[..], host) {
            ([], Host::Ip(ip)) => vec![SocketAddr::new(*ip, port)],
            ([], Host::Name(name)) => self.resolver.addresses(name, port).await?,
            (dial, _) => dial.iter().map(|dial| dial.at(port)).collect(),
        };
        let (stream, _) =
            eyeballs::race(&addresses, patience).await.map_err(|lost| match lost {
                Lost::Refused(tried) | Lost::Silent(tried) => {
                    UpstreamError::Connect { host: host.to_string(), reason: tried }
                }
            })?;
        Ok(Stream::new(stream))
    }
}

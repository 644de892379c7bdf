//! Why there is no way to an upstream.

use policies::Denial;

/// What failed between a permit and a connection that requests can go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UpstreamError {
    /// The name leads to an address that the rule does not allow.
    #[error("{}", .0.reason)]
    Denied(Denial),
    #[error("cannot resolve {host}: {reason}")]
    Resolve { host: String, reason: String },
    #[error("cannot connect to {host}: {reason}")]
    Connect { host: String, reason: String },
    #[error("{host} does not answer within {seconds} s: {tried}")]
    Timeout { host: String, tried: String, seconds: u64 },
    #[error("cannot verify {host} at {address}: {reason}")]
    Tls { host: String, address: String, reason: String },
    #[error("{host} refuses the certificate of {whose} (TLS alert {alert})")]
    CertificateRefused { host: String, whose: String, alert: String },
    #[error("{host} asks for a client certificate, and {rule} has none")]
    CertificateWanted { host: String, rule: String },
    /// The proxy between here and the upstream.
    #[error("upstream proxy {proxy}: {reason}")]
    Proxy { proxy: String, reason: String, hint: Option<String> },
    #[error(
        "all {connections_max} connections that proxyd.toml allows to {host} are in use, and none \
         came free within {seconds} s"
    )]
    Busy { host: String, connections_max: usize, seconds: u64 },
    #[error("cannot send to {host}: {reason}")]
    Send { host: String, reason: String },
    #[error("{host} takes no further request on its connections within {seconds} s")]
    Full { host: String, seconds: u64 },
}

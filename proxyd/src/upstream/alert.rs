//! What an upstream's TLS alert says about certificates of clients.
//!
//! With TLS 1.3 a client has finished its handshake before the server has looked at its
//! certificate, so a refusal comes where the answer to a request is waited for. It is an alert
//! there too.

use policies::Permit;

use super::UpstreamError;

/// Rustls's words for an alert.
const ALERT: &str = "received fatal alert: ";
/// The alert of a server that got no certificate (RFC 8446, section 6.2).
const WANTED: &str = "CertificateRequired";
/// Alerts of servers that do not like the one they got.
const REFUSED: &[&str] = &[
    WANTED,
    "AccessDenied",
    "BadCertificate",
    "CertificateExpired",
    "CertificateRevoked",
    "CertificateUnknown",
    "DecryptError",
    "UnknownCA",
    "UnsupportedCertificate",
];

/// What the text of a failure means, if there is such an alert in it. `shown` says whose
/// certificate the connection was opened with.
pub fn told(text: &str, permit: &Permit, shown: Option<&str>) -> Option<UpstreamError> {
    let (_, alert) = text.split_once(ALERT)?;
    let end = alert.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(alert.len());
    let alert = REFUSED.iter().find(|known| **known == &alert[..end])?;
    let host = permit.host().to_string();
    match shown {
        Some(whose) => {
            let (whose, alert) = (whose.to_owned(), (*alert).to_owned());
            Some(UpstreamError::CertificateRefused { host, whose, alert })
        }
        None if *alert == WANTED => {
            Some(UpstreamError::CertificateWanted { host, rule: permit.rule().to_owned() })
        }
        None => None,
    }
}

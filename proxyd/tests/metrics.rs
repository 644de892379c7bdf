//! What the metrics say is what happened.

use crate::support::*;
use bytes::Bytes;
use tokio::io::AsyncWriteExt;

const H1: &[&[u8]] = &[b"http/1.1"];

async fn scraped(proxyd: &Proxyd) -> String {
    let path = "/v1/metrics";
    let text = proxyd.control().call(http::Method::GET, path, None, Bytes::new()).await.unwrap();
    String::from_utf8(text.to_vec()).unwrap()
}

/// The value of one line, by its name and labels; a line that is not there is 0.
fn value(text: &str, name: &str) -> f64 {
    let name = format!("cleanhands_proxyd_{name} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn metrics_count_what_was_allowed_refused_masked_and_carried() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = Proxyd::start(POLICY, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    for _ in 0..3 {
        stream.write_all(b"GET /x HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    }
    // More than have a record of their own.
    for _ in 0..30 {
        stream.write_all(b"DELETE /x HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    }
    until("the exchanges have ended", || async {
        value(&scraped(&proxyd).await, "under_way") == 0.0
    })
    .await;

    let text = scraped(&proxyd).await;

    for (name, expected) in [
        ("allowed_total", 3.0),
        ("injected_total", 3.0),
        ("denied_total{reason=\"method_not_listed\"}", 30.0),
        ("ended_total{status=\"2xx\"}", 3.0),
        ("duration_seconds_count", 3.0),
        ("duration_seconds_bucket{le=\"+Inf\"}", 3.0),
        ("stopped_total", 0.0),
        ("audit_failed", 0.0),
        ("files_wrong", 0.0),
        ("policy_generation", 1.0),
        ("leases{environment=\"dev\"}", 1.0),
        ("leaf_certificates", 1.0),
        ("secrets{state=\"ready\"}", 1.0),
        ("secrets{state=\"needs_login\"}", 0.0),
    ] {
        assert_eq!(value(&text, name), expected, "{name}\n{text}");
    }
    assert!(value(&text, "masked_total") >= 3.0, "{text}");
    assert!(value(&text, "bytes_total{direction=\"down\"}") > 0.0, "{text}");
    // Names of metrics, numbers, and words of ours: neither a value nor what a sandbox asked for.
    for absent in [CANARY, "api.test", "/x"] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    // Every line is a comment or a sample, and every sample's kind was said before it.
    let mut known: Vec<&str> = Vec::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            known.push(kind.split(' ').next().unwrap());
        } else if !line.starts_with("# HELP ") {
            assert!(known.iter().any(|name| line.starts_with(name)), "{line}");
        }
    }
    assert!(text.ends_with('\n') && known.len() > 15, "{text}");
}

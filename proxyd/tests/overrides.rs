//! Requests that ask to be taken for something else than they are, in ways that many servers
//! honour.

use crate::support::*;
use http::StatusCode;

const RULES: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET", "POST"]
paths = ["/open/**"]
addresses = ["127.0.0.1/32"]
credential = "api"

[[egress.allow]]
hosts = ["api.test"]
methods = ["PATCH"]
addresses = ["127.0.0.1/32"]

[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.test"]
"#;

async fn answer(lease: &Lease, target: &str, fields: &str) -> String {
    let mut stream = lease.h1("api.test").await;
    let request = format!(
        "POST {target} HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\nConnection: close\r\n\
         {fields}\r\n"
    );
    talk(&mut stream, request.as_bytes()).await
}

#[tokio::test]
async fn a_request_leaves_only_if_it_may_as_everything_that_it_may_be_taken_for() {
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], echo_h1).await;
    let proxyd = Proxyd::start(RULES, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;

    for (target, fields, code) in [
        ("/open/a", "X-HTTP-Method-Override: DELETE\r\n", "method_not_listed"),
        ("/open/a", "x_http_method_override: delete\r\n", "method_not_listed"),
        ("/open/a", "X-HTTP-Method: PUT\r\n", "method_not_listed"),
        ("/open/a", "X-Method-Override: CONNECT\r\n", "method_forbidden"),
        ("/open/a", "X-Method-Override: GET\r\nX-Method-Override: PUT\r\n", "method_not_listed"),
        ("/open/a?_method=DELETE", "", "method_not_listed"),
        ("/open/a?a=1&%5fmethod=delete", "", "method_not_listed"),
        ("/open/a", "X-Original-URL: /admin\r\n", "path_not_listed"),
        ("/open/a", "X-Rewrite-URL: /open/../admin\r\n", "path_ambiguous"),
        // Another rule allows it, and without the credential that would go along.
        ("/open/a", "X-HTTP-Method-Override: PATCH\r\n", "method_not_listed"),
    ] {
        let answer = answer(&lease, target, fields).await;

        let status = if code == "method_forbidden" { "405" } else { "403" };
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{target} {fields}: {answer}");
        assert!(answer.contains(code), "{target} {fields}: {answer}");
    }
    assert_eq!(upstream.connections(), 0);
    proxyd
        .record(|record| {
            let reason = record.reason.as_deref().unwrap_or_default();
            reason.contains("X-HTTP-Method-Override asks for DELETE /open/a")
        })
        .await;
    for (target, fields) in [
        ("/open/a", "X-HTTP-Method-Override: GET\r\n"),
        ("/open/a?_method=post", ""),
        ("/open/a", "X-Original-URL: https://api.test/open/b?c\r\n"),
        ("/open/a", "X-HTTP-Method-Override:\r\n"),
    ] {
        let answer = answer(&lease, target, fields).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{target} {fields}: {answer}");
        // What is allowed goes on as it came.
        assert!(answer.contains(fields.trim_end()), "{answer}");
    }
}

#[tokio::test]
async fn a_stream_of_http2_is_judged_as_what_it_may_be_taken_for_too() {
    let upstream = Upstream::tls("api.test", &[b"h2"], echo_h2).await;
    let proxyd = Proxyd::start(RULES, &[("api.test", &upstream)]).await;
    proxyd.put_secret("api").await;
    let lease = proxyd.lease().await;
    let mut sender = lease.h2("api.test").await;

    for (method, status) in [("DELETE", StatusCode::FORBIDDEN), ("GET", StatusCode::OK)] {
        let request = http::Request::post("https://api.test/open/a")
            .header("x-http-method-override", method)
            .body(())
            .unwrap();
        let (answer, _) = sender.send_request(request, true).unwrap();
        assert_eq!(timely(answer).await.unwrap().status(), status, "{method}");
    }
}

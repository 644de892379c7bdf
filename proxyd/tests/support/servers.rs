//! Servers that give or take secrets, as tests play them, and what is asked of them over a lease.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

use ipc::vault::SecretInfo;

use super::*;

/// Answers each request with the status and the text that `answer` makes of its head and body. A
/// text that goes with a redirection is where to.
pub async fn answering(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: impl Fn(&str, &str) -> (u16, String),
) {
    while let Some((head, body)) = request(&mut stream).await {
        let (status, text) = answer(&head, std::str::from_utf8(&body).unwrap());
        if !say(&mut stream, status, &text).await {
            return;
        }
    }
}

/// One answer; whether somebody took it.
pub async fn say(stream: &mut (impl AsyncWrite + Unpin), status: u16, text: &str) -> bool {
    let elsewhere = match status {
        300..400 => format!("Location: {text}\r\n"),
        _ => String::new(),
    };
    let length = text.len();
    let answer =
        format!("HTTP/1.1 {status} So\r\n{elsewhere}Content-Length: {length}\r\n\r\n{text}");
    stream.write_all(answer.as_bytes()).await.is_ok() && stream.flush().await.is_ok()
}

impl Upstream {
    /// The same over TLS, as HTTP/1.1.
    pub async fn answering(
        host: &str,
        answer: impl Fn(&str, &str) -> (u16, String) + Clone + Send + Sync + 'static,
    ) -> Self {
        Self::tls(host, &[b"http/1.1"], move |stream| answering(stream, answer.clone())).await
    }
}

impl Lease {
    /// Status and body of the answer to one request, over a connection of its own.
    pub async fn send(&self, host: &str, request: &str) -> (u16, String) {
        let mut stream = self.h1(host).await;
        stream.write_all(request.as_bytes()).await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;
        (head[9..12].parse().unwrap(), String::from_utf8_lossy(&body).into_owned())
    }

    /// The same of a GET with these fields.
    pub async fn get(&self, host: &str, fields: &str) -> (u16, String) {
        self.send(host, &format!("GET / HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n")).await
    }
}

impl Proxyd {
    /// Stores a secret.
    pub async fn put(&self, name: &str, value: &str) {
        let path = format!("/v1/secrets/{name}");
        let value = Bytes::copy_from_slice(value.as_bytes());
        self.control().call(http::Method::PUT, &path, None, value).await.unwrap();
    }

    /// Removes one.
    pub async fn remove(&self, name: &str) {
        let path = format!("/v1/secrets/{name}");
        self.control().call(http::Method::DELETE, &path, None, Bytes::new()).await.unwrap();
    }

    /// What is told of one.
    pub async fn secret(&self, name: &str) -> Option<SecretInfo> {
        let list: serde_json::Value = self.control().get("/v1/secrets").await.unwrap();
        let secrets: Vec<SecretInfo> = serde_json::from_value(list["secrets"].clone()).unwrap();
        secrets.into_iter().find(|secret| secret.name == name)
    }
}

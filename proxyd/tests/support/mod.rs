//! Starts a real proxyd in a directory of its own, upstreams on loopback, and clients that come in
//! over the egress socket. Nothing sleeps: everything waits for a condition with a deadline.

#![allow(dead_code, reason = "each test binary uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

mod processes;
mod servers;
mod upstream;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ipc::http::Client;
use ipc::id::{LeaseId, SandboxId, SessionId};
use ipc::layout::Layout;
use ipc::lease::{Descriptor, Holder, LeaseReply, LeaseRequest, Open, Opened, VERSION};
use ipc::peer::Principal;
use ipc::vault::{AuditPage, AuditRecord};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

#[allow(unused_imports, reason = "each test binary uses its own part of this")]
pub use processes::{children, proc};
#[allow(unused_imports, reason = "each test binary uses its own part of this")]
pub use servers::{answering, say};
#[allow(unused_imports, reason = "each test binary uses its own part of this")]
pub use upstream::{Identity, Upstream};

pub const CANARY: &str = "SECRET-CANARY-5e1f0c3a9d";
/// Nothing in a test takes longer than this unless it hangs.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// The policy of most tests: `api.test` with a credential, `open.test` read but without one,
/// `raw.test` passed through unread.
pub const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET", "HEAD", "POST", "PUT"]
addresses = ["127.0.0.1/32"]
credential = "api"

[[egress.allow]]
hosts = ["open.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]

[[egress.allow]]
hosts = ["raw.test"]
ports = [9000]
addresses = ["127.0.0.1/32"]

[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.test"]
env = "API_TOKEN"
"#;

/// A running proxyd.
pub struct Proxyd {
    pub dir: tempfile::TempDir,
    pub layout: Layout,
    child: Child,
}

impl Proxyd {
    /// Starts one whose environment `dev` is `policy`, and which dials `upstreams` for their names.
    pub async fn start(policy: &str, upstreams: &[(&str, &Upstream)]) -> Self {
        Self::configured(policy, upstreams, "").await
    }

    /// The same with more lines at the beginning of `proxyd.toml`.
    pub async fn configured(policy: &str, upstreams: &[(&str, &Upstream)], more: &str) -> Self {
        Self::with(policy, upstreams, more, &[], &[]).await
    }

    /// The same with files beside `proxyd.toml` and variables in the environment. `DIR` in the
    /// lines and variables stands for the directory of that file. What lies in `credentials` there
    /// has the mode in which systemd passes credentials.
    pub async fn with(
        policy: &str,
        upstreams: &[(&str, &Upstream)],
        more: &str,
        files: &[(&str, &str)],
        variables: &[(&str, &str)],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::below(dir.path());
        for path in [&layout.policies, &layout.config] {
            std::fs::DirBuilder::new().mode(0o700).create(path).unwrap();
        }
        write(&layout.policies.join("dev.toml"), policy);
        let place = layout.config.display().to_string();
        for (name, text) in files {
            let path = layout.config.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            write(&path, text);
            if name.starts_with("credentials/") {
                let mode = std::fs::Permissions::from_mode(0o440);
                std::fs::set_permissions(&path, mode).unwrap();
            }
        }
        let mut config = more.replace("DIR", &place);
        for (name, upstream) in upstreams {
            let ca = layout.config.join(format!("{name}.pem"));
            write(&ca, &upstream.ca_pem);
            let (dial, ca) = (upstream.address, ca.display());
            config += &format!("[upstreams.\"{name}\"]\ndial = \"{dial}\"\nca = \"{ca}\"\n");
        }
        write(&layout.config.join("proxyd.toml"), &config);
        let variables = variables.iter().map(|(n, v)| ((*n).to_owned(), v.replace("DIR", &place)));
        let child = spawn(&layout, variables.collect());
        let proxyd = Self { dir, layout, child };
        proxyd.serves().await;
        proxyd
    }

    /// Ends proxyd the hard way and starts another over the same state.
    pub async fn restart(&mut self) {
        self.end(rustix::process::Signal::KILL);
        self.begin();
        self.serves().await;
    }

    /// Sends proxyd a signal that ends it, and waits for its end.
    pub fn end(&mut self, signal: rustix::process::Signal) -> std::process::ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
        self.child.wait().unwrap()
    }

    /// Starts another one over the same state; it need not serve yet.
    pub fn begin(&mut self) {
        self.child = spawn(&self.layout, Vec::new());
    }

    pub async fn serves(&self) {
        let client = self.control();
        until("proxyd serves", || {
            let client = client.clone();
            async move { client.get::<serde_json::Value>("/v1/health").await.is_ok() }
        })
        .await;
    }

    pub fn control(&self) -> Client {
        Client::new(self.layout.proxyd())
    }

    pub fn write_policy(&self, text: &str) {
        write(&self.layout.policies.join("dev.toml"), text);
    }

    /// Replaces a file beside `proxyd.toml`, or that file; `DIR` stands for their directory.
    pub fn write_config(&self, name: &str, text: &str) {
        let text = text.replace("DIR", &self.layout.config.display().to_string());
        write(&self.layout.config.join(name), &text);
    }

    pub async fn health(&self) -> ipc::vault::Health {
        self.control().get("/v1/health").await.unwrap()
    }

    pub async fn put_secret(&self, name: &str) {
        self.put(name, CANARY).await;
    }

    pub async fn ca_pem(&self) -> String {
        let bytes = self.control().call(http::Method::GET, "/v1/ca.pem", None, Bytes::new()).await;
        String::from_utf8(bytes.unwrap().to_vec()).unwrap()
    }

    pub async fn audit(&self) -> Vec<AuditRecord> {
        self.control().get::<AuditPage>("/v1/audit").await.unwrap().records
    }

    /// Waits until a record is there that `wanted` takes.
    pub async fn record(&self, wanted: impl Fn(&AuditRecord) -> bool) -> AuditRecord {
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(record) = self.audit().await.into_iter().find(&wanted) {
                return record;
            }
            assert!(Instant::now() < end, "no such record in the audit");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn lease(&self) -> Lease {
        let lease = self.open(LeaseId::random()).await;
        lease.unwrap_or_else(|fault| panic!("lease refused: {fault}"))
    }

    pub async fn open(&self, id: LeaseId) -> Result<Lease, ipc::fault::Fault> {
        self.opened(Open { lease: id, ..wanted(Holder::Explicit, Vec::new()) }, &[]).await
    }

    /// A lease for whatever is asked, with the sockets that it brings.
    pub async fn opened(
        &self,
        open: Open,
        sockets: &[OwnedFd],
    ) -> Result<Lease, ipc::fault::Fault> {
        let channel = ipc::fd::Channel::connect(&self.layout.proxyd_lease()).unwrap();
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        channel.send(&LeaseRequest::Open(open), &sockets).await.unwrap();
        match timely(channel.receive::<LeaseReply>()).await.unwrap().0 {
            LeaseReply::Opened(opened) => {
                Ok(Lease { channel, opened, egress: self.layout.proxyd_egress() })
            }
            LeaseReply::Refused { fault } => Err(fault),
            other => panic!("{other:?}"),
        }
    }

    /// Tells proxyd to read its files again.
    pub fn hang_up(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    }

    /// All that proxyd has said on standard error so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.layout.config.join("log")).unwrap()
    }
}

impl Drop for Proxyd {
    fn drop(&mut self) {
        // It may have ended already; then there is nothing left to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What this user asks for in `dev`; a sandbox has names of its own.
pub fn wanted(holder: Holder, descriptors: Vec<Descriptor>) -> Open {
    let sandboxed = holder == Holder::Sandbox;
    Open {
        version: VERSION,
        lease: LeaseId::random(),
        holder,
        environment: "dev".to_owned(),
        owner: Principal::own().owner(),
        sandbox: sandboxed.then(SandboxId::random),
        session: sandboxed.then(SessionId::random),
        descriptors,
    }
}

fn spawn(layout: &Layout, variables: Vec<(String, String)>) -> Child {
    let log = layout.config.join("log");
    let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
    Command::new(env!("CARGO_BIN_EXE_proxyd"))
        .envs(variables)
        .arg("--config")
        .arg(layout.config.join("proxyd.toml"))
        .arg("--runtime-dir")
        .arg(&layout.runtime)
        .arg("--state-dir")
        .arg(&layout.state)
        .arg("--policies-dir")
        .arg(&layout.policies)
        .args(["--log", "debug"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

fn write(path: &Path, text: &str) {
    // Written beside and renamed: a reader sees the old or the new text, never half of one.
    let beside = path.with_extension("new");
    std::fs::write(&beside, text).unwrap();
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(&beside, path).unwrap();
}

/// Waits for a condition.
pub async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let end = Instant::now() + DEADLINE;
    while !condition().await {
        assert!(Instant::now() < end, "not within the deadline: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Fails a test that hangs.
pub async fn timely<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("finished within the deadline")
}

/// An open lease; it ends when this is dropped.
pub struct Lease {
    pub channel: ipc::fd::Channel,
    pub opened: Opened,
    egress: PathBuf,
}

impl Lease {
    pub fn token(&self) -> &str {
        self.opened.token.as_deref().unwrap()
    }

    pub fn placeholder(&self) -> &str {
        &self.opened.env.iter().find(|(name, _)| name == "API_TOKEN").unwrap().1
    }

    pub async fn close(self) {
        self.channel.send(&LeaseRequest::Close, &[]).await.unwrap();
        // The other side ends the connection once the lease is gone.
        let _ = timely(self.channel.receive::<LeaseReply>()).await;
    }

    /// A connection to the egress socket.
    pub async fn plain(&self) -> UnixStream {
        UnixStream::connect(&self.egress).await.unwrap()
    }

    /// A CONNECT to `authority`, accepted.
    pub async fn connect(&self, authority: &str) -> UnixStream {
        let mut stream = self.plain().await;
        let token = self.token();
        let request = format!(
            "CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\
             Proxy-Authorization: Bearer {token}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let head = timely(head(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        stream
    }

    /// TLS inside a CONNECT, with proxyd's CA trusted, to `name`.
    pub async fn tls(&self, authority: &str, name: &str, alpn: &[u8]) -> Tls {
        let stream = self.connect(authority).await;
        let config = client_config(&self.opened.ca_pem, alpn);
        let name = ServerName::try_from(name.to_owned()).unwrap();
        timely(TlsConnector::from(config).connect(name, stream)).await.unwrap()
    }

    /// HTTP/1.1 inside TLS to a host on port 443.
    pub async fn h1(&self, host: &str) -> Tls {
        self.tls(&format!("{host}:443"), host, b"http/1.1").await
    }

    /// HTTP/2 inside TLS to a host on port 443.
    pub async fn h2(&self, host: &str) -> h2::client::SendRequest<Bytes> {
        let stream = self.tls(&format!("{host}:443"), host, b"h2").await;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .handshake(stream)
            .await
            .unwrap();
        tokio::spawn(async move {
            let _ = connection.await;
        });
        timely(sender.ready()).await.unwrap()
    }
}

pub type Tls = client::TlsStream<UnixStream>;

pub fn client_config(ca_pem: &str, alpn: &[u8]) -> Arc<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(ca_pem.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Reads up to the end of a head.
pub async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => bytes.push(byte),
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&bytes)),
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// The value of a field in a head's text.
pub fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (n, value) = line.split_once(':')?;
        n.eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

/// Reads a head and the body that its content-length announces.
pub async fn response(stream: &mut (impl AsyncRead + Unpin)) -> (String, Vec<u8>) {
    let head = head(stream).await;
    let length = field(&head, "content-length").map_or(0, |digits| digits.parse().unwrap());
    let mut body = vec![0u8; length];
    stream.read_exact(&mut body).await.unwrap();
    (head, body)
}

/// Sends bytes, reads everything up to the end of the connection.
pub async fn talk(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), bytes: &[u8]) -> String {
    // One that has ended takes nothing, and what it said before can still be read.
    let _ = timely(stream.write_all(bytes)).await;
    let mut answer = Vec::new();
    // A connection that ends without a TLS goodbye still said what it said.
    let _ = timely(stream.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// Serves HTTP/1.1 requests whose body has a content-length: answers with the request's head and
/// body as the body, and the Authorization field as a field.
pub async fn echo_h1(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    loop {
        let Some((head, body)) = request(&mut stream).await else { return };
        let authorization = field(&head, "authorization").unwrap_or("none");
        let text = [head.as_bytes(), &body].concat();
        let answer = format!(
            "HTTP/1.1 200 Fine\r\nContent-Length: {}\r\nX-Echo: {authorization}\r\n\r\n",
            text.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err()
            || stream.write_all(&text).await.is_err()
            || stream.flush().await.is_err()
        {
            return;
        }
    }
}

/// Reads one request with a content-length; none when the connection ends.
pub async fn request(stream: &mut (impl AsyncRead + Unpin)) -> Option<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(bytes).unwrap();
    let length = field(&head, "content-length").map_or(0, |digits| digits.parse().unwrap());
    let mut body = vec![0u8; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((head, body))
}

/// Serves HTTP/2: answers with the length of the request's body in a field, the Authorization
/// field in another, the body itself, and trailers.
pub async fn echo_h2(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
    let mut builder = h2::server::Builder::new();
    builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 22);
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(echo_h2_stream(request, respond));
    }
}

async fn echo_h2_stream(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
) {
    let (parts, body) = request.into_parts();
    let (body, trailers) = h2_body(body).await;
    let authorization = parts.headers.get("authorization").cloned();
    let response = http::Response::builder()
        .header("x-echo", authorization.unwrap_or(http::HeaderValue::from_static("none")))
        .header("x-length", body.len())
        .header("x-trailers", trailers.map_or(0, |map| map.len()))
        .body(())
        .unwrap();
    let mut send = respond.send_response(response, false).unwrap();
    h2_send(&mut send, body.into()).await;
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    send.send_trailers(trailers).unwrap();
}

/// Reads a whole HTTP/2 body, giving room back as it goes.
pub async fn h2_body(mut body: h2::RecvStream) -> (Vec<u8>, Option<http::HeaderMap>) {
    let mut all = Vec::new();
    while let Some(data) = body.data().await {
        let data = data.unwrap();
        body.flow_control().release_capacity(data.len()).unwrap();
        all.extend_from_slice(&data);
    }
    (all, body.trailers().await.unwrap())
}

/// Sends a whole HTTP/2 body as room allows, without ending the stream.
pub async fn h2_send(stream: &mut h2::SendStream<Bytes>, mut data: Bytes) {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let room = std::future::poll_fn(|context| stream.poll_capacity(context)).await;
        let room = room.unwrap().unwrap();
        stream.send_data(data.split_to(room.min(data.len())), false).unwrap();
    }
}

/// Lets clients that know only TCP reach the egress socket.
pub async fn forwarder(egress: PathBuf) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut proxy = UnixStream::connect(&egress).await.unwrap();
            tokio::spawn(async move {
                let _ = tokio::io::copy_bidirectional(&mut client, &mut proxy).await;
            });
        }
    });
    address
}

/// A listening TCP socket as an owned descriptor.
pub fn descriptor(listener: std::net::TcpListener) -> OwnedFd {
    listener.into()
}

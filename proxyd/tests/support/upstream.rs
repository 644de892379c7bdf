//! Upstreams on loopback, each with a CA of its own.

#![allow(clippy::unwrap_used, reason = "a failed step of the set-up fails the test")]

use super::*;

/// An upstream on loopback, with a CA of its own.
pub struct Upstream {
    pub address: SocketAddr,
    pub ca_pem: String,
    pub connections: Arc<AtomicUsize>,
}

impl Upstream {
    /// Serves TLS for `name`, offering `alpn`; `serve` gets every connection.
    pub async fn tls<F, S>(name: &str, alpn: &[&[u8]], serve: S) -> Self
    where
        S: Fn(server::TlsStream<TcpStream>) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        Self::tls_at(Ipv4Addr::LOCALHOST.into(), name, alpn, serve).await
    }

    /// The same at another address of this host.
    pub async fn tls_at<F, S>(ip: IpAddr, name: &str, alpn: &[&[u8]], serve: S) -> Self
    where
        S: Fn(server::TlsStream<TcpStream>) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (ca_pem, mut config) = server_config(name);
        config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
        Self::accepting(ip, ca_pem, config, serve).await
    }

    async fn accepting<F, S>(
        ip: IpAddr,
        ca_pem: String,
        config: rustls::ServerConfig,
        serve: S,
    ) -> Self
    where
        S: Fn(server::TlsStream<TcpStream>) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let serve = Arc::new(serve);
        let upstream = Self::tcp_at(SocketAddr::new(ip, 0), move |stream| {
            let (acceptor, serve) = (acceptor.clone(), Arc::clone(&serve));
            async move {
                if let Ok(stream) = acceptor.accept(stream).await {
                    serve(stream).await;
                }
            }
        });
        let mut upstream = upstream.await.unwrap();
        upstream.ca_pem = ca_pem;
        upstream
    }

    /// Serves TLS over HTTP/1.1 to those who show a certificate of the CA `client_ca`.
    pub async fn knowing<F, S>(name: &str, client_ca: &str, serve: S) -> Self
    where
        S: Fn(server::TlsStream<TcpStream>) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (ca_pem, chain, key) = issued(name);
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(client_ca.as_bytes()).unwrap()).unwrap();
        let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
            Arc::new(roots),
            provider(),
        );
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(chain, key)
            .unwrap();
        Self::accepting(Ipv4Addr::LOCALHOST.into(), ca_pem, config, serve).await
    }

    /// Serves TLS of these versions to those who show a certificate of one of the CAs, and to those
    /// who show none where it is not `demanded`.
    pub async fn asking<F, S>(
        name: &str,
        (client_cas, demanded): (&[&str], bool),
        versions: &[&'static rustls::SupportedProtocolVersion],
        alpn: &[&[u8]],
        serve: S,
    ) -> Self
    where
        S: Fn(server::TlsStream<TcpStream>) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let (ca_pem, chain, key) = issued(name);
        let mut roots = rustls::RootCertStore::empty();
        for ca in client_cas {
            roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap()).unwrap();
        }
        let roots = Arc::new(roots);
        let verifier =
            rustls::server::WebPkiClientVerifier::builder_with_provider(roots, provider());
        let verifier = if demanded { verifier } else { verifier.allow_unauthenticated() };
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(chain, key)
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
        Self::accepting(Ipv4Addr::LOCALHOST.into(), ca_pem, config, serve).await
    }

    /// Serves plain TCP. The CA it carries is nobody's.
    pub async fn tcp<F, S>(serve: S) -> Self
    where
        S: Fn(TcpStream) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        Self::tcp_at(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0), serve).await.unwrap()
    }

    /// The same at an address and port; none when somebody else has that.
    pub async fn tcp_at<F, S>(address: SocketAddr, serve: S) -> Option<Self>
    where
        S: Fn(TcpStream) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(address).await.ok()?;
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::SeqCst);
                stream.set_nodelay(true).unwrap();
                tokio::spawn(serve(stream));
            }
        });
        Some(Self { address, ca_pem: server_config("nobody.test").0, connections })
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

fn server_config(name: &str) -> (String, rustls::ServerConfig) {
    let (ca_pem, chain, key) = issued(name);
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    (ca_pem, config)
}

/// A new CA, and a certificate of it for `name` with its key.
fn issued(name: &str) -> (String, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let identity = Identity::of(name);
    let chain = CertificateDer::from_pem_slice(identity.chain_pem.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes()).unwrap();
    (identity.ca_pem, vec![chain], key)
}

/// A certificate of a CA of its own, and its key, PEM.
pub struct Identity {
    pub ca_pem: String,
    pub chain_pem: String,
    pub key_pem: String,
}

impl Identity {
    pub fn new() -> Self {
        Self::of("client.test")
    }

    fn of(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let leaf = leaf.signed_by(&key, &ca).unwrap();
        Self { ca_pem: ca.pem(), chain_pem: leaf.pem(), key_pem: key.serialize_pem() }
    }
}

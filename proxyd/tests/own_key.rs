//! The vault's own key is no secret that a policy could have sent, wherever it lies.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::support::*;
use tokio::io::AsyncWriteExt;

/// A key that would go into a header as it stands.
const KEY: &str = "KEY-CANARY-0123456789abcdef0123456789abcdef";

fn policy(path: &Path) -> String {
    format!(
        "[[egress.allow]]\nhosts = [\"api.test\"]\nmethods = [\"GET\"]\n\
         addresses = [\"127.0.0.1/32\"]\ncredential = \"api\"\n\
         [credentials.api]\nsecret = \"file:{}\"\ninject = {{ bearer = true }}\n\
         hosts = [\"api.test\"]\n",
        path.display()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_vaults_key_is_not_sent_though_it_lies_where_secrets_do() {
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], echo_h1).await;
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("vault.key", KEY), ("token", "FILE-CANARY")] {
        std::fs::write(dir.path().join(name), text).unwrap();
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(dir.path().join(name), private).unwrap();
    }
    symlink("vault.key", dir.path().join("link")).unwrap();
    std::fs::hard_link(dir.path().join("vault.key"), dir.path().join("second-name")).unwrap();
    let place = dir.path().display();
    let more = format!("key = \"file:{place}/vault.key\"\nsecret-directories = [\"{place}\"]\n");

    for (name, wanted) in
        [("vault.key", "503"), ("link", "503"), ("second-name", "503"), ("token", "200")]
    {
        let policy = policy(&dir.path().join(name));
        let proxyd = Proxyd::configured(&policy, &[("api.test", &upstream)], &more).await;
        let lease = proxyd.lease().await;
        let mut stream = lease.h1("api.test").await;
        let before = upstream.connections();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
        let (head, body) = timely(response(&mut stream)).await;
        let body = String::from_utf8_lossy(&body);

        assert_eq!(&head[9..12], wanted, "{name}: {body}");
        assert!(!body.contains("CANARY"), "{name}: {body}");
        let refused = body.contains("secret_unavailable");
        let asked = upstream.connections() - before;
        assert_eq!((refused, asked), (wanted == "503", usize::from(!refused)), "{name}: {body}");
    }
}

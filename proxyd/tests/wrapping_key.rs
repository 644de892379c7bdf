//! The key around the vault's data key is replaced: at an operator's word, at a start with another
//! source, and by a proxyd that is killed meanwhile.

use crate::support::*;
use bytes::Bytes;
use ipc::vault::SecretInfo;

#[derive(serde::Deserialize)]
struct Listed {
    secrets: Vec<SecretInfo>,
}

async fn replace(proxyd: &Proxyd) -> Result<(), ipc::fault::Fault> {
    let path = "/v1/vault/wrapping-key";
    proxyd.control().call(http::Method::POST, path, None, Bytes::new()).await.map(drop)
}

/// Whether the vault is open and has what was stored.
async fn holds(proxyd: &Proxyd, names: &[&str]) -> bool {
    let listed: Listed = proxyd.control().get("/v1/secrets").await.unwrap();
    let lease = proxyd.lease().await;
    assert!(lease.placeholder().len() > 8);
    lease.close().await;
    listed.secrets.iter().map(|secret| &secret.name).eq(names)
}

#[tokio::test(flavor = "multi_thread")]
async fn at_a_word_the_key_file_is_another_and_values_stay() {
    let mut proxyd = Proxyd::start(POLICY, &[]).await;
    proxyd.put_secret("api").await;
    let key = proxyd.layout.state.join("proxyd/vault/vault.key");
    let before = std::fs::read(&key).unwrap();

    replace(&proxyd).await.unwrap();

    assert_ne!(std::fs::read(&key).unwrap(), before);
    proxyd.record(|record| record.reason.iter().any(|text| text.contains("key replaced"))).await;
    proxyd.put_secret("later").await;
    proxyd.restart().await;
    assert!(holds(&proxyd, &["api", "later"]).await);
}

/// A kill comes at another moment in each round: when the new key lies there, when it has taken the
/// former one's place, at once.
#[tokio::test(flavor = "multi_thread")]
async fn killed_in_the_middle_of_a_replacement_it_opens_its_vault_again() {
    let mut proxyd = Proxyd::start(POLICY, &[]).await;
    proxyd.put_secret("api").await;
    let key = proxyd.layout.state.join("proxyd/vault/vault.key");
    let next = key.with_file_name("vault.key.next");
    for round in 0..9 {
        let vault = proxyd.health().await.vault_pid.cast_signed();
        let vault = rustix::process::Pid::from_raw(vault).unwrap();
        let before = std::fs::read(&key).unwrap();
        let client = proxyd.control();
        let asking = tokio::spawn(async move {
            let path = "/v1/vault/wrapping-key";
            client.call(http::Method::POST, path, None, Bytes::new()).await.is_ok()
        });
        let reached = || match round % 3 {
            0 => next.exists() || std::fs::read(&key).is_ok_and(|now| now != before),
            1 => std::fs::read(&key).is_ok_and(|now| now != before),
            _ => true,
        };
        let deadline = std::time::Instant::now() + DEADLINE;
        while !reached() {
            assert!(std::time::Instant::now() < deadline, "the key is not replaced");
            std::thread::yield_now();
        }

        // Else it would come to an end with it: it outlives proxyd for so long.
        rustix::process::kill_process(vault, rustix::process::Signal::KILL).unwrap();
        proxyd.restart().await;

        asking.abort();
        assert!(holds(&proxyd, &["api"]).await, "round {round}");
        assert!(!next.exists(), "round {round}: a second key is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_source_takes_over_at_a_start_and_the_former_is_needed_no_more() {
    let files = [("phrase", "correct horse battery staple\n")];
    let mut proxyd = Proxyd::with(POLICY, &[], "", &files, &[]).await;
    proxyd.put_secret("api").await;
    let key = proxyd.layout.state.join("proxyd/vault/vault.key");
    let own = key.display();

    let phrase = "key = \"passphrase-file:DIR/phrase\"\n";
    proxyd.write_config("proxyd.toml", &format!("{phrase}former-key = \"file:{own}\"\n"));
    proxyd.restart().await;

    assert!(holds(&proxyd, &["api"]).await);
    assert_eq!(proxyd.health().await.key_source, "passphrase");
    assert!(proxyd.log().contains("remove former-key"));
    let refused = replace(&proxyd).await.unwrap_err().text;
    assert!(refused.contains("former-key"), "{refused}");

    // The former key opens it no more, so nobody needs to keep it.
    std::fs::remove_file(&key).unwrap();
    proxyd.write_config("proxyd.toml", phrase);
    proxyd.restart().await;
    assert!(holds(&proxyd, &["api"]).await);
}

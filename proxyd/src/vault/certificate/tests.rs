//! Stored pairs: which are taken, what is shown of them, what is signed and for whom.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::super::tests::{in_process, policy};
use super::super::wire::Request;
use super::super::{Vault, VaultError};
use super::*;

/// A CA, and a certificate of it for a name.
pub(super) struct Made {
    ca: CertifiedIssuer<'static, KeyPair>,
    leaf: rcgen::Certificate,
    key: KeyPair,
}

impl Made {
    pub fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.leaf.der().clone()]
    }
    pub fn ca(&self) -> CertificateDer<'static> {
        self.ca.der().clone()
    }
    pub fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_slice(self.key.serialize_pem().as_bytes()).unwrap()
    }
    fn pem(&self) -> String {
        [self.leaf.pem(), self.key.serialize_pem()].concat()
    }
}

pub(super) fn made(name: &str) -> Made {
    made_for(name, -24, 24)
}

/// Valid from and to so many hours from now.
fn made_for(name: &str, begin: i64, end: i64) -> Made {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut leaf = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let hours = |hours: i64| std::time::Duration::from_secs(hours.unsigned_abs() * 3600);
    let at = |from_now: i64| match from_now < 0 {
        true => std::time::SystemTime::now() - hours(from_now),
        false => std::time::SystemTime::now() + hours(from_now),
    };
    (leaf.not_before, leaf.not_after) = (at(begin).into(), at(end).into());
    let leaf = leaf.signed_by(&key, &ca).unwrap();
    Made { ca, leaf, key }
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

fn pem(label: &str, der: &[u8]) -> String {
    use base64::Engine;
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// The key inside a PKCS #8 frame, which it ends.
fn inner(key: &KeyPair, begin: &[u8]) -> Vec<u8> {
    let der = key.serialize_der();
    let at = der.windows(begin.len()).rposition(|part| part == begin).unwrap();
    der[at..].to_vec()
}

/// As `openssl ec` writes it: with the curve between the key and its public half.
fn sec1(key: &KeyPair) -> Vec<u8> {
    let mut der = inner(key, &[0x02, 0x01, 0x01, 0x04, 0x20]);
    let curve = [0xa0, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
    der.splice(37..37, curve);
    [vec![0x30, u8::try_from(der.len()).unwrap()], der].concat()
}

#[test]
fn every_usual_form_of_a_key_is_read_whatever_stands_around_it() {
    let own = made("corp.test");
    let (leaf, key) = (own.leaf.pem(), own.key.serialize_pem());
    let ca = own.ca.pem();
    let rsa = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap();
    let of_rsa = CertificateParams::new(vec!["rsa.test".to_owned()]).unwrap();
    let of_rsa = of_rsa.self_signed(&rsa).unwrap().pem();
    let pkcs1 = inner(&rsa, &[0x02, 0x01, 0x00, 0x02, 0x82]);
    let head = [0x30, 0x82, (pkcs1.len() >> 8) as u8, pkcs1.len() as u8];
    let pkcs1 = [&head, &pkcs1[..]].concat();
    for (text, certificates, schemes) in [
        ([leaf.clone(), key.clone()].concat(), 1, 1),
        ([key.clone(), leaf.clone(), ca.clone()].concat(), 2, 1),
        (format!("Bag Attributes\n  x: y\n{leaf}\nsubject=corp\n{ca}\r\n{key}\n\n"), 2, 1),
        ([leaf, key.clone()].concat().replace('\n', "\r\n"), 1, 1),
        ([of_rsa.clone(), rsa.serialize_pem()].concat(), 1, 6),
        ([pem("RSA PRIVATE KEY", &pkcs1), of_rsa].concat(), 1, 6),
        ([own.leaf.pem(), pem("EC PRIVATE KEY", &sec1(&own.key))].concat(), 1, 1),
    ] {
        let parts = Pair::read(&secret(&text)).unwrap().shown();

        assert_eq!(parts.len(), certificates + 1, "{text}");
        assert_eq!(parts[0].expose_secret().len(), 2 * schemes, "{text}");
        let shown = parts.iter().map(Secret::expose_secret).collect::<Vec<_>>().concat();
        let der = own.key();
        let held = |key: &[u8]| shown.windows(key.len()).any(|part| part == key);
        assert!(!held(der.secret_der()) && !held(b"PRIVATE"));
    }
}

#[test]
fn a_certificate_of_version_1_is_taken() {
    let made = made("corp");
    let mut der = made.leaf.der().to_vec();
    let version = [0xa0, 3, 2, 1, 2];
    let at = der.windows(5).position(|part| part == version).unwrap();
    der[at + 4] = 0;
    let whole = [pem("CERTIFICATE", &der), made.key.serialize_pem()].concat();

    let pair = Pair::valid(&secret(&whole), now_unsigned()).unwrap();

    assert_eq!(*pair.chain[0], *der);
}

#[test]
fn what_is_no_certificate_with_its_key_is_refused_with_the_reason_and_without_the_value() {
    let (own, other) = (made("corp.test"), made("corp.test"));
    let (leaf, key) = (own.leaf.pem(), own.key.serialize_pem());
    let cut = &key[..key.len() - 40];
    for (text, reason) in [
        ("SECRET-CANARY-1234".to_owned(), "it holds no certificate in PEM"),
        (key.clone(), "it holds no certificate in PEM"),
        (leaf.clone(), "it holds no private key"),
        ([leaf.as_str(), cut].concat(), "it is no whole PEM text"),
        ([&leaf, &key[..], &key].concat(), "it holds several private keys"),
        ([leaf.clone(), other.key.serialize_pem()].concat(), "does not belong to its first"),
        ([own.ca.pem(), leaf.clone(), key.clone()].concat(), "does not belong to its first"),
        (
            format!(
                "{leaf}-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED \
                     PRIVATE KEY-----\n"
            ),
            "its private key is encrypted",
        ),
        (
            format!(
                "{leaf}-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nAAAA\n\
                     -----END RSA PRIVATE KEY-----\n"
            ),
            "its private key is encrypted",
        ),
        (
            format!("{leaf}-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
            "of no kind that TLS signs with",
        ),
        (
            format!("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n{key}"),
            "its first certificate cannot be read",
        ),
    ] {
        let error = Pair::read(&secret(&text)).err().unwrap().to_string();

        assert!(error.contains(reason), "{reason}: {error}");
        let lines = text.lines().filter(|line| line.len() > 12 && !line.starts_with('-'));
        for line in lines {
            assert!(!error.contains(line), "{error}");
        }
    }
}

#[test]
fn a_certificate_is_shown_within_its_time_only() {
    let now = now_unsigned();
    for (begin, end, reason) in [
        (-2, -1, Some("it ended at 20")),
        (1, 2, Some("it begins to be valid at 20")),
        (-1, 1, None),
    ] {
        let error = Pair::valid(&secret(&made_for("corp.test", begin, end).pem()), now).err();

        let text = error.map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(text.is_empty(), reason.is_none(), "{text}");
        assert!(text.contains(reason.unwrap_or_default()), "{text}");
    }
}

const POLICY: &str = r#"
    [[egress.allow]]
    hosts = ["corp.test"]
    credential = "corp"
    [[egress.allow]]
    hosts = ["plain.test"]
    credential = "plain"
    [credentials.corp]
    secret = "local:corp"
    inject = { client-certificate = true }
    hosts = ["corp.test"]
    [credentials.plain]
    secret = "local:plain"
    inject = { bearer = true }
    hosts = ["plain.test"]
"#;

async fn sign(
    vault: &Vault,
    name: &str,
    host: &str,
    shown: String,
    message: &[u8],
) -> Result<Vec<u8>, VaultError> {
    let policy = policy(POLICY);
    let credential = Named::clone(&vault.named(&policy.credentials[name]));
    let scheme = SignatureScheme::ECDSA_NISTP256_SHA256.into();
    let request = Request::Sign { credential, host: host.to_owned(), scheme, shown };
    let (_, parts) = vault.connection.ask(&request, &[Secret::concat(&[message])]).await?;
    Ok(parts[0].expose_secret().to_vec())
}

#[tokio::test]
async fn the_vault_signs_for_the_credentials_hosts_with_the_certificate_that_was_shown() {
    let dir = tempfile::tempdir().unwrap();
    let vault = in_process(dir.path());
    let (first, second, third) = (made("one"), made("two"), made("three"));
    let print_of = |made: &Made| print(made.chain().iter().map(AsRef::as_ref));
    let message = [&[b' '; 64][..], b"TLS 1.3, client CertificateVerify\0", &[7; 32]].concat();
    vault.put("plain", secret("SECRET-CANARY-1234")).await.unwrap();
    vault.put("corp", secret(&first.pem())).await.unwrap();
    vault.put("corp", secret(&second.pem())).await.unwrap();

    // A handshake that is under way ends with the certificate that it began with.
    for made in [&first, &second] {
        let signature = sign(&vault, "corp", "corp.test", print_of(made), &message).await.unwrap();
        let key = aws_lc_rs::signature::UnparsedPublicKey::new(
            &aws_lc_rs::signature::ECDSA_P256_SHA256_ASN1,
            made.key.public_key_raw(),
        );
        key.verify(&message, &signature).unwrap();
    }
    vault.put("corp", secret(&third.pem())).await.unwrap();
    for (name, host, made, message, reason) in [
        ("corp", "corp.test", &first, &message[..], "replaced meanwhile"),
        ("corp", "other.test", &third, &message, "may not go to other.test"),
        ("plain", "plain.test", &third, &message, "signs no handshake"),
        ("corp", "corp.test", &third, b"anything else", "signs handshakes only"),
    ] {
        let refused = sign(&vault, name, host, print_of(made), message).await.unwrap_err();
        assert!(refused.to_string().contains(reason), "{reason}: {refused}");
    }
}

#[tokio::test]
async fn a_secret_of_a_certificate_is_checked_when_it_is_stored_and_when_it_is_listed() {
    let dir = tempfile::tempdir().unwrap();
    let policies = dir.path().join("dev.toml");
    let vault = in_process(dir.path());
    let state = async |name: &str| {
        let listed = vault.list().await.unwrap();
        listed.into_iter().find(|secret| secret.name == name).unwrap().state
    };
    // Stored before any policy said what it is for.
    vault.put("corp", secret("SECRET-CANARY-1234")).await.unwrap();
    assert_eq!(state("corp").await, "ready");
    vault.put("late", secret(&made_for("corp", -2, -1).pem())).await.unwrap();

    let text = POLICY.replace("local:plain", "local:late").replace("bearer", "client-certificate");
    std::fs::write(&policies, text).unwrap();
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&policies, std::fs::Permissions::from_mode(0o600)).unwrap();
    // The files are looked at once a second.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while state("corp").await != "unusable" {
        assert!(std::time::Instant::now() < end, "the policy is not seen");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }

    assert_eq!(state("late").await, "expired");
    let refused = vault.put("corp", secret("SECRET-CANARY-5678")).await.unwrap_err();
    assert!(matches!(&refused, VaultError::Invalid(text) if text.contains("no certificate")));
    vault.put("corp", secret(&made("corp").pem())).await.unwrap();
    assert_eq!(state("corp").await, "ready");
    // What is no certificate's is not looked into.
    vault.put("other", secret("SECRET-CANARY-1234")).await.unwrap();
    assert_eq!(state("other").await, "ready");
}

//! The store of certificates for Java: shown in the place of every Java's own, wherever that lies.

use std::path::Path;

use policies::{Root, SandboxTable};
use sandboxd::trust::store::KeyStores;
use sha2::{Digest, Sha256};

use super::support::*;

const OURS: &str = "-----BEGIN CERTIFICATE-----\nMAEJ\n-----END CERTIFICATE-----\n";
const OTHER: &str = "-----BEGIN CERTIFICATE-----\nMAEK\n-----END CERTIFICATE-----\n";
/// Javas as distributions, vendors and operators lay them out.
const STORES: &[&str] = &[
    "etc/pki/java/cacerts",
    "etc/ssl/certs/java/cacerts",
    "usr/java/jdk-11/lib/security/cacerts",
    "usr/lib/jvm/old/jre/lib/security/cacerts",
    "usr/lib/jvm/own/lib/security/jssecacerts",
    "usr/local/jdk/lib/security/cacerts",
];

fn copy(image: &Path, path: &Path, bytes: impl AsRef<[u8]>) {
    let copy = image.join(path.strip_prefix("/").unwrap_or(path));
    std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
    std::fs::write(&copy, bytes).unwrap();
    open(&copy, 0o755);
}

fn open(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// bash, sha256sum and what they need, the Javas, and a bundle with one certificate.
fn image() -> tempfile::TempDir {
    let image = tempfile::tempdir().unwrap();
    for program in ["/bin/bash", "/usr/bin/sha256sum"] {
        for path in program_files(program) {
            copy(image.path(), Path::new(&path), std::fs::read(&path).unwrap());
        }
    }
    for path in STORES {
        copy(image.path(), Path::new(path), "the root's own");
    }
    // A link out of the Java's own directory, as most distributions have.
    let linked = image.path().join("usr/lib/jvm/new/lib/security");
    std::fs::create_dir_all(&linked).unwrap();
    std::os::unix::fs::symlink("/etc/ssl/certs/java/cacerts", linked.join("cacerts")).unwrap();
    copy(image.path(), Path::new("etc/ssl/certs/ca-certificates.crt"), OTHER);
    open(image.path(), 0o755);
    image
}

#[tokio::test]
async fn every_java_of_the_root_reads_a_store_with_its_own_certificates_and_proxyds() {
    let place = Place::new();
    let image = image();
    let state = tempfile::tempdir().unwrap();
    open(state.path(), 0o755);
    let stores = KeyStores::open(state.path().join("trust")).unwrap();
    let root = Root::Path(image.path().display().to_string());
    let mut plan = place.plan_of(&SandboxTable { root, ..SandboxTable::default() });
    let store = stores.path(&plan.root).unwrap();
    plan.key_store = Some(store.clone());

    let mut cell = place.make(&plan).await.unwrap();
    let bundle = cell.take_bundle();
    for ours in [OURS, OTHER] {
        stores.fill(&plan.root, bundle.as_ref(), ours).unwrap();

        let expected = hex::encode(Sha256::digest(std::fs::read(&store).unwrap()));
        let links = ["etc/ssl/cleanhands-java.jks", "usr/lib/jvm/new/lib/security/cacerts"];
        for path in STORES.iter().chain(&links) {
            let ran = run(&cell, &format!("sha256sum /{path}; echo x 2>&- >>/{path}")).await;
            assert_eq!(ran.output, format!("{expected}  /{path}"), "{path}");
            assert_ne!(ran.exit.code, Some(0), "{path} can be written");
        }
    }
    // Two certificates stood in it each time: the root's and ours.
    assert_eq!(std::fs::read(&store).unwrap()[8..12], [0, 0, 0, 2]);
}

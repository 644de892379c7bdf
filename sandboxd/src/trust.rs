//! What makes every runtime in a sandbox trust proxyd's CA: one merged bundle where the system's
//! lies, and the variables that point the rest to it.
//!
//! The bundle of the sandbox's root and proxyd's certificates together, so that a destination
//! that proxyd tunnels unread is still verified as outside. Nothing here is secret.

use std::path::{Path, PathBuf};

/// Where distributions keep the bundle of trusted certificates. The first that is there is read;
/// all that are there are replaced, and the first in any case.
const BUNDLES: &[&str] = &[
    // Debian, Ubuntu, Arch, Gentoo, NixOS.
    "/etc/ssl/certs/ca-certificates.crt",
    // Fedora, RHEL.
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    // openSUSE.
    "/etc/ssl/ca-bundle.pem",
    // Alpine; OpenSSL's own default.
    "/etc/ssl/cert.pem",
];
/// proxyd's certificates alone, for runtimes that add to a store of their own.
const OURS: &str = "/etc/ssl/cleanhands-ca.pem";
/// Largest bundle read: ten times what distributions ship.
const BUNDLE_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Why a sandbox could not be given its bundle.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the trusted certificates {path}: {why}")]
pub struct TrustError {
    path: PathBuf,
    why: String,
}

/// The files to install in a sandbox whose system directories come from `root`.
pub fn files(root: &Path, ca_pem: &str) -> Result<Vec<(String, Vec<u8>)>, TrustError> {
    let present: Vec<&str> =
        BUNDLES.iter().copied().filter(|path| below(root, path).is_file()).collect();
    let mut bundle = match present.first() {
        Some(path) => read(&below(root, path))?,
        None => Vec::new(),
    };
    if !bundle.is_empty() && !bundle.ends_with(b"\n") {
        bundle.push(b'\n');
    }
    bundle.extend_from_slice(ca_pem.as_bytes());
    let mut files = vec![(OURS.to_owned(), ca_pem.as_bytes().to_vec())];
    for (at, path) in BUNDLES.iter().enumerate() {
        if at == 0 || present.contains(path) {
            files.push(((*path).to_owned(), bundle.clone()));
        }
    }
    Ok(files)
}

/// Variables for every command of a sandbox that can reach proxyd.
pub fn variables() -> Vec<(String, String)> {
    /// These replace the runtime's store, so they name the merged bundle.
    const REPLACE: &[&str] = &[
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "CURL_CA_BUNDLE",
        "AWS_CA_BUNDLE",
        "PIP_CERT",
        "CARGO_HTTP_CAINFO",
    ];
    /// These add to it, and reading a whole bundle again would only take time.
    const ADD: &[&str] = &["NODE_EXTRA_CA_CERTS", "DENO_CERT"];
    /// A prompt would wait for nobody; a remote by SSH cannot carry a credential that proxyd adds.
    const GIT: &[(&str, &str)] = &[
        ("url.https://.insteadOf", "ssh://git@"),
        ("url.https://github.com/.insteadOf", "git@github.com:"),
        ("url.https://gitlab.com/.insteadOf", "git@gitlab.com:"),
        ("url.https://bitbucket.org/.insteadOf", "git@bitbucket.org:"),
        ("url.https://codeberg.org/.insteadOf", "git@codeberg.org:"),
    ];
    let own = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut variables: Vec<(String, String)> = Vec::new();
    variables.extend(REPLACE.iter().map(|name| own(name, BUNDLES[0])));
    variables.extend(ADD.iter().map(|name| own(name, OURS)));
    variables.push(own("GIT_TERMINAL_PROMPT", "0"));
    variables.push(own("GIT_CONFIG_COUNT", &GIT.len().to_string()));
    for (at, (key, value)) in GIT.iter().enumerate() {
        variables.push((format!("GIT_CONFIG_KEY_{at}"), (*key).to_owned()));
        variables.push((format!("GIT_CONFIG_VALUE_{at}"), (*value).to_owned()));
    }
    variables
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn read(path: &Path) -> Result<Vec<u8>, TrustError> {
    use std::io::Read;
    let fail = |why: String| TrustError { path: path.to_owned(), why };
    let file = std::fs::File::open(path).map_err(|e| fail(e.to_string()))?;
    let mut bytes = Vec::new();
    file.take(BUNDLE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|e| fail(e.to_string()))?;
    if bytes.len() as u64 > BUNDLE_BYTES_MAX {
        return Err(fail(format!("it has more than {BUNDLE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_is_merged_and_replaces_every_one_that_is_there() {
        let root = tempfile::tempdir().unwrap();
        let fedora = root.path().join("etc/pki/tls/certs");
        std::fs::create_dir_all(&fedora).unwrap();
        std::fs::write(fedora.join("ca-bundle.crt"), "SYSTEM").unwrap();

        let files = files(root.path(), "OURS\n").unwrap();

        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, [OURS, BUNDLES[0], BUNDLES[1]]);
        assert_eq!(files[0].1, b"OURS\n");
        assert!(files[1..].iter().all(|(_, bytes)| bytes == b"SYSTEM\nOURS\n"));
    }

    #[test]
    fn a_root_without_a_bundle_trusts_ours_alone() {
        let root = tempfile::tempdir().unwrap();

        let files = files(root.path(), "OURS\n").unwrap();

        assert_eq!(files.len(), 2);
        assert_eq!(files[1], (BUNDLES[0].to_owned(), b"OURS\n".to_vec()));
    }
}

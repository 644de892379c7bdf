//! What makes every runtime in a sandbox trust proxyd's CA: one bundle, where it lies, and the
//! variables that point to it those runtimes that do not look where the system's lies.
//!
//! The bundle holds the certificates of the sandbox's root and proxyd's together, so that a
//! destination that proxyd tunnels unread is still verified as outside. Each cell makes its own:
//! see `init/trust.rs`. Nothing here is secret.

pub mod java;
pub mod pem;
pub mod store;

use policies::{CA_BUNDLE_VARIABLES, CA_EXTRA_VARIABLES};

/// Where distributions keep the bundle of trusted certificates. The first that is there is the
/// root's; all that are there show ours instead.
pub const SYSTEM_BUNDLES: &[&str] = &[
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
/// Those of them that are never shown from the root, since their directory is ours: they lead to
/// our bundle in every sandbox, because OpenSSL of some distributions looks nowhere else.
pub const LINKS: &[&str] = &["/etc/ssl/cert.pem", "/etc/ssl/ca-bundle.pem"];
/// Where distributions keep Java's store of the same certificates.
pub const JAVA_STORES: &[&str] = &[
    // Debian, Ubuntu, Arch, Alpine.
    "/etc/ssl/certs/java/cacerts",
    // Fedora, RHEL.
    "/etc/pki/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
];
/// Directories with a directory for each Java.
pub const JAVA_HOMES: &[&str] =
    &["/usr/lib/jvm", "/usr/lib64/jvm", "/usr/java", "/usr/local", "/opt", "/opt/java"];
/// Where a Java has its store: from version 9 on, and before. What is named `jssecacerts` is read
/// instead of the other where it is there.
pub const JAVA_OWN_STORES: &[&str] = &[
    "lib/security/cacerts",
    "lib/security/jssecacerts",
    "jre/lib/security/cacerts",
    "jre/lib/security/jssecacerts",
];
/// Our bundle. Its directory is never a mount of the root's, so it can always be made.
pub const BUNDLE: &str = "/etc/ssl/cleanhands-bundle.pem";
/// proxyd's certificates and those that an operator added to the root's bundle, for runtimes that
/// add to a list of their own.
pub const OURS: &str = "/etc/ssl/cleanhands-ca.pem";
/// The same certificates for Java: see [`store`].
pub const KEY_STORE: &str = "/etc/ssl/cleanhands-java.jks";
/// Largest bundle of a root: ten times what distributions ship.
pub const BUNDLE_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Variables for every command of a sandbox that can reach proxyd. policy(5) lists them.
pub fn variables() -> Vec<(String, String)> {
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
    variables.extend(CA_BUNDLE_VARIABLES.iter().map(|name| own(name, BUNDLE)));
    variables.extend(CA_EXTRA_VARIABLES.iter().map(|name| own(name, OURS)));
    variables.push(own("GIT_TERMINAL_PROMPT", "0"));
    variables.push(own("GIT_CONFIG_COUNT", &GIT.len().to_string()));
    for (at, (key, value)) in GIT.iter().enumerate() {
        variables.push((format!("GIT_CONFIG_KEY_{at}"), (*key).to_owned()));
        variables.push((format!("GIT_CONFIG_VALUE_{at}"), (*value).to_owned()));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_policy_can_set_any_of_these_variables() {
        let names = variables().into_iter().map(|(name, _)| name);
        let settable: Vec<_> = names.filter(|name| !policies::is_own_variable(name)).collect();

        assert!(settable.is_empty(), "{settable:?}");
    }

    #[test]
    fn every_variable_and_every_file_is_in_the_man_page() {
        let page = include_str!("../../policies/policy.5.md");
        let listed = variables();
        let names = listed.iter().map(|(name, _)| name.as_str());
        // Numbered ones stand there by their count.
        let names = names.filter(|name| !name.contains("_KEY_") && !name.contains("_VALUE_"));

        let missing: Vec<&str> = names
            .chain([BUNDLE, OURS, KEY_STORE])
            .chain(SYSTEM_BUNDLES.iter().copied())
            .filter(|word| !page.contains(&format!("`{word}")))
            .collect();

        assert!(missing.is_empty(), "{missing:?}");
    }
}

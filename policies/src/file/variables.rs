//! Which variables a policy may set, and under which names it may give out placeholders.
//!
//! What a program in a sandbox does to itself is its own affair: PATH, HOME and what the loader
//! reads may be set. Refused are the names that make programs trust proxyd and ask nobody (sandboxd
//! sets them last, so the file's value would never count), and, for placeholders, names in which a
//! made-up token would keep every program from starting or from finding its way out.

use super::is_variable;
use super::reader::{Reader, Spanned};

/// Variables that replace a runtime's store of trusted certificates: sandboxd has them name a
/// bundle that holds the root's certificates and proxyd's.
pub const CA_BUNDLE_VARIABLES: &[&str] = &[
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE",
    "PIP_CERT",
    "CARGO_HTTP_CAINFO",
    // Of runtimes that have a list of their own, where they do not ask OpenSSL.
    "PERL_LWP_SSL_CA_FILE",
    "HEX_CACERTS_PATH",
    "NIX_SSL_CERT_FILE",
    "BUNDLE_SSL_CA_CERT",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "HTTPLIB2_CA_CERTS",
    "SYSTEM_CERTIFICATE_PATH",
];

/// Variables that add to it: sandboxd has them name proxyd's certificates. Reading the whole bundle
/// again would cost Node a fifth of its start.
pub const CA_EXTRA_VARIABLES: &[&str] = &["NODE_EXTRA_CA_CERTS", "DENO_CERT"];

/// What sandboxd has git go by, whatever a file says. A star stands for a number.
const GIT: &[&str] =
    &["GIT_TERMINAL_PROMPT", "GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_*", "GIT_CONFIG_VALUE_*"];

/// What programs go by before they do anything. A star stands for any ending.
const NO_TOKENS: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "LANG",
    "LC_*",
    "TMPDIR",
    "PWD",
    "IFS",
    "ENV",
    "BASH_ENV",
    "LD_*",
    "GCONV_PATH",
    "LOCPATH",
];

/// Whether sandboxd sets a variable of that name in every sandbox, over what a policy says.
pub fn is_ours(name: &str) -> bool {
    let mut ours = [CA_BUNDLE_VARIABLES, CA_EXTRA_VARIABLES, GIT].into_iter().flatten();
    ours.any(|ours| matches(ours, name))
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(front) => name.starts_with(front),
        None => pattern == name,
    }
}

/// A name under which programs look for a proxy: leases for others say theirs in them.
fn is_proxy(name: &str) -> bool {
    name.to_ascii_uppercase().ends_with("_PROXY")
}

/// Judges the name of a variable that gets a value of the file's.
pub(super) fn check(reader: &mut Reader<'_>, name: &str, span: &core::ops::Range<usize>) {
    if !is_variable(name) {
        reader.error(span, "a variable's name is made of letters, digits and \"_\"");
    } else if is_ours(name) {
        refuse_ours(reader, name, span);
    }
}

/// Judges the name of a variable that gets a placeholder.
pub(super) fn check_placeholder(reader: &mut Reader<'_>, name: &Spanned<String>) {
    check(reader, &name.value, &name.span);
    let needed = NO_TOKENS.iter().any(|pattern| matches(pattern, &name.value));
    if needed || is_proxy(&name.value) {
        let message = format!("{} is no variable for a placeholder", name.value);
        let hint = "programs go by it before they read any token: choose another name";
        reader.error_hint(&name.span, message, hint);
    }
}

fn refuse_ours(reader: &mut Reader<'_>, name: &str, span: &core::ops::Range<usize>) {
    let message = format!("{name} is set by sandboxd in every sandbox");
    let hint = match name.starts_with("GIT_") && name != "GIT_SSL_CAINFO" {
        true => "it keeps git from asking questions; use a .gitconfig in the workspace instead",
        false => "it leads programs to the bundle that holds proxyd's CA: leave it out",
    };
    reader.error_hint(span, message, hint);
}

//! Reads `files = [".netrc"]` and `metadata = ["aws"]` of a credential: where a sandbox finds its
//! placeholders besides in variables.

use super::credentials::Credentials;
use super::reader::{Reader, Section};
use crate::client_file::{ClientFile, Cloud};
use crate::credential::Inject;
use crate::pattern::HostPattern;

/// The files, each once; whatever of `inject` and `hosts` is not whole is not judged.
pub(super) fn files(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    inject: Option<&Inject>,
    hosts: &[HostPattern],
) -> Vec<ClientFile> {
    let mut files = Vec::new();
    for text in section.strings(reader, "files").unwrap_or_default() {
        let Some(file) = ClientFile::parse(&text.value) else {
            let hint = format!("files: {}", ClientFile::paths().join(", "));
            reader.error_hint(&text.span, "no file of a client that is known here", hint);
            continue;
        };
        let exact = hosts.iter().any(|host| matches!(host, HostPattern::Exact(_)));
        let signs = matches!(inject, Some(Inject::AwsSigV4 { .. }));
        if files.contains(&file) {
            reader.error(&text.span, "listed twice");
        } else if inject.is_some() && signs != (file == ClientFile::Aws) {
            let hint =
                "\".aws/credentials\" goes with \"aws-sigv4\", all others with what is put in";
            reader.error_hint(&text.span, "the file's client shows another kind of key", hint);
        } else if file.names_hosts() && !exact && !hosts.is_empty() {
            let hint = "list at least one host by its whole name in hosts of the credential";
            reader.error_hint(&text.span, "the file has an entry for each host by name", hint);
        } else {
            files.push(file);
        }
    }
    files
}

/// The clouds, each once.
pub(super) fn metadata(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    inject: Option<&Inject>,
) -> Vec<Cloud> {
    let mut clouds = Vec::new();
    for text in section.strings(reader, "metadata").unwrap_or_default() {
        let Some(cloud) = Cloud::parse(&text.value) else {
            reader.error_hint(&text.span, "unknown cloud", "aws or gcp");
            continue;
        };
        let signs = matches!(inject, Some(Inject::AwsSigV4 { .. }));
        if clouds.contains(&cloud) {
            reader.error(&text.span, "listed twice");
        } else if inject.is_some() && signs != (cloud == Cloud::Aws) {
            let hint = "\"aws\" goes with \"aws-sigv4\", \"gcp\" with what puts a token in";
            reader.error_hint(&text.span, "the cloud's clients show another kind of key", hint);
        } else {
            clouds.push(cloud);
        }
    }
    clouds
}

/// Programs ask a metadata server for the one key that it has.
pub(super) fn check(reader: &mut Reader<'_>, credentials: &Credentials) {
    for cloud in [Cloud::Aws, Cloud::Gcp] {
        let stands = |named: &super::credentials::Named| {
            named.made.as_ref().is_some_and(|own| own.metadata.contains(&cloud))
        };
        for (_, named) in credentials.iter().filter(|(_, named)| stands(named)).skip(1) {
            let message =
                format!("two credentials stand for the metadata server of {}", cloud.name());
            reader.error(&named.span, message);
        }
    }
}

//! Parses policy files with positions for diagnostics.
//!
//! Everything wrong in all files is found in one go, as far as one mistake does not hide another.
//! Each table has its own module; [`lint`] checks what spans tables. What comes out needs no
//! further checks.

mod budget;
mod credentials;
mod egress;
mod grants;
mod groups;
mod inject;
mod lint;
mod reach;
mod reader;
mod sandbox;
pub(crate) mod units;
mod variables;

pub use egress::split_url;
pub use variables::{CA_BUNDLE_VARIABLES, CA_EXTRA_VARIABLES, is_ours as is_own_variable};

use std::collections::BTreeMap;
use std::sync::Arc;

use self::groups::Groups;
use self::reader::{Reader, Section, document};
use crate::diagnostic::Diagnostic;
use crate::policy::{Access, Policy};
use crate::set::GROUPS_FILE;

const TOP: &[&str] = &["description", "access", "sandbox", "egress", "mcp", "credentials"];
const ACCESS: &[&str] = &["users", "groups"];

/// Every key of a policy file, by table; `groups.toml` has the last one.
pub const KEYS: &[(&str, &[&str])] = &[
    ("", TOP),
    ("access", ACCESS),
    ("sandbox", sandbox::SANDBOX),
    ("sandbox.packages", sandbox::PACKAGES),
    ("sandbox.mounts", sandbox::MOUNT),
    ("egress", egress::EGRESS),
    ("egress.allow", egress::ALLOW),
    ("egress.allow.git", egress::GIT),
    ("egress.allow.ask", egress::ASK),
    ("mcp.NAME", egress::MCP),
    ("credentials.NAME", credentials::CREDENTIAL),
    ("credentials.NAME.inject", inject::INJECT),
    ("credentials.NAME.inject.basic", inject::BASIC),
    ("credentials.NAME.inject.registry", inject::BASIC),
    ("credentials.NAME.inject.header", inject::HEADER),
    ("credentials.NAME.inject.aws-sigv4", inject::SIGV4),
    ("credentials.NAME.inject.oauth2", grants::OAUTH2),
    ("credentials.NAME.inject.github-app", grants::GITHUB_APP),
    ("groups.toml", groups::GROUPS),
];

/// An environment's name becomes part of file names, logs and API objects.
const NAME_BYTES_MAX: usize = 64;

/// Parses all files of a directory. Environments are complete only if no error was found.
pub(crate) fn parse(
    files: &[(String, String)],
) -> (BTreeMap<String, Arc<Policy>>, Vec<Diagnostic>) {
    let (mut environments, mut found) = (BTreeMap::new(), Vec::new());
    let mut groups = Groups::default();
    for (file, text) in files.iter().filter(|(file, _)| base(file) == GROUPS_FILE) {
        let mut reader = Reader::new(file, text);
        groups = groups::read(&mut reader);
        found.append(&mut reader.finish());
    }
    for (file, text) in files.iter().filter(|(file, _)| base(file) != GROUPS_FILE) {
        let Some(name) = base(file).strip_suffix(".toml").filter(|name| is_name(name)) else {
            let message = "a policy is called NAME.toml".to_owned();
            let diagnostic = Diagnostic::whole(file, message)
                .with_hint("NAME is made of a-z, 0-9, \"-\", \"_\", and begins with a letter");
            found.push(diagnostic);
            continue;
        };
        let mut reader = Reader::new(file, text);
        if let Some(policy) = environment(&mut reader, name, &groups)
            && environments.insert(name.to_owned(), Arc::new(policy)).is_some()
        {
            reader.whole("there are two files for this environment");
        }
        found.append(&mut reader.finish());
    }
    (environments, found)
}

fn environment(reader: &mut Reader<'_>, name: &str, groups: &Groups) -> Option<Policy> {
    let document = document(reader)?;
    let top = Section::top(document.as_table());
    top.check_keys(reader, TOP);
    let description = top.string(reader, "description").map_or_else(String::new, |s| s.value);
    let access = top.section(reader, "access").map(|section| access(reader, &section));
    let sandbox = top.section(reader, "sandbox").map(|section| sandbox::read(reader, &section));
    let sandbox = sandbox.unwrap_or_default();
    let credentials = credentials::read(reader, name, &top, groups);
    let rules = egress::read(reader, &top, groups);
    let mcp = egress::read_mcp(reader, &top);
    lint::check(reader, &rules, &mcp, &credentials, &sandbox);
    let rules = rules.into_iter().map(|rule| Arc::new(rule.link(&credentials))).collect();
    let mcp = mcp.into_iter().map(|mcp| mcp.link(&credentials)).collect();
    Some(Policy {
        name: name.to_owned(),
        description,
        access: access.unwrap_or_default(),
        sandbox,
        mcp,
        credentials: credentials.into_made(),
        rules,
    })
}

fn access(reader: &mut Reader<'_>, section: &Section<'_>) -> Access {
    section.check_keys(reader, ACCESS);
    let mut list = |key: &str, prefix: &str| {
        let names = section.strings(reader, key)?;
        for name in &names {
            let number = name.value.strip_prefix(prefix);
            if name.value.trim() != name.value || name.value.is_empty() {
                reader.error(&name.span, "not a name");
            } else if number.is_some_and(|number| number.parse::<u32>().is_err()) {
                reader.error(&name.span, format!("a number stands after \"{prefix}\""));
            }
        }
        Some(names.into_iter().map(|name| name.value).collect())
    };
    let users = list("users", "uid:");
    let groups = list("groups", "gid:");
    if users.is_none() && groups.is_none() {
        // Whoever writes the table means to keep somebody out: without a list it admits nobody.
        reader.error_hint(
            &section.span,
            "[access] lists nobody",
            "write users = [\"NAME\"] or groups = [\"NAME\"], or leave the table out for everyone",
        );
        return Access { users: Some(Vec::new()), groups: None };
    }
    Access { users, groups }
}

fn base(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

/// A name of an environment, a credential, a server or a group.
fn is_name(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
}

/// A name of an environment variable.
fn is_variable(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX
        && text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

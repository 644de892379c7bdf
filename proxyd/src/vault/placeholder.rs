//! What a sandbox sees in place of a credential, and how one is recognised in a request.
//!
//! A placeholder is a prefix (a client may check it), the fixed word [`MARK`], and characters that
//! follow from the vault's key, the lease and the credential. The word makes every placeholder
//! recognisable, also one of another lease, of another proxyd or of long ago.

/// Stands in every placeholder. Letters and digits only, so that no encoding changes it; unlikely
/// enough (one in 10^14) not to stand in anything else.
pub const MARK: &str = "PXDmark1";

/// The prefix where no client is known to check one.
const PREFIX: &str = "pxd_";

/// Which prefix clients expect in which variable.
const PREFIXES: &[(&str, &str)] = &[
    ("GITHUB_TOKEN", "ghp_"),
    ("GH_TOKEN", "ghp_"),
    ("GITLAB_TOKEN", "glpat-"),
    ("NPM_TOKEN", "npm_"),
    ("ANTHROPIC_API_KEY", "sk-ant-api03-"),
    ("OPENAI_API_KEY", "sk-proj-"),
    ("SLACK_BOT_TOKEN", "xoxb-"),
    ("STRIPE_API_KEY", "sk_test_"),
    ("STRIPE_SECRET_KEY", "sk_test_"),
    ("AWS_ACCESS_KEY_ID", "AKIA"),
    ("AWS_SECRET_ACCESS_KEY", ""),
];

/// Characters after the prefix where a client checks the length.
const LENGTHS: &[(&str, usize)] = &[
    ("glpat-", 20),
    ("sk-ant-api03-", 95),
    ("sk-proj-", 48),
    ("github_pat_", 82),
    ("xoxb-", 50),
    ("xoxp-", 70),
    ("AKIA", 16),
    ("", 40),
];
const LENGTH: usize = 36;

/// Stands for a token of three parts that says of itself that it is unsigned and lasts until 2100.
pub const JWT: &str = "jwt";
const JWT_PARTS: &str =
    "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.eyJzdWIiOiJwbGFjZWhvbGRlciIsImV4cCI6NDEwMjQ0NDgwMH0.";

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// What the placeholder begins with: the shape that the policy names, or what clients expect in
/// that variable. It hangs on the policy alone, not on the stored value, so that it stays the same
/// when the value rotates.
pub(super) fn prefix<'a>(shape: Option<&'a str>, variable: Option<&str>) -> &'a str {
    let expected = || PREFIXES.iter().find(|(known, _)| variable == Some(known));
    shape.unwrap_or_else(|| expected().map_or(PREFIX, |(_, prefix)| prefix))
}

/// The placeholder with that prefix for 32 bytes that stand for lease and credential.
pub(super) fn shape(prefix: &str, bytes: &[u8; 32]) -> String {
    let length =
        LENGTHS.iter().find(|(known, _)| *known == prefix).map_or(LENGTH, |(_, length)| *length);
    let mut out = match prefix {
        JWT => format!("{JWT_PARTS}{MARK}"),
        prefix => format!("{prefix}{MARK}"),
    };
    // At least 8 characters follow the word: 47 bits, and whoever guesses a placeholder has not
    // got the lease that it works for. Beyond 32 the bytes repeat, which fills the length and adds
    // nothing.
    let characters = bytes.iter().cycle().map(|b| char::from(ALPHABET[usize::from(*b) % 62]));
    out.extend(characters.take(length - MARK.len()));
    out
}

/// Where in `text` the marks of placeholders begin.
pub fn marks(text: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let mut from = 0;
    std::iter::from_fn(move || {
        let at = from + position(&text[from..], MARK.as_bytes())?;
        from = at + MARK.len();
        Some(at)
    })
}

/// Where `placeholder` begins in `text`, if the mark at `mark` is that of one.
pub fn start_of(placeholder: &str, text: &[u8], mark: usize) -> Option<usize> {
    let start = mark.checked_sub(placeholder.find(MARK)?)?;
    text[start..].starts_with(placeholder.as_bytes()).then_some(start)
}

fn position(text: &[u8], word: &[u8]) -> Option<usize> {
    let (first, rest) = word.split_first()?;
    let mut from = 0;
    while let Some(at) = memchr::memchr(*first, &text[from..]) {
        if text[from + at + 1..].starts_with(rest) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_have_the_shape_that_clients_check() {
        let bytes = std::array::from_fn(|i| (i * 37) as u8);
        for (variable, length) in [
            (Some("GITHUB_TOKEN"), 40),
            (Some("GITLAB_TOKEN"), 26),
            (Some("ANTHROPIC_API_KEY"), 108),
            (Some("BILLING_TOKEN"), 40),
            (Some("AWS_ACCESS_KEY_ID"), 20),
            (Some("AWS_SECRET_ACCESS_KEY"), 40),
            (Some("SLACK_BOT_TOKEN"), 55),
            (None, 40),
        ] {
            let prefix = prefix(None, variable);
            let placeholder = shape(prefix, &bytes);
            assert!(placeholder.starts_with(prefix));
            assert_eq!(placeholder.len(), length, "{placeholder}");
            let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
            assert!(placeholder.bytes().all(legal));
            assert_eq!(marks(placeholder.as_bytes()).collect::<Vec<_>>(), [prefix.len()]);
        }
    }

    #[test]
    fn finds_placeholders_and_tells_its_own_from_others() {
        let (own, other) = (shape("pxd_", &[1; 32]), shape("pxd_", &[2; 32]));
        for (text, found) in [
            (String::new(), vec![]),
            ("PXDmark".into(), vec![]),
            ("PXPXDmark1".into(), vec![None]),
            (format!("Bearer {own}"), vec![Some(7)]),
            (format!("a={own}&b={other};"), vec![Some(2), None]),
            (format!("{own}{own}"), vec![Some(0), Some(own.len())]),
            (own[..own.len() - 1].to_owned(), vec![None]),
            (own[1..].to_owned(), vec![None]),
        ] {
            let starts: Vec<_> =
                marks(text.as_bytes()).map(|mark| start_of(&own, text.as_bytes(), mark)).collect();
            assert_eq!(starts, found, "{text}");
        }
    }
}

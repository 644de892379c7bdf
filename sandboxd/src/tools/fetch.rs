//! `web_fetch`: one page of the web, as text.
//!
//! Runs inside the cell like the file tools, so its requests go the way that a command's go: to
//! proxyd, under the environment's policy, in the audit with the call's id. What comes back is not
//! to be trusted: everything here is bounded in bytes, time and redirections.

mod html;
mod http;
mod url;

use std::time::Instant;

use base64::Engine;
use ipc::sandbox::Content;
use serde::{Deserialize, Serialize};

use self::http::Answer;
use self::url::Url;
use super::files::{Outcome, text};

/// Most text shown: as much as of a command's output.
const SHOWN_BYTES_MAX: usize = 100 * 1024;
/// Largest body that is read at all.
const BODY_BYTES_MAX: usize = 20 * 1024 * 1024;
/// Largest image: see `tools::read`.
const IMAGE_BYTES_MAX: usize = 5 * 1024 * 1024 / 4 * 3;
const REDIRECTIONS_MAX: u32 = 10;
/// How far into itself a document may say how it is written.
const DECLARED_WITHIN: usize = 1024;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub url: String,
}

pub fn perform(input: &Input, deadline: Instant) -> Outcome {
    let mut url = Url::parse(&input.url).map_err(|why| format!("{}: {why}", input.url))?;
    for _ in 0..=REDIRECTIONS_MAX {
        let fail = |why: String| format!("{url}: {why}");
        let answer = http::get(&url, BODY_BYTES_MAX, deadline).map_err(fail)?;
        match answer.redirection() {
            Some(place) => url = url.join(place).map_err(fail)?,
            None if answer.is_success() => {
                let moved = url != Url::parse(&input.url).unwrap_or_else(|_| url.clone());
                return show(&url, moved, &answer);
            }
            None => {
                let said = readable(&answer).map(|said| format!("\n{said}")).unwrap_or_default();
                return Err(format!("{url}: {} {}{said}", answer.status, answer.reason));
            }
        }
    }
    Err(format!("{}: more than {REDIRECTIONS_MAX} redirections", input.url))
}

fn show(url: &Url, moved: bool, answer: &Answer) -> Outcome {
    let kind = answer.media_type();
    let encode = |body: &[u8]| base64::engine::general_purpose::STANDARD.encode(body);
    let whole = |bytes_max: usize| match answer.cut || answer.body.len() > bytes_max {
        true => Err(format!("{url}: {kind} of more than {bytes_max} bytes is not shown")),
        false => Ok(encode(&answer.body)),
    };
    match kind.as_str() {
        "image/png" | "image/jpeg" | "image/gif" | "image/webp" => {
            let data = whole(IMAGE_BYTES_MAX)?;
            Ok(Content::Image { media_type: kind, data })
        }
        "application/pdf" => {
            Ok(Content::Document { data: whole(BODY_BYTES_MAX)?, media_type: kind })
        }
        _ => {
            let shown = readable(answer).ok_or_else(|| {
                format!("{url}: is {kind}, not text: a command in the sandbox can download it")
            })?;
            let from = if moved { format!("[from {url}]\n") } else { String::new() };
            Ok(text(format!("{from}{shown}")))
        }
    }
}

/// The body as text, if it is one, and no more of it than a model should read.
fn readable(answer: &Answer) -> Option<String> {
    let kind = answer.media_type();
    let is_html = matches!(kind.as_str(), "text/html" | "application/xhtml+xml");
    let is_text = kind.starts_with("text/")
        || ["json", "xml", "javascript", "yaml", "toml"].iter().any(|part| kind.contains(part))
        || kind == "application/x-www-form-urlencoded"
        || (kind.is_empty() && std::str::from_utf8(&answer.body).is_ok());
    if !is_html && !is_text {
        return None;
    }
    let whole = decode(&answer.body, answer.charset().as_deref());
    let mut shown = if is_html { html::to_text(&whole) } else { whole };
    let bytes = shown.len();
    let end = shown.floor_char_boundary(SHOWN_BYTES_MAX);
    shown.truncate(end);
    let odd = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    let mut shown: String =
        shown.replace("\r\n", "\n").chars().map(|c| if odd(c) { '\u{fffd}' } else { c }).collect();
    if end < bytes || answer.cut {
        shown.push_str(&format!("\n[content truncated: {end} of {bytes} bytes shown"));
        shown.push_str(if answer.cut { "; the answer was longer still]" } else { "]" });
    }
    Some(shown)
}

/// By its byte order mark, else by what the server says, else by what the page says of itself.
fn decode(body: &[u8], charset: Option<&str>) -> String {
    let named = charset.map(str::as_bytes).or_else(|| named_within(body));
    let encoding = named.and_then(encoding_rs::Encoding::for_label);
    encoding.unwrap_or(encoding_rs::UTF_8).decode(body).0.into_owned()
}

/// The charset in a `<meta>` or in the declaration of an XML document.
fn named_within(body: &[u8]) -> Option<&[u8]> {
    let begin = &body[..body.len().min(DECLARED_WITHIN)];
    let named = ["charset=", "encoding="].iter().find_map(|name| {
        let at = begin.windows(name.len()).position(|w| w.eq_ignore_ascii_case(name.as_bytes()))?;
        Some(&begin[at + name.len()..])
    })?;
    let named = named.strip_prefix(b"\"").or(named.strip_prefix(b"'")).unwrap_or(named);
    let legal = |b: &u8| b.is_ascii_alphanumeric() || b"-_:.+".contains(b);
    Some(&named[..named.iter().position(|b| !legal(b)).unwrap_or(named.len())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: &str, body: &[u8]) -> Answer {
        Answer {
            status: 200,
            reason: "OK".into(),
            fields: vec![("content-type".into(), kind.into())],
            body: body.to_vec(),
            cut: false,
        }
    }

    #[test]
    fn texts_are_shown_by_their_charset_and_what_is_none_is_not() {
        let table: [(&str, &[u8], Option<&str>); 11] = [
            ("text/plain; charset=\"ISO-8859-1\"", b"caf\xe9", Some("caf\u{e9}")),
            ("text/plain", b"\xef\xbb\xbfcaf\xc3\xa9\r\n\x07", Some("caf\u{e9}\n\u{fffd}")),
            ("application/ld+json", b"{}", Some("{}")),
            ("text/html;charset=utf-8", b"<p>a<p>b", Some("a\n\nb")),
            ("text/plain;charset=utf-16le", b"a\0b\0", Some("ab")),
            ("text/plain;charset=windows-1251", b"\xe4\xe0", Some("\u{434}\u{430}")),
            ("text/html", b"<meta charset=Shift_JIS>\x93\xfa", Some("\u{65e5}")),
            ("text/xml", b"<?xml encoding='latin1'?>\xe9", Some("<?xml encoding='latin1'?>\u{e9}")),
            ("text/plain; charset=none", b"\xff", Some("\u{fffd}")),
            ("application/octet-stream", b"\0\x01", None),
            ("", b"plain", Some("plain")),
        ];
        for (kind, body, expected) in table {
            let shown = readable(&answer(kind, body));

            assert_eq!(shown.as_deref(), expected, "{kind}");
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters_and_says_so() {
        let body = "\u{e9}".repeat(SHOWN_BYTES_MAX);

        let shown = readable(&answer("text/plain", body.as_bytes())).unwrap();

        let (text, note) = shown.rsplit_once('\n').unwrap();
        assert_eq!(text.len(), SHOWN_BYTES_MAX);
        assert_eq!(note, "[content truncated: 102400 of 204800 bytes shown]");
        let cut = Answer { cut: true, ..answer("text/plain", b"abc") };
        let note = "[content truncated: 3 of 3 bytes shown; the answer was longer still]";
        assert_eq!(readable(&cut), Some(format!("abc\n{note}")));
    }
}

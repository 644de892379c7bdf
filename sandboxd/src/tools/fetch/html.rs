//! HTML to text that a model can read: headings, paragraphs, lists, links; no scripts, no styles.
//!
//! No parser of the standard's: one pass over tags and texts that never looks back, so that any
//! bytes give some text in time and memory that grow with their number only.

/// Elements whose content is not text for a reader.
const HIDDEN: &[&str] =
    &["script", "style", "noscript", "template", "svg", "iframe", "object", "canvas"];
/// Elements that stand by themselves.
const BLOCKS: &[&str] = &[
    "address",
    "article",
    "aside",
    "blockquote",
    "dd",
    "details",
    "div",
    "dl",
    "dt",
    "fieldset",
    "figcaption",
    "figure",
    "footer",
    "form",
    "header",
    "hr",
    "main",
    "nav",
    "ol",
    "p",
    "pre",
    "section",
    "summary",
    "table",
    "ul",
];
/// Longest reference of a character that is looked for.
const ENTITY_BYTES_MAX: usize = 32;

/// What is being written.
#[derive(Default)]
struct Text {
    out: String,
    /// Newlines due before the next text.
    breaks: usize,
    /// A space is due.
    space: bool,
    preformatted: usize,
    /// Where the open link leads.
    link: Option<String>,
}

/// The text of a page.
pub fn to_text(html: &str) -> String {
    let mut text = Text::default();
    let mut rest = html;
    while let Some(start) = rest.find('<') {
        text.words(&rest[..start]);
        rest = &rest[start..];
        let Some((tag, after)) = tag_in(rest) else {
            text.words("<");
            rest = &rest[1..];
            continue;
        };
        rest = after;
        let Some(tag) = tag else { continue };
        let (name, closes) = name_of(tag);
        if !closes && name == "title" {
            let (title, after) = until_end(rest, "title");
            text.block(1);
            text.words(title);
            text.block(2);
            rest = after;
        } else if !closes && HIDDEN.contains(&name.as_str()) && !ends_itself(tag) {
            rest = until_end(rest, &name).1;
        } else {
            text.tag(&name, closes, tag);
        }
    }
    text.words(rest);
    text.out
}

impl Text {
    fn tag(&mut self, name: &str, closes: bool, tag: &str) {
        match (name, closes) {
            ("br", _) => self.breaks = (self.breaks + 1).min(2),
            ("pre", false) => {
                self.block(2);
                self.preformatted += 1;
            }
            ("pre", true) => {
                self.preformatted = self.preformatted.saturating_sub(1);
                self.block(2);
            }
            ("li", false) => {
                self.block(1);
                self.raw("- ");
            }
            ("li" | "tr", _) => self.block(1),
            ("td" | "th", true) => self.raw("\t"),
            ("a", false) => {
                self.link = attribute(tag, "href").filter(|place| {
                    !place.is_empty()
                        && !place.starts_with('#')
                        && !place.starts_with("javascript:")
                });
            }
            ("a", true) => {
                if let Some(place) = self.link.take() {
                    self.space = false;
                    self.raw(&format!(" ({place})"));
                }
            }
            ("img", false) => {
                if let Some(words) = attribute(tag, "alt").filter(|words| !words.is_empty()) {
                    self.words(&format!("[image: {words}]"));
                }
            }
            ("h1" | "h2" | "h3" | "h4" | "h5" | "h6", false) => {
                self.block(2);
                let level = usize::from(name.as_bytes()[1] - b'0');
                self.raw(&format!("{} ", "#".repeat(level)));
            }
            ("h1" | "h2" | "h3" | "h4" | "h5" | "h6", true) => self.block(2),
            (name, _) if BLOCKS.contains(&name) => {
                self.block(if name == "p" { 2 } else { 1 });
            }
            _ => {}
        }
    }

    /// At least so many newlines before what follows.
    fn block(&mut self, breaks: usize) {
        self.breaks = self.breaks.max(breaks);
    }

    fn due(&mut self) {
        if self.out.is_empty() {
            self.breaks = 0;
        }
        if self.breaks > 0 {
            let kept = self.out.trim_end_matches([' ', '\t']).len();
            self.out.truncate(kept);
            // No more of them than are due: a page may have put millions there.
            let last = self.out.bytes().rev().take(self.breaks);
            let there = last.take_while(|byte| *byte == b'\n').count();
            self.out.extend(std::iter::repeat_n('\n', self.breaks - there));
        } else if self.space && !self.out.ends_with([' ', '\n', '\t']) && !self.out.is_empty() {
            self.out.push(' ');
        }
        (self.breaks, self.space) = (0, false);
    }

    fn raw(&mut self, text: &str) {
        self.due();
        self.out.push_str(text);
    }

    /// Text as it stands between tags.
    fn words(&mut self, text: &str) {
        let text = decoded(text);
        if self.preformatted > 0 {
            if !text.is_empty() {
                self.raw(&text);
            }
            return;
        }
        let blank = |c: char| c.is_whitespace() && c != '\u{a0}';
        self.space |= text.starts_with(blank);
        for word in text.split(blank).filter(|word| !word.is_empty()) {
            self.raw(word);
            self.space = true;
        }
        self.space =
            if text.trim_matches(blank).is_empty() { self.space } else { text.ends_with(blank) };
    }
}

/// The tag that a text begins with (none for a comment and the like) and what follows; nothing
/// where the `<` begins no tag.
fn tag_in(text: &str) -> Option<(Option<&str>, &str)> {
    if let Some(comment) = text.strip_prefix("<!--") {
        let end = comment.find("-->").map_or(comment.len(), |at| at + 3);
        return Some((None, &comment[end..]));
    }
    let inside = &text[1..];
    if inside.starts_with(['!', '?']) {
        let end = inside.find('>').map_or(inside.len(), |at| at + 1);
        return Some((None, &inside[end..]));
    }
    if !inside.trim_start_matches('/').starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    let mut quote = None;
    for (at, byte) in inside.bytes().enumerate() {
        match (quote, byte) {
            (None, b'>') => return Some((Some(&inside[..at]), &inside[at + 1..])),
            (None, b'"' | b'\'') => quote = Some(byte),
            (Some(open), byte) if open == byte => quote = None,
            _ => {}
        }
    }
    // A tag without an end: what follows cannot be told from it.
    Some((None, ""))
}

/// In lower case, and whether it is an end tag.
fn name_of(tag: &str) -> (String, bool) {
    let closes = tag.starts_with('/');
    let name = tag.trim_start_matches('/');
    let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(name.len());
    (name[..end].to_ascii_lowercase(), closes)
}

/// Whether a start tag is its own end. A slash behind a value without quotes belongs to the value.
fn ends_itself(tag: &str) -> bool {
    let before = tag.strip_suffix('/').and_then(|before| before.chars().next_back());
    before.is_some_and(|c| c.is_ascii_whitespace() || c == '"' || c == '\'')
        || tag.strip_suffix('/').is_some_and(|before| name_of(tag).0.len() == before.len())
}

/// What stands before the end tag of that name, and what stands after it.
fn until_end<'a>(text: &'a str, name: &str) -> (&'a str, &'a str) {
    let mut from = 0;
    while let Some(at) = text[from..].find("</").map(|at| from + at) {
        let tag = &text[at + 2..];
        let named = tag.get(..name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(name));
        if named {
            let end = tag.find('>').map_or(text.len(), |end| at + 2 + end + 1);
            return (&text[..at], &text[end..]);
        }
        from = at + 2;
    }
    (text, "")
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    let mut rest = tag.split_once(|c: char| c.is_ascii_whitespace())?.1;
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_ascii_whitespace() || c == '/');
        if rest.is_empty() {
            return None;
        }
        let end = rest.find(|c: char| c.is_ascii_whitespace() || c == '=').unwrap_or(rest.len());
        let (found, after) = rest.split_at(end.max(1).min(rest.len()));
        let after = after.trim_start();
        let (value, after) = match after.strip_prefix('=') {
            Some(value) => value_in(value.trim_start()),
            None => ("", after),
        };
        if found.eq_ignore_ascii_case(name) {
            return Some(decoded(value).trim().to_owned());
        }
        rest = after;
    }
}

fn value_in(text: &str) -> (&str, &str) {
    for quote in ['"', '\''] {
        if let Some(inside) = text.strip_prefix(quote) {
            return inside.split_once(quote).unwrap_or((inside, ""));
        }
    }
    text.split_at(text.find(|c: char| c.is_ascii_whitespace()).unwrap_or(text.len()))
}

/// With the references of characters replaced.
fn decoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('&') {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = rest.bytes().take(ENTITY_BYTES_MAX).position(|byte| byte == b';');
        match end.and_then(|end| Some((character(&rest[1..end])?, end))) {
            Some((character, end)) => {
                out.push(character);
                rest = &rest[end + 1..];
            }
            None => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

fn character(name: &str) -> Option<char> {
    if let Some(number) = name.strip_prefix('#') {
        let code = match number.strip_prefix(['x', 'X']) {
            Some(digits) => u32::from_str_radix(digits, 16).ok()?,
            None => number.parse().ok()?,
        };
        return char::from_u32(code);
    }
    Some(match name {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        "nbsp" => '\u{a0}',
        "copy" => '\u{a9}',
        "reg" => '\u{ae}',
        "mdash" => '\u{2014}',
        "ndash" => '\u{2013}',
        "hellip" => '\u{2026}',
        "laquo" => '\u{ab}',
        "raquo" => '\u{bb}',
        "ldquo" => '\u{201c}',
        "rdquo" => '\u{201d}',
        "lsquo" => '\u{2018}',
        "rsquo" => '\u{2019}',
        "bull" => '\u{2022}',
        "middot" => '\u{b7}',
        "times" => '\u{d7}',
        "deg" => '\u{b0}',
        "euro" => '\u{20ac}',
        "rarr" => '\u{2192}',
        "larr" => '\u{2190}',
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_reader_sees_is_the_text() {
        let table = [
            ("<p>one\n  two</p><p>three", "one two\n\nthree"),
            ("<html><head><title>T &amp; U</title><style>p{}</style></head>x", "T & U\n\nx"),
            ("a<script>if (1 < 2) { x('</p>') }</script>b", "ab"),
            ("a<script src=\"x\"/>b<svg />c<iframe/>d", "abcd"),
            ("a<script src=/x/>no</script>b", "ab"),
            ("<h2>Head</h2><ul><li>a</li><li>b<br>c</li></ul>", "## Head\n\n- a\n- b\nc"),
            ("see <a href='/x?a=1&amp;b=2'>this</a>.", "see this (/x?a=1&b=2)."),
            ("<pre>  a\n   b</pre>c", "  a\n   b\n\nc"),
            ("1 < 2 && 3 > 2 &#x263a; &#9786; &nope;", "1 < 2 && 3 > 2 \u{263a} \u{263a} &nope;"),
            (
                "<table><tr><th>k</th><th>v</th></tr><tr><td>a</td><td>1</td></tr></table>",
                "k\tv\na\t1\t",
            ),
            ("<!-- <p>no --><b>b</b><i>i</i> <img alt=\"a cat\" src=x>", "bi [image: a cat]"),
            ("<a title='>' href=y>z</a>", "z (y)"),
        ];
        for (html, expected) in table {
            assert_eq!(to_text(html), expected, "{html}");
        }
    }

    #[test]
    fn any_order_of_pieces_gives_some_text() {
        let pieces = [
            "<", ">", "/", "</", "<!--", "-->", "<!", "&", "&#", ";", "=", "\"", "'", "a", " ",
            "\n", "\u{e9}", "\u{65e5}", "title", "pre", "script", "href", "<a href=", "<li>",
            "<td>", "#x41",
        ];
        let mut state = 1_u64;
        for _ in 0..20_000 {
            let mut html = String::new();
            for _ in 0..24 {
                // Knuth's generator: the same pages in every run.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                html.push_str(pieces[(state >> 33) as usize % pieces.len()]);
            }
            let text = to_text(&html);

            assert!(text.len() <= 4 * html.len(), "{html:?} gave {text:?}");
        }
    }

    #[test]
    fn broken_pages_give_some_text_and_end() {
        for html in [
            "<",
            "<a",
            "</",
            "<a href=",
            "<script>",
            "<!--",
            "&",
            "&#xffffffff;",
            "<p =>x",
            "<\u{e9}>",
            "<title>",
            "</\u{e9}title",
            "<a \u{e9}='",
        ] {
            to_text(html);
        }
        let deep = "<div>".repeat(100_000) + "x";
        let high = "<pre>".to_owned() + &"\n<p>".repeat(1_000_000) + "x";

        assert_eq!(to_text(&deep), "x");
        assert_eq!(to_text(&high).trim_start(), "x");
    }
}

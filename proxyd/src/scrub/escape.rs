//! Undoes escapes, so that a text can be searched as its reader will see it.
//!
//! What an escape stands for may be the beginning of another, of its own kind or not: `%2541`,
//! `\u0026#65;`. Both are undone, so many times over.

use zeroize::Zeroizing;

/// No escape, with all its repetitions, is longer.
pub(super) const ESCAPE_BYTES_MAX: usize = 64;
/// How many times over an escape may be escaped by its own kind.
const NESTED_MAX: usize = 3;
/// And how many times by another.
const LAYERS_MAX: usize = 3;
/// Backslashes of a JSON string in a string in a string.
const BACKSLASHES_MAX: usize = 7;
/// Longest name or number of an HTML entity, with its semicolon.
const ENTITY_BYTES_MAX: usize = 12;
/// Characters of an escape that is itself escaped.
const INNER_MAX: usize = 16;

/// How a text is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// `%41`, `%u0041`, `\u0041`, `\u{41}`, `\x41`, `\101`, `\/`, `&#65;`, `&#x41`, `&plus;`.
    Escaped,
    /// The same and quoted-printable (RFC 2045 section 6.7): `=41`, `=` before an end of a line.
    /// Not for every text: in most, the sign stands before a value.
    Quoted,
}

/// The bytes of one character, or one byte of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    bytes: [u8; 4],
    count: u8,
}

/// What stands at the beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// An escape of so many bytes.
    Stands(Written, usize),
    /// No escape.
    Plain,
    /// What follows decides.
    More,
}

impl Written {
    pub(super) fn byte(byte: u8) -> Self {
        Self { bytes: [byte, 0, 0, 0], count: 1 }
    }

    /// None for what is no character, as half of a surrogate pair.
    fn character(number: u32) -> Option<Self> {
        let mut bytes = [0; 4];
        let count = char::from_u32(number)?.encode_utf8(&mut bytes).len();
        Some(Self { bytes, count: u8::try_from(count).ok()? })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.count)]
    }
}

impl Reading {
    /// Whether an escape can begin with `byte`.
    pub(super) fn escapes_with(self, byte: u8) -> bool {
        matches!(byte, b'%' | b'\\' | b'&') || self == Self::Quoted && byte == b'='
    }

    /// The unit at the beginning of `text`, whose first byte an escape can begin with. Never more
    /// when there are [`ESCAPE_BYTES_MAX`] bytes.
    pub(super) fn unit(self, text: &[u8]) -> Unit {
        let seen = &text[..text.len().min(ESCAPE_BYTES_MAX)];
        match self.layered(seen, LAYERS_MAX) {
            Unit::More if seen.len() == ESCAPE_BYTES_MAX => Unit::Plain,
            unit => unit,
        }
    }

    /// The whole of a text that ends, without what stands for nothing; `None` where it is the text
    /// itself.
    pub(super) fn of(self, text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        if !text.iter().any(|byte| self.escapes_with(*byte) || is_gap(*byte)) {
            return None;
        }
        // No unit is shorter than what it stands for.
        let mut read = Zeroizing::new(Vec::with_capacity(text.len()));
        let mut rest = text;
        while let Some(first) = rest.first() {
            let (written, length) = match self.escapes_with(*first) {
                true => match self.unit(rest) {
                    Unit::Stands(written, length) => (written, length),
                    Unit::Plain | Unit::More => (Written::byte(*first), 1),
                },
                false => (Written::byte(*first), 1),
            };
            read.extend(written.bytes().iter().filter(|byte| !is_gap(**byte)));
            rest = &rest[length..];
        }
        Some(read)
    }

    fn once(self, text: &[u8]) -> Unit {
        match text[0] {
            b'%' => percent(text),
            b'\\' => backslash(text),
            b'&' => entity(text),
            b'=' if self == Self::Quoted => quoted(text),
            _ => Unit::Plain,
        }
    }

    fn layered(self, text: &[u8], layers: usize) -> Unit {
        let unit = self.once(text);
        match unit {
            Unit::Stands(Written { bytes: [first, ..], count: 1 }, _)
                if layers > 0 && Self::Escaped.escapes_with(first) =>
            {
                self.inner(text, unit, layers)
            }
            unit => unit,
        }
    }

    /// The unit whose first character `outer` stands for, if that begins another escape.
    #[cold]
    fn inner(self, text: &[u8], outer: Unit, layers: usize) -> Unit {
        let (mut inner, mut ends, mut at) = ([0u8; INNER_MAX], [0u8; INNER_MAX], 0);
        for count in 0..INNER_MAX {
            let more = || if text.len() < ESCAPE_BYTES_MAX { Unit::More } else { outer };
            if at == text.len() {
                return more();
            }
            let (byte, length) = match self.once(&text[at..]) {
                Unit::Stands(Written { bytes: [byte, ..], count: 1 }, length) => (byte, length),
                Unit::Stands(..) | Unit::Plain => (text[at], 1),
                Unit::More => return more(),
            };
            at += length;
            (inner[count], ends[count]) = (byte, at.to_le_bytes()[0]);
            match self.layered(&inner[..=count], layers - 1) {
                Unit::Stands(written, length) => {
                    return Unit::Stands(written, usize::from(ends[length - 1]));
                }
                Unit::Plain => return outer,
                Unit::More => {}
            }
        }
        outer
    }
}

/// Whether a byte stands for nothing where a value is wrapped, or written in pairs or in UTF-16:
/// ends of lines, blanks, colons, zeros.
pub(super) fn is_gap(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t' | b':' | 0)
}

/// The number of exactly that many hex digits, and whether there are enough of them.
fn hex(text: &[u8], digits: usize, before: usize) -> Result<u32, Unit> {
    let known = &text[before.min(text.len())..text.len().min(before + digits)];
    if !known.iter().all(u8::is_ascii_hexdigit) {
        return Err(Unit::Plain);
    }
    if known.len() < digits {
        return Err(Unit::More);
    }
    Ok(value(known, 16))
}

fn value(digits: &[u8], base: u32) -> u32 {
    let digit = |digit: &u8| char::from(*digit).to_digit(base).unwrap_or_default();
    digits.iter().fold(0u32, |sum, next| sum.saturating_mul(base).saturating_add(digit(next)))
}

/// A byte by two digits.
fn byte(text: &[u8], before: usize) -> Unit {
    let digit = |at: usize| text.get(at).map(|digit| nibble(*digit));
    match (digit(before), digit(before + 1)) {
        (None, _) | (Some(Some(_)), None) => Unit::More,
        (Some(Some(high)), Some(Some(low))) => {
            Unit::Stands(Written::byte(high << 4 | low), before + 2)
        }
        _ => Unit::Plain,
    }
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// A character by so many digits.
fn character(text: &[u8], digits: usize, before: usize) -> Unit {
    match hex(text, digits, before) {
        Ok(number) => match Written::character(number) {
            Some(written) => Unit::Stands(written, before + digits),
            None => Unit::Plain,
        },
        Err(unit) => unit,
    }
}

fn percent(text: &[u8]) -> Unit {
    let mut at = 1;
    while at <= 2 * NESTED_MAX && matches!(text[at..], [b'2', b'5', ..]) {
        at += 2;
    }
    let unit = match text.get(at) {
        Some(b'u') => character(text, 4, at + 1),
        _ => byte(text, at),
    };
    match unit {
        Unit::Plain if at > 1 => Unit::Stands(Written::byte(b'%'), at),
        unit => unit,
    }
}

fn backslash(text: &[u8]) -> Unit {
    let run = text.iter().take_while(|byte| **byte == b'\\').count();
    if run > BACKSLASHES_MAX {
        return Unit::Plain;
    }
    let Some(letter) = text.get(run) else { return Unit::More };
    let one = |byte| Unit::Stands(Written::byte(byte), run + 1);
    let unit = match letter {
        b'u' if text.get(run + 1).is_none_or(|next| *next == b'{') => braced(text, run + 2),
        b'u' => character(text, 4, run + 1),
        b'U' => character(text, 8, run + 1),
        b'x' => byte(text, run + 1),
        b'n' => one(b'\n'),
        b'r' => one(b'\r'),
        b't' => one(b'\t'),
        b'b' => one(8),
        b'f' => one(12),
        b'0'..=b'3' => octal(text, run),
        b'\n' | b'\r' => one(*letter),
        letter if letter.is_ascii_punctuation() => one(*letter),
        _ => Unit::Plain,
    };
    match unit {
        Unit::Plain if run > 1 => Unit::Stands(Written::byte(b'\\'), run),
        unit => unit,
    }
}

/// `{41}`, from after the brace.
fn braced(text: &[u8], before: usize) -> Unit {
    let rest = text.get(before..).unwrap_or_default();
    let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    match rest.get(digits) {
        None if digits <= 6 => Unit::More,
        Some(b'}') if (1..=6).contains(&digits) => character(text, digits, before).longer(),
        _ => Unit::Plain,
    }
}

fn octal(text: &[u8], before: usize) -> Unit {
    let known = &text[before..text.len().min(before + 3)];
    if !known.iter().all(|byte| matches!(byte, b'0'..=b'7')) {
        return Unit::Plain;
    }
    match known.len() {
        3 => Unit::Stands(Written::byte(value(known, 8).to_le_bytes()[0]), before + 3),
        _ => Unit::More,
    }
}

fn quoted(text: &[u8]) -> Unit {
    let end = |length| Unit::Stands(Written::byte(b'\n'), length);
    match text {
        [_, b'\n', ..] => end(2),
        [_, b'\r', b'\n', ..] => end(3),
        [_, b'\r'] => Unit::More,
        _ => match byte(text, 1) {
            // What encoders escape is seldom that, and a number after the sign often.
            Unit::Stands(Written { bytes: [0..=8 | 11 | 12 | 14..=31, ..], .. }, _) => Unit::Plain,
            unit => unit,
        },
    }
}

fn entity(text: &[u8]) -> Unit {
    let mut at = 1;
    for _ in 0..NESTED_MAX {
        match text[at..] {
            [b'a', b'm', b'p', b';', ..] => at += 4,
            [] | [b'a'] | [b'a', b'm'] | [b'a', b'm', b'p'] => return Unit::More,
            _ => break,
        }
    }
    let rest = &text[at..];
    let unit = match rest.first() {
        Some(b'#') => numbered(rest, at),
        _ => {
            let seen = &rest[..rest.len().min(ENTITY_BYTES_MAX)];
            let letters = seen.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count();
            match seen.get(letters) {
                Some(b';') => named(&seen[..letters]).map_or(Unit::Plain, |byte| {
                    Unit::Stands(Written::byte(byte), at + letters + 1)
                }),
                None if seen.len() < ENTITY_BYTES_MAX => Unit::More,
                _ => Unit::Plain,
            }
        }
    };
    match unit {
        Unit::Plain if at > 1 => Unit::Stands(Written::byte(b'&'), at),
        unit => unit,
    }
}

/// `#65;` or `#x41;`, `at` bytes into the entity. Readers do without the semicolon.
fn numbered(rest: &[u8], at: usize) -> Unit {
    let (from, base) = match rest.get(1) {
        None => return Unit::More,
        Some(b'x' | b'X') => (2, 16),
        Some(_) => (1, 10),
    };
    let seen = &rest[from..rest.len().min(ENTITY_BYTES_MAX)];
    let is_digit = |byte: &&u8| char::from(**byte).is_digit(base);
    let digits = seen.iter().take_while(is_digit).count();
    let after = match seen.get(digits) {
        Some(b';') => 1,
        Some(_) => 0,
        None if rest.len() < ENTITY_BYTES_MAX => return Unit::More,
        None => return Unit::Plain,
    };
    match Written::character(value(&seen[..digits], base)) {
        Some(written) if digits > 0 => Unit::Stands(written, at + from + digits + after),
        _ => Unit::Plain,
    }
}

impl Unit {
    /// With its closing brace.
    fn longer(self) -> Self {
        match self {
            Self::Stands(written, length) => Self::Stands(written, length + 1),
            unit => unit,
        }
    }
}

/// The ASCII character that an entity stands for.
fn named(name: &[u8]) -> Option<u8> {
    let byte = match name {
        b"amp" => b'&',
        b"lt" => b'<',
        b"gt" => b'>',
        b"quot" => b'"',
        b"apos" => b'\'',
        b"plus" => b'+',
        b"equals" => b'=',
        b"sol" => b'/',
        b"bsol" => b'\\',
        b"colon" => b':',
        b"semi" => b';',
        b"comma" => b',',
        b"period" => b'.',
        b"lowbar" => b'_',
        b"commat" => b'@',
        b"num" => b'#',
        b"dollar" => b'$',
        b"percnt" => b'%',
        b"ast" => b'*',
        b"excl" => b'!',
        b"quest" => b'?',
        b"lpar" => b'(',
        b"rpar" => b')',
        b"lsqb" | b"lbrack" => b'[',
        b"rsqb" | b"rbrack" => b']',
        b"lcub" | b"lbrace" => b'{',
        b"rcub" | b"rbrace" => b'}',
        b"Hat" => b'^',
        b"grave" => b'`',
        b"vert" | b"verbar" => b'|',
        b"Tab" => b'\t',
        b"NewLine" => b'\n',
        _ => return None,
    };
    Some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stands(text: &str, reading: Reading, written: &str) {
        let mut bytes = [0; 4];
        bytes[..written.len()].copy_from_slice(written.as_bytes());
        let count = u8::try_from(written.len()).unwrap();
        let whole = Unit::Stands(Written { bytes, count }, text.len());
        // What follows does not matter.
        for after in ["~", "~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~"] {
            assert_eq!(reading.unit(format!("{text}{after}").as_bytes()), whole, "{text}");
        }
        for cut in 1..text.len() {
            assert_eq!(reading.unit(&text.as_bytes()[..cut]), Unit::More, "{text} to {cut}");
        }
    }

    #[test]
    fn escapes_are_undone_however_often_they_were_escaped() {
        for (text, written) in [
            ("%2b", "+"),
            ("%2B", "+"),
            ("%25252B", "+"),
            ("%u002b", "+"),
            ("\\u002b", "+"),
            ("\\u{2b}", "+"),
            ("\\U0000002b", "+"),
            ("\\053", "+"),
            ("\\\\\\\\u002B", "+"),
            ("\\x2b", "+"),
            ("\\/", "/"),
            ("\\u00fc", "ü"),
            ("&#43;", "+"),
            ("&#x3D;", "="),
            ("&#0061;", "="),
            ("&#252;", "ü"),
            ("&amp;plus;", "+"),
            // One kind inside another.
            ("%26%2343%3B", "+"),
            ("\\u0026#43;", "+"),
            ("\\u0026amp;#43;", "+"),
            ("&#37;2b", "+"),
            ("&bsol;u002b", "+"),
            ("%5Cu002b", "+"),
            ("\\u00252b", "+"),
            ("%5Cu0026#x2b;", "+"),
        ] {
            stands(text, Reading::Escaped, written);
            stands(text, Reading::Quoted, written);
        }
        for (text, written) in [("=2B", "+"), ("=\n", "\n"), ("=\r\n", "\n"), ("=2541", "%41")] {
            if written.len() == 1 {
                stands(text, Reading::Quoted, written);
            }
            assert_eq!(Reading::Escaped.unit(text.as_bytes()), Unit::Plain, "{text}");
        }
        let unclosed = Unit::Stands(Written::byte(b'+'), 4);
        assert_eq!(Reading::Escaped.unit(b"&#43,"), unclosed);
    }

    #[test]
    fn what_is_no_escape_stays_and_no_escape_is_longer_than_its_bound() {
        for reading in [Reading::Escaped, Reading::Quoted] {
            for rest in
                ["zz", "", "%%", "&&", "\\", "#", "#xx;", "u12", "amp;", "25", "1", "n", "u{"]
            {
                for first in ["%", "\\", "&", "=", "%5c", "&#37;"] {
                    let text = format!("{first}{}", rest.repeat(70)).into_bytes();
                    let long = text.len() >= ESCAPE_BYTES_MAX;
                    if reading.escapes_with(text[0]) {
                        assert!(!long || reading.unit(&text) != Unit::More, "{reading:?} {rest}");
                    }
                }
            }
        }
    }

    #[test]
    fn more_text_never_changes_what_was_decided() {
        let parts =
            ["%", "25", "41", "\\", "u0041", "&", "amp;", "#65;", "=", "\n", "x", "%5c", "7"];
        for a in parts {
            for b in parts {
                for c in parts {
                    for d in parts {
                        let text = [a, b, c, d, "~~~~"].concat().into_bytes();
                        for reading in [Reading::Escaped, Reading::Quoted] {
                            if !reading.escapes_with(text[0]) {
                                continue;
                            }
                            let whole = reading.unit(&text);
                            for cut in 1..text.len() {
                                let part = reading.unit(&text[..cut]);
                                assert!(part == Unit::More || part == whole, "{text:?} to {cut}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_text_is_read_without_its_escapes_and_gaps() {
        let read = |text: &str| {
            let read = Reading::Escaped.of(text.as_bytes());
            read.map(|read| String::from_utf8(read.to_vec()).unwrap())
        };
        assert_eq!(read("plain-token"), None);
        assert_eq!(read("a b:c%41\\u0042&#67;\\n&d%"), Some("abcABC&d%".into()));
    }
}

//! Undoes one escape at a time, so that a text can be searched as its reader will see it.

/// No escape, with all its repetitions, is longer.
pub(super) const ESCAPE_BYTES_MAX: usize = 32;
/// How many times over an escape may itself be escaped.
const NESTED_MAX: usize = 3;
/// Backslashes of a JSON string in a string in a string.
const BACKSLASHES_MAX: usize = 7;
/// Longest name or number of an HTML entity, with its semicolon.
const ENTITY_BYTES_MAX: usize = 12;

/// What a text is freed of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Escape {
    /// `%41`, `%2541`, `%u0041`.
    Percent,
    /// `\u0041`, `\x41`, `\/`, `\\u0041`.
    Backslash,
    /// `&#65;`, `&#x41;`, `&plus;`, `&amp;#65;`.
    Entity,
    /// Ends of lines, blanks and colons, also as `\n`: wrapped base64, hex in pairs.
    Wrapping,
    /// The zero bytes between the characters of UTF-16.
    Wide,
}

/// What stands at the beginning of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// An escape of so many bytes.
    Byte(u8, usize),
    /// So many bytes that stand for nothing; whether they end a line.
    Gap(usize, bool),
    /// No escape.
    Plain,
    /// What follows decides.
    More,
}

impl Escape {
    pub(super) const ALL: [Self; 5] =
        [Self::Percent, Self::Backslash, Self::Entity, Self::Wrapping, Self::Wide];

    /// Whether an escape can begin with `byte`.
    pub(super) fn begins_with(self, byte: u8) -> bool {
        match self {
            Self::Percent => byte == b'%',
            Self::Backslash => byte == b'\\',
            Self::Entity => byte == b'&',
            Self::Wrapping => matches!(byte, b'\n' | b'\r' | b'\t' | b' ' | b':' | b'\\'),
            Self::Wide => byte == 0,
        }
    }

    /// Whether an escape may begin somewhere in `text`.
    pub(super) fn is_in(self, text: &[u8]) -> bool {
        match self {
            Self::Percent => text.contains(&b'%'),
            Self::Backslash => text.contains(&b'\\'),
            Self::Entity => text.contains(&b'&'),
            Self::Wide => text.contains(&0),
            Self::Wrapping => text.iter().any(|byte| self.begins_with(*byte)),
        }
    }

    /// Whether bytes are left out rather than replaced.
    pub(super) fn leaves_out(self) -> bool {
        matches!(self, Self::Wrapping | Self::Wide)
    }

    /// The unit at the beginning of `text`, whose first byte an escape begins with.
    pub(super) fn unit(self, text: &[u8]) -> Unit {
        match self {
            Self::Percent => percent(text),
            Self::Backslash => backslash(text),
            Self::Entity => entity(text),
            Self::Wrapping => match text[0] {
                b'\\' => escaped_gap(text),
                byte => Unit::Gap(1, byte == b'\n'),
            },
            Self::Wide => Unit::Gap(1, false),
        }
    }
}

/// The character of exactly that many hex digits. What is beyond ASCII is left alone.
fn number(text: &[u8], digits: usize, before: usize) -> Unit {
    let known = &text[before.min(text.len())..text.len().min(before + digits)];
    if !known.iter().all(u8::is_ascii_hexdigit) {
        return Unit::Plain;
    }
    if known.len() < digits {
        return Unit::More;
    }
    let value = known
        .iter()
        .fold(0, |sum, digit| sum * 16 + char::from(*digit).to_digit(16).unwrap_or_default());
    match u8::try_from(value) {
        Ok(byte) => Unit::Byte(byte, before + digits),
        Err(_) => Unit::Plain,
    }
}

fn percent(text: &[u8]) -> Unit {
    let mut at = 1;
    while at <= 2 * NESTED_MAX && text[at..].starts_with(b"25") {
        at += 2;
    }
    let unit = match text.get(at) {
        Some(b'u') => number(text, 4, at + 1),
        _ => number(text, 2, at),
    };
    match unit {
        Unit::Plain if at > 1 => Unit::Byte(b'%', at),
        unit => unit,
    }
}

fn backslash(text: &[u8]) -> Unit {
    let run = text.iter().take_while(|byte| **byte == b'\\').count();
    if run > BACKSLASHES_MAX {
        return Unit::Plain;
    }
    let Some(letter) = text.get(run) else { return Unit::More };
    let unit = match letter {
        b'u' => number(text, 4, run + 1),
        b'x' => number(text, 2, run + 1),
        b'n' => Unit::Byte(b'\n', run + 1),
        b'r' => Unit::Byte(b'\r', run + 1),
        b't' => Unit::Byte(b'\t', run + 1),
        b'b' => Unit::Byte(8, run + 1),
        b'f' => Unit::Byte(12, run + 1),
        letter if letter.is_ascii_punctuation() => Unit::Byte(*letter, run + 1),
        _ => Unit::Plain,
    };
    match unit {
        Unit::Plain if run > 1 => Unit::Byte(b'\\', run),
        unit => unit,
    }
}

/// An end of a line inside a string.
fn escaped_gap(text: &[u8]) -> Unit {
    let run = text.iter().take_while(|byte| **byte == b'\\').count();
    if run > BACKSLASHES_MAX {
        return Unit::Plain;
    }
    match text.get(run) {
        None => Unit::More,
        Some(b'n') => Unit::Gap(run + 1, true),
        Some(b'r' | b't') => Unit::Gap(run + 1, false),
        Some(_) => Unit::Plain,
    }
}

fn entity(text: &[u8]) -> Unit {
    let mut at = 1;
    for _ in 0..NESTED_MAX {
        let rest = &text[at..];
        if rest.starts_with(b"amp;") {
            at += 4;
        } else if b"amp;".starts_with(rest) {
            return Unit::More;
        } else {
            break;
        }
    }
    let rest = &text[at..];
    let seen = &rest[..rest.len().min(ENTITY_BYTES_MAX)];
    let byte = match seen.iter().position(|byte| *byte == b';') {
        Some(length) => named(&seen[..length]).map(|byte| Unit::Byte(byte, at + length + 1)),
        None => {
            let open = seen.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'#');
            (open && seen.len() < ENTITY_BYTES_MAX).then_some(Unit::More)
        }
    };
    match byte {
        Some(unit) => unit,
        None if at > 1 => Unit::Byte(b'&', at),
        None => Unit::Plain,
    }
}

/// The ASCII character that an entity stands for.
fn named(name: &[u8]) -> Option<u8> {
    if let Some(number) = name.strip_prefix(b"#") {
        let (digits, base) = match number {
            [b'x' | b'X', digits @ ..] => (digits, 16),
            digits => (digits, 10),
        };
        let value = u32::from_str_radix(std::str::from_utf8(digits).ok()?, base).ok()?;
        return u8::try_from(value).ok().filter(u8::is_ascii);
    }
    let byte = match name {
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
        _ => return None,
    };
    Some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone_however_often_they_were_escaped() {
        for (escape, text, byte) in [
            (Escape::Percent, "%2b", b'+'),
            (Escape::Percent, "%2B", b'+'),
            (Escape::Percent, "%25252B", b'+'),
            (Escape::Percent, "%u002b", b'+'),
            (Escape::Backslash, "\\u002b", b'+'),
            (Escape::Backslash, "\\\\\\\\u002B", b'+'),
            (Escape::Backslash, "\\x2b", b'+'),
            (Escape::Backslash, "\\/", b'/'),
            (Escape::Entity, "&#43;", b'+'),
            (Escape::Entity, "&#x3D;", b'='),
            (Escape::Entity, "&#0061;", b'='),
            (Escape::Entity, "&amp;plus;", b'+'),
        ] {
            assert_eq!(escape.unit(text.as_bytes()), Unit::Byte(byte, text.len()), "{text}");
            for cut in 1..text.len() {
                assert_eq!(escape.unit(&text.as_bytes()[..cut]), Unit::More, "{text} to {cut}");
            }
        }
    }

    #[test]
    fn what_is_no_escape_stays_and_no_escape_is_longer_than_its_bound() {
        for escape in [Escape::Percent, Escape::Backslash, Escape::Entity, Escape::Wrapping] {
            for rest in ["zz", "", "%%", "&&", "\\", "#", "#xx;", "u12", "amp;", "25", "1", "n"] {
                for first in ["%", "\\", "&"] {
                    let text = format!("{first}{}", rest.repeat(40)).into_bytes();
                    if escape.begins_with(text[0]) {
                        let long = text.len() >= ESCAPE_BYTES_MAX;
                        assert!(!long || escape.unit(&text) != Unit::More, "{escape:?} {rest}");
                    }
                }
            }
        }
    }
}

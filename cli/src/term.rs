//! What goes to the terminal: colours where they are wanted, never what somebody else planted.
//!
//! Text of models, tools and upstreams passes [`printable`] first: an escape sequence in a tool's
//! output must not move the cursor, retitle the window or hide a line from the reader.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};

use crate::failure::{CLOSED, Failure, RUNTIME};

/// Whether and how to colour standard output.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    colour: bool,
    terminal: bool,
}

impl Style {
    /// Colours on a terminal only, and not where `NO_COLOR` is set or the terminal is dumb.
    pub fn of_stdout() -> Self {
        let terminal = std::io::stdout().is_terminal();
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|v| v == "dumb");
        Self { colour: terminal && !unwanted, terminal }
    }

    #[cfg(test)]
    pub fn plain() -> Self {
        Self { colour: false, terminal: false }
    }

    /// Whether somebody watches.
    pub fn terminal(self) -> bool {
        self.terminal
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    pub fn bad(self, text: &str) -> String {
        self.paint("31", text)
    }

    pub fn warn(self, text: &str) -> String {
        self.paint("33", text)
    }

    pub fn accent(self, text: &str) -> String {
        self.paint("36", text)
    }
}

/// The text without what a terminal would obey: control characters but newline and tab, and
/// characters that reorder or hide others. Each is replaced by one visible mark.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(obeyed) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(|c| if obeyed(c) { '\u{fffd}' } else { c }).collect())
}

fn obeyed(c: char) -> bool {
    let ordered = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && c != '\n' && c != '\t') || ordered
}

/// Writes to standard output. A reader that went away (`| head`) ends the command quietly, with
/// the status that the signal would have given.
pub fn write_out(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|error| {
        let status = if error.kind() == std::io::ErrorKind::BrokenPipe { CLOSED } else { RUNTIME };
        Failure::new(format!("cannot write to standard output: {error}")).with_status(status)
    })
}

/// Writes one line to standard error. Nobody reading it is no reason to end.
pub fn aside(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Writes one line to standard output.
pub fn line(text: &str) -> Result<(), Failure> {
    write_out(format!("{text}\n").as_bytes())
}

/// Writes one JSON value as a line.
pub fn json_line(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value)
        .map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?;
    line(&text)
}

/// The text without what would end its line or column as well.
fn one_line(text: &str) -> String {
    let marked = |c| if c == '\n' || c == '\t' { '\u{fffd}' } else { c };
    printable(text).chars().map(marked).collect()
}

/// Aligns rows in columns, two spaces apart; the last column is not padded. No cell makes a row.
pub fn columns(rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let mut out = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let cell = one_line(cell);
            if column + 1 == row.len() {
                out.push_str(&cell);
            } else {
                let pad = width(column) + 2 - cell.chars().count();
                out.push_str(&cell);
                out.extend(std::iter::repeat_n(' ', pad));
            }
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        let planted = "ok\x1b]0;owned\x07\x1b[2J\r\u{202e}txt\u{9b}1A\n\tdone";

        let shown = printable(planted);

        assert!(!shown.chars().any(obeyed), "{shown:?}");
        assert!(shown.ends_with("\n\tdone"));
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "b".into()], vec!["long".into(), "c".into()]];

        assert_eq!(columns(&rows), "a     b\nlong  c\n");
    }

    #[test]
    fn no_cell_looks_like_a_row_of_its_own() {
        let rows = [vec!["a".into(), "title\nb\ttitle".into()], vec!["c\nd".into(), "e".into()]];

        assert_eq!(columns(&rows), "a    title\u{fffd}b\u{fffd}title\nc\u{fffd}d  e\n");
    }
}

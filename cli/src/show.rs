//! Shows a session's events to a person: the model's words as they come, tools and their results.
//!
//! Each event is shown once however often it arrives (preview, stream, history after a reconnect).

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::failure::Failure;
use crate::term::{self, Style, printable};
use crate::wire::{Event, Received, text_at};

/// Lines of a tool's input or result that are shown; the log has all of it.
const LINES_MAX: usize = 14;
/// Characters of one line that are shown.
const LINE_CHARS_MAX: usize = 160;

/// Writes events to standard output.
pub struct Show {
    style: Style,
    seen: HashSet<String>,
    /// Previewed text by message, as far as it was shown.
    previews: HashMap<String, String>,
    open: Option<String>,
    /// What each call asks, by its event.
    calls: HashMap<String, String>,
    /// The call that was shown last, with nothing below it yet.
    above: Option<String>,
}

impl Show {
    pub fn new(style: Style) -> Self {
        Self {
            style,
            seen: HashSet::new(),
            previews: HashMap::new(),
            open: None,
            calls: HashMap::new(),
            above: None,
        }
    }

    /// Shows one event. False: it was shown before.
    pub fn event(&mut self, received: &Received) -> Result<bool, Failure> {
        if let Some(id) = &received.id {
            // A queued message comes again when it is taken up; it is shown at once, once.
            if !self.seen.insert(id.clone()) {
                return Ok(false);
            }
        }
        let text = self.text(&received.event, received.id.as_deref());
        if !text.is_empty() {
            term::write_out(text.as_bytes())?;
        }
        Ok(true)
    }

    /// Whether an event was not shown yet.
    pub fn is_fresh(&self, received: &Received) -> bool {
        received.id.as_ref().is_none_or(|id| !self.seen.contains(id))
    }

    /// Counts an event as shown without showing it. False: it was shown before.
    pub fn quietly(&mut self, received: &Received) -> bool {
        let Some(id) = &received.id else { return true };
        if let Event::ToolUse { name, input } = &received.event {
            self.calls.insert(id.clone(), named(name, input));
        }
        self.seen.insert(id.clone())
    }

    /// Ends a line of running text that was broken off.
    pub fn settle(&mut self) -> Result<(), Failure> {
        if self.open.take().is_some() { term::line("") } else { Ok(()) }
    }

    fn text(&mut self, event: &Event, id: Option<&str>) -> String {
        let text = match event {
            Event::Preview { message, text } => self.preview(message, text),
            Event::PreviewStart { .. } => String::new(),
            Event::Message { text } => self.message(id.unwrap_or_default(), text),
            other => {
                let text = self.block(other);
                if text.is_empty() { text } else { self.closed() + &text }
            }
        };
        if let (Event::ToolUse { name, input }, Some(id)) = (event, id) {
            self.calls.insert(id.to_owned(), named(name, input));
            self.above = Some(id.to_owned());
        } else if !text.is_empty() {
            self.above = None;
        }
        text
    }

    /// Ends an open line of running text, if there is one.
    fn closed(&mut self) -> String {
        if self.open.take().is_some() { "\n".to_owned() } else { String::new() }
    }

    fn preview(&mut self, message: &str, text: &str) -> String {
        let mut out = String::new();
        if self.open.as_deref() != Some(message) {
            out += &self.closed();
            out.push('\n');
            out.push_str("  ");
            self.open = Some(message.to_owned());
        }
        self.previews.entry(message.to_owned()).or_default().push_str(text);
        out += &indented(text);
        out
    }

    fn message(&mut self, id: &str, text: &str) -> String {
        let shown = self.previews.remove(id).unwrap_or_default();
        if let Some(rest) = text.strip_prefix(shown.as_str()).filter(|_| !shown.is_empty()) {
            let rest = indented(rest);
            self.open = None;
            return rest + "\n";
        }
        if text.is_empty() {
            return String::new();
        }
        self.closed() + "\n  " + &indented(text) + "\n"
    }

    fn block(&self, event: &Event) -> String {
        let style = self.style;
        match event {
            Event::UserMessage { text, .. } => {
                format!("\n{} {}\n", style.bold("▌"), indented(text))
            }
            Event::ToolUse { name, input } => self.tool_use(name, input),
            Event::ToolResult { tool_use, text, failed } => {
                self.whose(tool_use) + &self.tool_result(text, *failed)
            }
            Event::Interrupt => format!("\n  {}\n", style.warn("interrupted")),
            Event::Error { message, retry } => {
                let again = if retry == "retrying" { "\ntrying again" } else { "" };
                format!("\n  {}\n", style.bad(&indented(&format!("{message}{again}"))))
            }
            Event::Terminated => format!("\n  {}\n", style.bad("session terminated")),
            Event::Deleted => format!("\n  {}\n", style.warn("session deleted")),
            _ => String::new(),
        }
    }

    fn tool_use(&self, name: &str, input: &Value) -> String {
        let mark = self.style.accent(&format!("▸ {}", printable(name)));
        let lines = clipped(&what_is_asked(name, input));
        let pad = " ".repeat(name.chars().count() + 4);
        let mut out = format!("\n  {mark}");
        for (at, line) in lines.iter().enumerate() {
            let lead = if at == 0 { "  ".to_owned() } else { format!("  {pad}") };
            out += &format!("{lead}{line}\n");
        }
        if lines.is_empty() {
            out.push('\n');
        }
        out
    }

    /// Names the call that a result belongs to, where it does not stand right below it.
    fn whose(&self, tool_use: &str) -> String {
        if self.above.as_deref() == Some(tool_use) {
            return String::new();
        }
        let call = self.calls.get(tool_use);
        call.map(|call| format!("\n  {}\n", self.style.accent(call))).unwrap_or_default()
    }

    fn tool_result(&self, text: &str, failed: bool) -> String {
        let mut out = String::new();
        for line in clipped(text) {
            let bar = if failed { self.style.bad("│") } else { self.style.dim("│") };
            out += &format!("    {bar} {}\n", self.style.dim(&line));
        }
        out
    }
}

/// A call in one line.
fn named(name: &str, input: &Value) -> String {
    let asked = clipped(&what_is_asked(name, input));
    let more = if asked.len() > 1 { " …" } else { "" };
    let first = asked.first().map(|line| format!("  {line}")).unwrap_or_default();
    format!("◂ {}{first}{more}", printable(name))
}

/// What a tool is asked to do, as a person would say it.
fn what_is_asked(name: &str, input: &Value) -> String {
    let field = |key: &str| text_at(input, &[key]);
    match name {
        "bash" if !field("command").is_empty() => field("command"),
        "bash" => "restart".to_owned(),
        "read" => field("file_path"),
        "write" => format!("{}\n{}", field("file_path"), field("content")),
        "edit" => {
            format!("{}\n- {}\n+ {}", field("file_path"), field("old_string"), field("new_string"))
        }
        "web_fetch" => field("url"),
        "glob" | "grep" => format!("{} {}", field("pattern"), field("path")),
        _ => input.to_string(),
    }
}

/// Continues lines under the two columns of indentation.
fn indented(text: &str) -> String {
    printable(text).replace('\n', "\n  ")
}

/// The first lines, each cut to a readable length.
fn clipped(text: &str) -> Vec<String> {
    let text = printable(text.trim_end());
    let lines: Vec<&str> = text.lines().collect();
    let mut out: Vec<String> = lines.iter().take(LINES_MAX).map(|line| cut(line)).collect();
    if lines.len() > LINES_MAX {
        out.push(format!("… {} more lines", lines.len() - LINES_MAX));
    }
    out
}

fn cut(line: &str) -> String {
    if line.chars().count() <= LINE_CHARS_MAX {
        return line.to_owned();
    }
    let mut out: String = line.chars().take(LINE_CHARS_MAX).collect();
    out.push('…');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(events: &[Value]) -> String {
        let mut show = Show::new(Style::plain());
        let mut out = String::new();
        for json in events {
            let received = Received::of(json.clone());
            let fresh = received.id.clone().is_none_or(|id| show.seen.insert(id));
            if fresh {
                out += &show.text(&received.event, received.id.as_deref());
            }
        }
        out
    }

    fn delta(text: &str) -> Value {
        json!({"type": "event_delta", "event_id": "m", "delta": {"content": {"text": text}}})
    }

    fn message(text: &str) -> Value {
        json!({"type": "agent.message", "id": "m", "content": [{"type": "text", "text": text}]})
    }

    #[test]
    fn a_previewed_message_is_shown_once_and_whole() {
        let previewed = shown(&[delta("one "), delta("two"), message("one two three")]);
        let plain = shown(&[message("one two three"), message("one two three")]);

        assert_eq!(previewed, "\n  one two three\n");
        assert_eq!(plain, previewed);
    }

    #[test]
    fn a_preview_that_was_broken_off_does_not_run_into_the_next_line() {
        let broken = shown(&[delta("one"), json!({"type": "user.interrupt", "id": "i"})]);

        assert_eq!(broken, "\n  one\n\n  interrupted\n");
    }

    #[test]
    fn an_error_says_whether_it_is_tried_again_and_no_more_of_the_wires_words() {
        let error = |retry: &str| {
            shown(&[json!({"type": "session.error", "id": "e", "error": {
                "message": "no key\nset one", "retry_status": {"type": retry}}})])
        };

        assert_eq!(error("retrying"), "\n  no key\n  set one\n  trying again\n");
        assert_eq!(error("exhausted"), "\n  no key\n  set one\n");
    }

    fn call(id: &str, command: &str) -> Value {
        json!({"type": "agent.tool_use", "id": id, "name": "bash", "input": {"command": command}})
    }

    fn result(id: &str, text: &str) -> Value {
        json!({"type": "agent.tool_result", "id": format!("r{id}"), "tool_use_id": id,
            "content": [{"type": "text", "text": text}]})
    }

    #[test]
    fn results_of_calls_at_the_same_moment_say_whose_they_are() {
        let alone = shown(&[call("a", "one"), result("a", "1")]);
        let both = [call("a", "one"), call("b", "two\nlines"), result("a", "1"), result("b", "2")];

        assert_eq!(alone, "\n  ▸ bash  one\n    │ 1\n");
        let below = "\n  ◂ bash  one\n    │ 1\n\n  ◂ bash  two …\n    │ 2\n";
        assert!(shown(&both).ends_with(below), "{}", shown(&both));
        let swapped = shown(&[call("a", "one"), call("b", "two"), result("b", "2")]);
        assert!(swapped.ends_with("  ▸ bash  two\n    │ 2\n"), "{swapped}");
    }

    #[test]
    fn results_are_cut_and_say_so() {
        let long = vec!["x"; LINES_MAX + 3].join("\n");
        let result = shown(&[json!({"type": "agent.tool_result", "id": "r",
            "content": [{"type": "text", "text": long}]})]);

        assert!(result.ends_with("… 3 more lines\n"), "{result}");
    }

    #[test]
    fn what_a_tool_printed_cannot_move_the_cursor() {
        let result = shown(&[json!({"type": "agent.tool_result", "id": "r",
            "content": [{"type": "text", "text": "a\u{1b}[2Jb"}]})]);

        assert!(!result.contains('\u{1b}'), "{result:?}");
    }
}

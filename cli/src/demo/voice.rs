//! How the demo speaks: headings, remarks, and claims that hold or do not.

use std::time::Duration;

use crate::failure::Failure;
use crate::term::{self, Style};

/// How long somebody at a terminal gets to read.
const BREATH: Duration = Duration::from_millis(700);
/// Width of headings.
const WIDTH: usize = 74;

pub struct Voice {
    style: Style,
    /// Only the final JSON is wanted.
    quiet: bool,
    held: usize,
    failed: Vec<String>,
}

impl Voice {
    pub fn new(quiet: bool) -> Self {
        Self { style: Style::of_stdout(), quiet, held: 0, failed: Vec::new() }
    }

    pub fn style(&self) -> Style {
        self.style
    }

    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// Whether a person reads along.
    pub fn watched(&self) -> bool {
        self.style.terminal() && !self.quiet
    }

    /// Time to read what was just said.
    pub async fn breath(&self) {
        if self.watched() {
            tokio::time::sleep(BREATH).await;
        }
    }

    pub fn line(&self, text: &str) -> Result<(), Failure> {
        if self.quiet { Ok(()) } else { term::line(text) }
    }

    pub fn heading(&self, text: &str) -> Result<(), Failure> {
        let rule = "─".repeat(WIDTH.saturating_sub(text.chars().count() + 4));
        let line = format!("── {text} {rule}");
        self.line(&format!("\n\n{}", self.style.bold(&line)))
    }

    /// What happens beside the session.
    pub fn remark(&self, text: &str) -> Result<(), Failure> {
        self.line(&format!("\n  {} {}", self.style.warn("•"), text))
    }

    /// States a claim and whether it holds.
    pub fn claim(&mut self, holds: bool, text: &str) -> Result<(), Failure> {
        let text = term::printable(text);
        if holds {
            self.held += 1;
            return self.line(&format!("  {} {text}", self.style.good("✓")));
        }
        self.failed.push(text.clone().into_owned());
        self.line(&format!("  {} {text}", self.style.bad("✗")))
    }

    /// Names and values, aligned; a value may have several lines.
    pub fn table(&self, rows: &[(&str, String)]) -> Result<(), Failure> {
        let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, value) in rows {
            for (at, line) in value.lines().enumerate() {
                let name = if at == 0 { name } else { "" };
                let name = self.style.accent(&format!("{name:width$}"));
                self.line(&format!("  {name}   {}", term::printable(line)))?;
            }
        }
        Ok(())
    }

    pub fn held(&self) -> usize {
        self.held
    }

    pub fn failed(&self) -> &[String] {
        &self.failed
    }
}

//! Reads values out of a TOML document and notes what is wrong with them, where.

use core::ops::Range;

use toml_edit::{ArrayOfTables, Document, Item, Table, TableLike, Value};

use crate::diagnostic::{Diagnostic, Severity, nearest};

pub(crate) type Span = Range<usize>;

/// Enough errors, and enough warnings, for any operator at once; bounds the work on a broken file.
const FOUND_MAX: usize = 100;

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Spanned<T> {
    pub value: T,
    pub span: Span,
}

/// Collects what is wrong in one file.
pub(crate) struct Reader<'t> {
    file: &'t str,
    text: &'t str,
    found: Vec<Diagnostic>,
    /// Unknown keys reported so far: the section's name, the key.
    unknown: Vec<(String, String)>,
}

/// One table of the file, with the dotted name it has there.
pub(crate) struct Section<'t> {
    table: &'t dyn TableLike,
    pub name: String,
    /// Where the table begins, for findings about what it lacks.
    pub span: Span,
}

impl<'t> Reader<'t> {
    pub fn new(file: &'t str, text: &'t str) -> Self {
        Self { file, text, found: Vec::new(), unknown: Vec::new() }
    }

    pub fn error(&mut self, span: &Span, message: impl Into<String>) {
        self.note(Severity::Error, span, message.into(), None);
    }

    pub fn error_hint(&mut self, span: &Span, message: impl Into<String>, hint: impl Into<String>) {
        self.note(Severity::Error, span, message.into(), Some(hint.into()));
    }

    pub fn warn(&mut self, span: &Span, message: impl Into<String>, hint: impl Into<String>) {
        self.note(Severity::Warning, span, message.into(), Some(hint.into()));
    }

    pub fn whole(&mut self, message: impl Into<String>) {
        self.found.push(Diagnostic::whole(self.file, message.into()));
    }

    fn note(&mut self, severity: Severity, span: &Span, message: String, hint: Option<String>) {
        // Each severity has its own bound, so that warnings never crowd out an error.
        if self.found.iter().filter(|found| found.severity == severity).count() >= FOUND_MAX {
            return;
        }
        let found = Diagnostic::at(self.file, self.text, span.clone(), message);
        self.found.push(Diagnostic { severity, hint, ..found });
    }

    /// Everything found, in the order of the file.
    pub fn finish(mut self) -> Vec<Diagnostic> {
        self.found.sort_by_key(|found| (found.line, found.column));
        self.found
    }

    /// Notes that a value has another type than it should.
    fn wrong_type(&mut self, item: &Item, key: &str, span: &Span, wanted: &str) {
        let is = item.type_name();
        self.error(span, format!("\"{key}\" is {wanted}, not {} {is}", article(is)));
    }
}

/// Parses the text as TOML; a file that is none has one finding.
pub(crate) fn document<'t>(reader: &mut Reader<'t>) -> Option<Document<&'t str>> {
    // First without positions of everything: the parser that keeps them goes on after a mistake,
    // and some mistakes after another one make it panic.
    let (span, message) = match toml::de::DeTable::parse(reader.text) {
        Err(error) => (error.span(), error.message().to_owned()),
        Ok(_) => match Document::parse(reader.text) {
            Ok(document) => return Some(document),
            Err(error) => (error.span(), error.message().to_owned()),
        },
    };
    let end = reader.text.trim_end().len();
    let span = span.unwrap_or(end..end);
    reader.error(&span, format!("not valid TOML: {}", first_line(&message)));
    None
}

impl<'t> Section<'t> {
    pub fn top(table: &'t Table) -> Self {
        Self { table, name: String::new(), span: 0..0 }
    }

    fn full(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    /// Notes every key that is not among those allowed here.
    pub fn check_keys(&self, reader: &mut Reader<'_>, allowed: &[&str]) {
        for (key, item) in self.table.iter().filter(|(key, _)| !allowed.contains(key)) {
            let span = self.key_span(key, item);
            let message = format!("unknown key \"{key}\"");
            let hint = match nearest(key, allowed) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None if key == "deny" => "what is not allowed is denied already".to_owned(),
                None => format!("known here: {}", allowed.join(", ")),
            };
            reader.error_hint(&span, message, hint);
            reader.unknown.push((self.name.clone(), key.to_owned()));
        }
    }

    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Notes that a required key is absent, unless it is there misspelt and was reported as that.
    pub fn lacks(&self, reader: &mut Reader<'_>, key: &str, hint: &str) {
        let misspelt = reader
            .unknown
            .iter()
            .any(|(name, written)| *name == self.name && nearest(written, &[key]).is_some());
        if !misspelt {
            reader.error_hint(&self.span, format!("{} lacks \"{key}\"", self.name), hint);
        }
    }

    pub fn is_string(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(Item::is_str)
    }

    pub fn is_boolean(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(Item::is_bool)
    }

    pub fn is_table(&self, key: &str) -> bool {
        self.table.get(key).is_some_and(Item::is_table_like)
    }

    /// Where a key stands; the whole table if it is absent.
    pub fn span_of(&self, key: &str) -> Span {
        self.table.get(key).map_or_else(|| self.span.clone(), |item| self.key_span(key, item))
    }

    fn key_span(&self, key: &str, item: &Item) -> Span {
        let own = self.table.key(key).and_then(toml_edit::Key::span);
        own.or_else(|| item.span()).unwrap_or_else(|| self.span.clone())
    }

    fn value_span(&self, key: &str, item: &Item) -> Span {
        item.span().unwrap_or_else(|| self.key_span(key, item))
    }

    /// Every entry of a table whose keys are names of the operator's choice.
    pub fn entries(&self) -> impl Iterator<Item = (&'t str, &'t Item, Span)> {
        self.table.iter().map(|(key, item)| (key, item, self.key_span(key, item)))
    }

    /// A table below this one, if it is there.
    pub fn section(&self, reader: &mut Reader<'_>, key: &str) -> Option<Section<'t>> {
        let item = self.table.get(key)?;
        let span = self.key_span(key, item);
        self.enter(reader, key, item, span)
    }

    /// A table below this one, from its entry.
    pub fn enter(
        &self,
        reader: &mut Reader<'_>,
        key: &str,
        item: &'t Item,
        span: Span,
    ) -> Option<Section<'t>> {
        let Some(table) = item.as_table_like() else {
            reader.wrong_type(item, key, &span, "a table");
            return None;
        };
        Some(Section { table, name: self.full(key), span })
    }

    /// The tables of an array, `[[key]]` or inline; each named `key[0]`, `key[1]`, ….
    pub fn sections(&self, reader: &mut Reader<'_>, key: &str) -> Vec<Section<'t>> {
        let Some(item) = self.table.get(key) else { return Vec::new() };
        let name = |i: usize| format!("{}[{i}]", self.full(key));
        if let Some(tables) = item.as_array_of_tables() {
            return header_tables(tables, &self.key_span(key, item), name);
        }
        let Some(array) = item.as_array() else {
            reader.wrong_type(item, key, &self.key_span(key, item), "an array of tables");
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (i, value) in array.iter().enumerate() {
            let span = value.span().unwrap_or_else(|| self.key_span(key, item));
            match value.as_inline_table() {
                Some(table) => sections.push(Section { table, name: name(i), span }),
                None => reader.error(&span, format!("\"{key}\" holds tables only")),
            }
        }
        sections
    }

    pub fn string(&self, reader: &mut Reader<'_>, key: &str) -> Option<Spanned<String>> {
        let item = self.table.get(key)?;
        let span = self.value_span(key, item);
        let Some(text) = item.as_str() else {
            reader.wrong_type(item, key, &span, "a string");
            return None;
        };
        Some(Spanned { value: text.to_owned(), span })
    }

    pub fn strings(&self, reader: &mut Reader<'_>, key: &str) -> Option<Vec<Spanned<String>>> {
        let values = self.array(reader, key, "an array of strings")?;
        let mut strings = Vec::new();
        for (value, span) in values {
            match value.as_str() {
                Some(text) => strings.push(Spanned { value: text.to_owned(), span }),
                None => reader.error(&span, format!("\"{key}\" holds strings only")),
            }
        }
        Some(strings)
    }

    pub fn integers(&self, reader: &mut Reader<'_>, key: &str) -> Option<Vec<Spanned<i64>>> {
        let values = self.array(reader, key, "an array of integers")?;
        let mut integers = Vec::new();
        for (value, span) in values {
            match value.as_integer() {
                Some(value) => integers.push(Spanned { value, span }),
                None => reader.error(&span, format!("\"{key}\" holds integers only")),
            }
        }
        Some(integers)
    }

    fn array(
        &self,
        reader: &mut Reader<'_>,
        key: &str,
        wanted: &str,
    ) -> Option<Vec<(&'t Value, Span)>> {
        let item = self.table.get(key)?;
        let whole = self.value_span(key, item);
        let Some(array) = item.as_array() else {
            reader.wrong_type(item, key, &whole, wanted);
            return None;
        };
        let span = |value: &Value| value.span().unwrap_or_else(|| whole.clone());
        Some(array.iter().map(|value| (value, span(value))).collect())
    }

    pub fn boolean(&self, reader: &mut Reader<'_>, key: &str) -> Option<bool> {
        let item = self.table.get(key)?;
        let value = item.as_bool();
        if value.is_none() {
            reader.wrong_type(item, key, &self.value_span(key, item), "true or false");
        }
        value
    }

    /// An integer within bounds.
    pub fn integer(
        &self,
        reader: &mut Reader<'_>,
        key: &str,
        bounds: core::ops::RangeInclusive<u32>,
    ) -> Option<u32> {
        let item = self.table.get(key)?;
        let span = self.value_span(key, item);
        let Some(value) = item.as_integer() else {
            reader.wrong_type(item, key, &span, "an integer");
            return None;
        };
        let value = u32::try_from(value).ok().filter(|value| bounds.contains(value));
        if value.is_none() {
            let (low, high) = (bounds.start(), bounds.end());
            reader.error(&span, format!("\"{key}\" is {low} to {high}"));
        }
        value
    }
}

fn header_tables<'t>(
    tables: &'t ArrayOfTables,
    fallback: &Span,
    name: impl Fn(usize) -> String,
) -> Vec<Section<'t>> {
    let section = |(i, table): (usize, &'t Table)| Section {
        table,
        name: name(i),
        span: table.span().unwrap_or_else(|| fallback.clone()),
    };
    tables.iter().enumerate().map(section).collect()
}

fn article(word: &str) -> &'static str {
    if word.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

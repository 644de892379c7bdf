//! Which records somebody asks for.

use ipc::id::{CallId, LeaseId, SessionId};
use ipc::vault::{AuditKind, AuditRecord};
use policies::Host;

use super::PAGE_RECORDS_MAX;
use super::record::Keys;

/// What a page of the audit is asked for by.
const NAMES: &str = "after, limit, kind, session, lease, call, host, rule, credential, \
    environment, since, until";

/// Which records a page holds: those that are all of this.
#[derive(Clone, Default)]
pub struct Filter {
    /// Records after this number.
    pub after: u64,
    /// At most so many, and never more than [`PAGE_RECORDS_MAX`].
    pub limit: usize,
    pub kind: Option<AuditKind>,
    pub session: Option<SessionId>,
    pub lease: Option<LeaseId>,
    pub call: Option<CallId>,
    /// In canonical form.
    pub host: Option<String>,
    pub rule: Option<String>,
    pub credential: Option<String>,
    pub environment: Option<String>,
    /// Milliseconds since 1970: at that moment or later.
    pub since: Option<i64>,
    /// Earlier than that.
    pub until: Option<i64>,
}

impl Filter {
    /// Reads a query. Spans of time count back from `now`. The error is for whoever asked.
    pub fn parse(pairs: &[(String, String)], now: jiff::Timestamp) -> Result<Self, String> {
        let mut filter = Self { limit: PAGE_RECORDS_MAX, ..Self::default() };
        for (at, (name, value)) in pairs.iter().enumerate() {
            if pairs[..at].iter().any(|(before, _)| before == name) {
                return Err(format!("{name} is given twice"));
            }
            filter.set(name, value, now).map_err(|reason| format!("{name}: {reason}"))?;
        }
        Ok(filter)
    }

    fn set(&mut self, name: &str, value: &str, now: jiff::Timestamp) -> Result<(), String> {
        let text = || Some(value.to_owned());
        match name {
            "after" => self.after = number(value)?,
            "limit" => self.limit = number(value)?,
            "kind" => self.kind = Some(kind(value)?),
            "session" => self.session = Some(id(value)?),
            "lease" => self.lease = Some(id(value)?),
            "call" => self.call = Some(id(value)?),
            "host" => self.host = Some(host(value)?),
            "rule" => self.rule = text(),
            "credential" => self.credential = text(),
            "environment" => self.environment = text(),
            "since" => self.since = Some(time(value, now)?),
            "until" => self.until = Some(time(value, now)?),
            _ => return Err(format!("records are not found by that, but by {NAMES}")),
        }
        Ok(())
    }

    /// Whether a segment may be passed over by its index.
    pub(super) fn has_index(&self) -> bool {
        self.lease.is_some()
            || self.session.is_some()
            || self.call.is_some()
            || self.since.is_some()
            || self.until.is_some()
    }

    /// Whether a record is one of these, by what can be read of it without decoding it.
    pub(super) fn takes_keys(&self, keys: &Keys<'_>) -> bool {
        let is = |found: &str, wanted: Option<&str>| wanted.is_none_or(|wanted| found == wanted);
        let call = |wanted: &CallId| keys.calls.split(' ').any(|call| call == wanted.as_str());
        keys.number > self.after
            && self.kind.is_none_or(|kind| keys.kind == Some(kind))
            && self.since.is_none_or(|since| since <= keys.milliseconds)
            && self.until.is_none_or(|until| keys.milliseconds < until)
            && is(keys.lease, self.lease.as_ref().map(|id| id.as_str()))
            && is(keys.session, self.session.as_ref().map(|id| id.as_str()))
            && self.call.as_ref().is_none_or(call)
    }

    /// The rest of it.
    pub(super) fn takes(&self, record: &AuditRecord) -> bool {
        let is =
            |found: &Option<String>, wanted: &Option<String>| wanted.is_none() || found == wanted;
        is(&record.host, &self.host)
            && is(&record.rule, &self.rule)
            && is(&record.credential, &self.credential)
            && is(&record.environment, &self.environment)
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is no number"))
}

fn id<T: TryFrom<String>>(text: &str) -> Result<T, String> {
    T::try_from(text.to_owned()).map_err(|_| format!("{text:?} is no id"))
}

fn kind(text: &str) -> Result<AuditKind, String> {
    Ok(match text {
        "allowed" => AuditKind::Allowed,
        "denied" => AuditKind::Denied,
        "outcome" => AuditKind::Outcome,
        "note" => AuditKind::Note,
        _ => return Err(format!("{text:?} is none of allowed, denied, outcome and note")),
    })
}

/// As records have it, whatever way it was written.
fn host(text: &str) -> Result<String, String> {
    let host = Host::parse(text).map_err(|error| format!("{text:?}: {error}"))?;
    Ok(host.to_string())
}

/// A moment, a day (its beginning, UTC), or how long ago.
fn time(text: &str, now: jiff::Timestamp) -> Result<i64, String> {
    let day = || {
        let day: jiff::civil::Date = text.parse().ok()?;
        Some(day.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
    };
    let ago = || {
        let span = jiff::SignedDuration::try_from(policies::time_span(text).ok()?).ok()?;
        now.checked_sub(span).ok()
    };
    // A day alone is tried after the whole.
    let found = text.parse::<jiff::Timestamp>().ok().or_else(ago).or_else(day);
    let found = found.ok_or_else(|| {
        format!(
            "{text:?} is no time, as in 2026-01-31T12:00:00Z or 2026-01-31, and does not say how \
             long ago, as in 90s, 30m, 12h or 7d"
        )
    })?;
    Ok(found.as_millisecond())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &[(&str, &str)]) -> Result<Filter, String> {
        let pairs: Vec<_> =
            query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Filter::parse(&pairs, "2026-01-31T12:00:00Z".parse().unwrap())
    }

    #[test]
    fn a_host_is_asked_for_in_any_spelling() {
        for (asked, found) in [
            ("API.example.", "api.example"),
            ("bücher.example", "xn--bcher-kva.example"),
            ("[2001:DB8::1]", "2001:db8::1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ] {
            assert_eq!(parse(&[("host", asked)]).unwrap().host.as_deref(), Some(found));
        }
    }

    #[test]
    fn times_are_moments_days_or_how_long_ago() {
        let of = |text| parse(&[("since", text)]).unwrap().since.unwrap();

        let noon = of("2026-01-31T12:00:00Z");
        assert_eq!(of("2026-01-31T13:00:00+01:00"), noon);
        assert_eq!(of("2h"), noon - 2 * 3_600_000);
        assert_eq!(of("2026-01-31"), noon - 12 * 3_600_000);
    }

    #[test]
    fn what_is_wrong_with_a_query_is_said_in_words() {
        for (query, words) in [
            ([("session", "bad id!")], "session: \"bad id!\" is no id"),
            ([("after", "-1")], "after: \"-1\" is no number"),
            ([("kind", "refused")], "kind: \"refused\" is none of allowed, denied,"),
            ([("since", "yesterday")], "since: \"yesterday\" is no time"),
            ([("until", "999999999999999999d")], "until: \"999999999999999999d\" is no time"),
            ([("host", "https://api.example/")], "host: \"https://api.example/\": "),
            ([("user", "x")], "user: records are not found by that, but by after, limit"),
        ] {
            let reason = parse(&query).err().unwrap();
            assert!(reason.starts_with(words), "{reason}");
        }
        let twice = parse(&[("lease", "lease_a"), ("lease", "lease_b")]).err().unwrap();
        assert_eq!(twice, "lease is given twice");
    }
}

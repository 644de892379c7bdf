//! How much one lease may do under one rule: so many requests, so many bytes, in so long.
//!
//! Who counts is proxyd. Here stand the bounds, and by what a rule is known as the same one when
//! its file was changed.

use core::fmt;
use core::time::Duration;

/// So much in so long. All of it can be used at once; what was used comes back evenly over that
/// time, and no more than all of it is ever there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// At least 1.
    pub amount: u64,
    pub span: Span,
}

/// The times that amounts are said for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    Second,
    Minute,
    Hour,
    Day,
}

/// The bounds as a rule says them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    /// Of requests, and of connections that are passed on unread.
    pub rate: Option<Quota>,
    /// In both directions together.
    pub bytes: Option<Quota>,
}

/// The bounds of a rule, and which rule it is.
#[derive(Debug)]
pub struct Budget {
    /// Its place in the file: `egress.allow[2]`.
    pub rule: String,
    /// All that it allows, in words: the same wherever in the file it stands, and whatever its
    /// bounds are.
    pub key: String,
    pub quotas: Quotas,
}

impl Span {
    pub(crate) const ALL: [Self; 4] = [Self::Second, Self::Minute, Self::Hour, Self::Day];

    pub fn length(self) -> Duration {
        Duration::from_secs(match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }
}

impl Quota {
    /// `60 requests a minute`.
    pub fn of_requests(&self) -> String {
        let requests = if self.amount == 1 { "request" } else { "requests" };
        format!("{} {requests} {}", self.amount, self.span)
    }

    /// `100MiB a day`.
    pub fn of_bytes(&self) -> String {
        format!("{} {}", size(self.amount), self.span)
    }
}

/// In the largest unit in which it is a whole number.
fn size(bytes: u64) -> String {
    let (base, units) = match bytes.is_multiple_of(1024) {
        true => (1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
        false => (1000, ["B", "kB", "MB", "GB", "TB"]),
    };
    let (mut amount, mut unit) = (bytes, 0);
    while amount > 0 && amount.is_multiple_of(base) && unit + 1 < units.len() {
        (amount, unit) = (amount / base, unit + 1);
    }
    format!("{amount}{}", units[unit])
}

impl Quotas {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Budget {
    /// Which bytes are counted, and how many may pass; none where they are not.
    pub fn of_bytes(&self) -> Option<(&str, Quota)> {
        Some((&self.key, self.quotas.bytes?))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let article = if *self == Self::Hour { "an" } else { "a" };
        write!(f, "{article} {}", self.name())
    }
}

impl fmt::Display for Quotas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.rate.map(|quota| quota.of_requests());
        let bytes = self.bytes.map(|quota| quota.of_bytes());
        let both: Vec<String> = rate.into_iter().chain(bytes).collect();
        write!(f, "at most {}", both.join(" and "))
    }
}

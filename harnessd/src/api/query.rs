//! Query strings: repeated arrays with brackets, operators in brackets, nothing ignored.
//!
//! Clients write `statuses[]=idle` and `created_at[gte]=…`, raw or percent-encoded. A filter this
//! server does not know is refused: ignoring it would answer more than was asked for. `beta` is
//! the one exception, which older clients append to every path.

use axum::extract::Query;
use http::Uri;

use super::error::ApiError;

/// Most parameters of one query. Clients send a dozen; the documented maximum is 100 values of
/// `event_deltas[]`.
const PARAMETERS_MAX: usize = 256;

/// The decoded parameters of one request, in order.
#[derive(Debug)]
pub struct Parameters(Vec<(String, String)>);

/// The direction of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Asc,
    Desc,
}

impl Order {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Asc => "asc",
            Self::Desc => "desc",
        }
    }
}

/// Bounds on a time, each RFC 3339 in UTC with milliseconds so that texts compare as times do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimeRange {
    pub gt: Option<String>,
    pub gte: Option<String>,
    pub lt: Option<String>,
    pub lte: Option<String>,
}

impl TimeRange {
    pub fn contains(&self, time: &str) -> bool {
        self.gt.as_deref().is_none_or(|bound| time > bound)
            && self.gte.as_deref().is_none_or(|bound| time >= bound)
            && self.lt.as_deref().is_none_or(|bound| time < bound)
            && self.lte.as_deref().is_none_or(|bound| time <= bound)
    }
}

impl Parameters {
    /// Decodes the query and refuses names outside `known` (written without brackets' content:
    /// `statuses[]`, `created_at[]`).
    pub fn of(uri: &Uri, known: &[&str]) -> Result<Self, ApiError> {
        let Query(pairs) = Query::<Vec<(String, String)>>::try_from_uri(uri)
            .map_err(|_| ApiError::invalid("query: not a list of name=value pairs"))?;
        if pairs.len() > PARAMETERS_MAX {
            return Err(ApiError::invalid(format!("query: more than {PARAMETERS_MAX} parameters")));
        }
        for (name, _) in &pairs {
            let plain = name == "beta" || known.contains(&name.as_str());
            let array = known.contains(&format!("{name}[]").as_str()) && !name.contains('[');
            let operator = name.split_once('[').is_some_and(|(stem, operator)| {
                known.contains(&format!("{stem}[op]").as_str())
                    && matches!(operator, "gt]" | "gte]" | "lt]" | "lte]")
            });
            if !(plain || array || operator) {
                return Err(ApiError::field(name, "unknown query parameter"));
            }
        }
        Ok(Self(pairs))
    }

    /// The one value of a parameter; given twice it is ambiguous.
    pub fn one(&self, name: &str) -> Result<Option<&str>, ApiError> {
        let mut values = self.0.iter().filter(|(n, _)| n == name).map(|(_, v)| v.as_str());
        let first = values.next();
        if values.next().is_some() {
            return Err(ApiError::field(name, "given more than once"));
        }
        Ok(first)
    }

    /// All values of an array parameter, with or without its brackets.
    pub fn many(&self, name: &str) -> Vec<&str> {
        let bracketed = format!("{name}[]");
        let hit = |n: &String| n == name || *n == bracketed;
        self.0.iter().filter(|(n, _)| hit(n)).map(|(_, v)| v.as_str()).collect()
    }

    /// The page size: `default` when absent, refused outside 1..=`max`.
    pub fn limit(&self, default: usize, max: usize) -> Result<usize, ApiError> {
        let Some(text) = self.one("limit")? else { return Ok(default) };
        match text.parse::<usize>() {
            Ok(limit) if (1..=max).contains(&limit) => Ok(limit),
            _ => Err(ApiError::field("limit", format!("must be a number from 1 to {max}"))),
        }
    }

    pub fn order(&self, default: Order) -> Result<Order, ApiError> {
        match self.one("order")? {
            None => Ok(default),
            Some("asc") => Ok(Order::Asc),
            Some("desc") => Ok(Order::Desc),
            Some(_) => Err(ApiError::field("order", "must be asc or desc")),
        }
    }

    pub fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.one(name)? {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ApiError::field(name, "must be true or false")),
        }
    }

    /// `created_at[gt|gte|lt|lte]`.
    pub fn created_at(&self) -> Result<TimeRange, ApiError> {
        let bound = |operator: &str| -> Result<Option<String>, ApiError> {
            let name = format!("created_at[{operator}]");
            self.one(&name)?.map(|text| canonical_time(&name, text)).transpose()
        };
        Ok(TimeRange { gt: bound("gt")?, gte: bound("gte")?, lt: bound("lt")?, lte: bound("lte")? })
    }
}

/// A time as the caller wrote it, in the one form that is stored.
fn canonical_time(name: &str, text: &str) -> Result<String, ApiError> {
    // A `+` of an offset arrives as a blank where the client did not encode it.
    let text = text.replace(' ', "+");
    let time: jiff::Timestamp = text.parse().map_err(|_| {
        ApiError::field(name, "must be an RFC 3339 time such as 2026-01-31T09:00:00Z")
    })?;
    Ok(format!("{time:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(query: &str, known: &[&str]) -> Result<Parameters, ApiError> {
        Parameters::of(&format!("/v1/x?{query}").parse().unwrap(), known)
    }

    #[test]
    fn arrays_come_with_raw_or_encoded_brackets() {
        let raw = parsed("statuses[]=idle&statuses[]=running", &["statuses[]"]).unwrap();
        let encoded =
            parsed("statuses%5B%5D=idle&statuses%5B%5D=running", &["statuses[]"]).unwrap();
        let bare = parsed("statuses=idle", &["statuses[]"]).unwrap();

        assert_eq!(raw.many("statuses"), ["idle", "running"]);
        assert_eq!(encoded.many("statuses"), ["idle", "running"]);
        assert_eq!(bare.many("statuses"), ["idle"]);
    }

    #[test]
    fn an_unknown_filter_is_refused_and_beta_is_not() {
        assert!(parsed("beta=true&limit=5", &["limit"]).is_ok());
        let error = parsed("colour=red", &["limit"]).unwrap_err();
        assert_eq!(error.message, "colour: unknown query parameter");
        assert!(parsed("created_at[around]=x", &["created_at[op]"]).is_err());
    }

    #[test]
    fn limits_outside_the_range_are_refused() {
        for bad in ["0", "101", "-1", "ten", ""] {
            let parameters = parsed(&format!("limit={bad}"), &["limit"]).unwrap();
            assert!(parameters.limit(20, 100).is_err(), "{bad:?} was accepted");
        }
        assert_eq!(parsed("", &[]).unwrap().limit(20, 100), Ok(20));
    }

    #[test]
    fn times_compare_in_one_form_whatever_their_offset() {
        let known = ["created_at[op]"];
        let query =
            "created_at[gte]=2026-01-01T01:00:00%2B01:00&created_at%5Blt%5D=2026-01-02T00:00:00Z";
        let range = parsed(query, &known).unwrap().created_at().unwrap();

        assert_eq!(range.gte.as_deref(), Some("2026-01-01T00:00:00.000Z"));
        assert!(range.contains("2026-01-01T00:00:00.000Z"));
        assert!(!range.contains("2026-01-02T00:00:00.000Z"));
        assert!(parsed("created_at[gt]=soon", &known).unwrap().created_at().is_err());
    }
}

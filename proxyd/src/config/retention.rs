//! How long the audit keeps its records.

use crate::audit::Retention;

/// A segment grows to a quarter of this: with less, what has just been recorded would go.
const BYTES_MIN: u64 = 64 * 1024 * 1024;

/// From what the file says. The error is the key and the reason.
pub fn check(keep: Option<&str>, bytes: Option<&str>) -> Result<Retention, (String, String)> {
    let wrong = |key: &str| {
        let key = key.to_owned();
        move |reason: String| (key.clone(), reason)
    };
    let keep = keep.map(policies::time_span).transpose().map_err(wrong("audit-keep"))?;
    if keep.is_some_and(|keep| keep.is_zero()) {
        return Err(wrong("audit-keep")("must not be 0".to_owned()));
    }
    let bytes = bytes.map(policies::byte_size).transpose().map_err(wrong("audit-bytes"))?;
    if bytes.is_some_and(|bytes| bytes < BYTES_MIN) {
        return Err(wrong("audit-bytes")("must be 64MiB or more".to_owned()));
    }
    Ok(Retention { keep, bytes })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn limits_have_units_and_leave_room_for_what_was_just_recorded() {
        assert_eq!(check(None, None), Ok(Retention::default()));
        let both = check(Some("30d"), Some("2GiB")).unwrap();
        assert_eq!(both.keep, Some(Duration::from_secs(30 * 24 * 3600)));
        assert_eq!(both.bytes, Some(2 << 30));
        for (keep, bytes, key) in [
            (Some("30"), None, "audit-keep"),
            (Some("0d"), None, "audit-keep"),
            (None, Some("2G"), "audit-bytes"),
            (None, Some("63MiB"), "audit-bytes"),
        ] {
            assert_eq!(check(keep, bytes).unwrap_err().0, key);
        }
    }
}

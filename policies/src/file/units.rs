//! Amounts with their unit: `"2GiB"`, `"90s"`.

use core::time::Duration;

const SIZES: &[(&str, u64)] = &[
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

const TIMES: &[(&str, u64)] = &[("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)];

/// Reads a size. The error is a reason for the operator.
pub fn bytes(text: &str) -> Result<u64, String> {
    amount(text, SIZES).ok_or_else(|| "a size is a number and a unit: \"512MiB\", \"2GiB\"".into())
}

/// Reads a time span. The error is a reason for the operator.
pub fn time(text: &str) -> Result<Duration, String> {
    amount(text, TIMES)
        .map(Duration::from_secs)
        .ok_or_else(|| "a time span is a number and s, m, h or d: \"90s\", \"2m\"".into())
}

fn amount(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(split);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim_start_matches(' '))?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_need_a_number_and_a_known_unit() {
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("512 MiB"), Ok(512 << 20));
        assert_eq!(bytes("1GB"), Ok(1_000_000_000));
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        for text in ["", "2", "GiB", "-1GiB", "1.5GiB", "2gib", "2 Gi B", "99999999999999999999TiB"]
        {
            assert!(bytes(text).is_err(), "{text}");
        }
        for text in ["", "2", "m", "1m30s", "2M", "18446744073709551615d"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}

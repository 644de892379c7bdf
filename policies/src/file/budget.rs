//! Reads `rate` and `bytes` of a rule.

use super::reader::{Reader, Section};
use super::units;
use crate::egress::budget::{Quota, Quotas, Span};

const RATE: &str = "rate = \"60/minute\"";
const BYTES: &str = "bytes = \"100MiB/day\"";
/// A bound that no lease could reach says something else than it means.
const AMOUNT_MAX: u64 = 1 << 50;

pub(super) fn read(reader: &mut Reader<'_>, section: &Section<'_>) -> Quotas {
    let count = |text: &str| {
        let number = text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok());
        number.flatten().ok_or_else(|| "a rate is a number of requests in a time".to_owned())
    };
    Quotas {
        rate: quota(reader, section, "rate", RATE, count),
        bytes: quota(reader, section, "bytes", BYTES, units::bytes),
    }
}

fn quota(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    key: &str,
    example: &str,
    amount: impl Fn(&str) -> Result<u64, String>,
) -> Option<Quota> {
    let text = section.string(reader, key)?;
    match parse(&text.value, amount) {
        Ok(quota) => Some(quota),
        Err(why) => {
            reader.error_hint(&text.span, format!("\"{key}\": {why}"), example);
            None
        }
    }
}

fn parse(text: &str, amount: impl Fn(&str) -> Result<u64, String>) -> Result<Quota, String> {
    let spans = || Span::ALL.map(Span::name).join(", ");
    let Some((number, span)) = text.split_once('/') else {
        return Err(format!("a time is missing: one of {}", spans()));
    };
    let named = |name: &str| Span::ALL.into_iter().find(|span| span.name() == name);
    let span = named(span.trim()).ok_or_else(|| format!("the time is one of {}", spans()))?;
    match amount(number.trim())? {
        0 => Err("this allows nothing: take the rule out instead".to_owned()),
        amount if amount > AMOUNT_MAX => Err("this bounds nothing: leave it out".to_owned()),
        amount => Ok(Quota { amount, span }),
    }
}

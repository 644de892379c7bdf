//! A session's budget on the wire: what its model requests may cost at list price.

use serde_json::{Value, json};

use super::ApiState;
use super::error::ApiError;
use super::fields::Fields;
use crate::spending::Spending;

/// Digits of an amount: more than there is money, and never more than a number holds.
const DIGITS_MAX: usize = 15;

/// Reads a limit, in cents.
pub fn read(value: &Value) -> Result<u64, ApiError> {
    let mut fields = Fields::of("budget", value)?;
    if fields.kind()? != "limit" {
        return Err(ApiError::field("budget.type", "must be limit"));
    }
    let cost = fields.required("max_list_cost")?;
    fields.finish()?;
    let mut money = Fields::of("budget.max_list_cost", cost)?;
    let amount = money.required("amount")?.as_str();
    let currency = money.required("currency")?;
    money.finish()?;
    if currency != "USD" {
        return Err(ApiError::field("budget.max_list_cost.currency", "must be USD"));
    }
    let digits = |text: &&str| {
        text.len() <= DIGITS_MAX
            && text.bytes().all(|byte| byte.is_ascii_digit())
            && !text.starts_with('0')
    };
    amount.filter(digits).and_then(|text| text.parse().ok()).ok_or_else(|| {
        let why = format!(
            "must be cents as a string of 1 to {DIGITS_MAX} digits without zeros in front: \"2500\""
        );
        ApiError::field("budget.max_list_cost.amount", why)
    })
}

/// Refuses a budget for a model whose requests cannot be counted.
pub fn check_price(state: &ApiState, model: &str) -> Result<(), ApiError> {
    if state.engine.has_price(model) {
        return Ok(());
    }
    let why = format!(
        "the model {model:?} has no price here: add price-usd-per-million to its table in \
         harnessd.toml"
    );
    Err(ApiError::field("budget", why).with_code("model_not_budgetable"))
}

/// The budget after an update; `None`: it stays as it is.
pub fn changed(
    state: &ApiState,
    spending: &Spending,
    model: &str,
    value: &Value,
) -> Result<Option<Option<u64>>, ApiError> {
    let old = spending.budget_cents();
    if value.is_null() {
        return Ok(old.map(|_| None));
    }
    let new = read(value)?;
    if old.is_none() {
        let why = "can only be set when the session is created";
        return Err(ApiError::field("budget", why).with_code("budget_create_only"));
    }
    check_price(state, model)?;
    let Some(cost) = spending.list_cost_cents() else {
        let why = "the session used tokens without a price, which no budget can count: remove it";
        return Err(ApiError::field("budget", why).with_code("model_not_budgetable"));
    };
    if !spending.is_below(new) {
        let why = format!("the session has cost {cost} cents: must be more than that");
        let error = ApiError::field("budget.max_list_cost.amount", why);
        return Err(error.with_code("budget_not_raised"));
    }
    // The same again changes nothing, unless the turn stopped for another reason that has gone.
    Ok((old != Some(new) || spending.is_at_budget()).then_some(Some(new)))
}

/// As clients read it.
pub fn wire(cents: Option<u64>) -> Value {
    let limit = |cents| json!({ "type": "limit", "max_list_cost": money(cents) });
    cents.map_or(Value::Null, limit)
}

pub fn money(cents: u64) -> Value {
    json!({ "amount": cents.to_string(), "currency": "USD" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_whole_cents_in_usd_and_every_refusal_names_the_field() {
        let limit = |amount: Value, currency: &str| {
            let cost = json!({ "amount": amount, "currency": currency });
            json!({ "type": "limit", "max_list_cost": cost })
        };
        for cents in [1_u64, 2_500, 999_999_999_999_999] {
            let read = read(&limit(json!(cents.to_string()), "USD")).unwrap();
            assert_eq!(wire(Some(read)), limit(json!(cents.to_string()), "USD"));
        }
        let amount = "budget.max_list_cost.amount";
        for (value, field) in [
            (json!("2500"), "budget"),
            (json!({ "type": "goal" }), "budget.type"),
            (json!({ "type": "limit" }), "budget.max_list_cost"),
            (json!({ "type": "limit", "max_list_cost": "1" }), "budget.max_list_cost"),
            (json!({ "type": "limit", "max_list_cost": {}, "x": 1 }), "budget.x"),
            (limit(json!(2500), "USD"), amount),
            (limit(json!("0"), "USD"), amount),
            (limit(json!("007"), "USD"), amount),
            (limit(json!("-1"), "USD"), amount),
            (limit(json!("1.5"), "USD"), amount),
            (limit(json!(""), "USD"), amount),
            (limit(json!("1000000000000000"), "USD"), amount),
            (limit(json!("1"), "EUR"), "budget.max_list_cost.currency"),
        ] {
            let error = read(&value).unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
            assert!(error.message.starts_with(&format!("{field}: ")), "{value}: {error}");
        }
    }
}

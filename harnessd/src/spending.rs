//! What a session's model requests cost, and whether they may go on: folded as its log grows.
//!
//! The budget is looked at between two requests, so the last one may go beyond it. What was used
//! at no known price cannot be measured, and no budget lets it go on.

use serde::{Deserialize, Serialize};

use crate::log::{Body, RequestEnded, StopReason};

/// One US cent in the unit of costs.
const NANO_USD_PER_CENT: u64 = 10_000_000;

/// The folded costs of one session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spending {
    /// At list price, in billionths of a US dollar.
    nano_usd: u64,
    /// Tokens were used that had no price.
    unpriced: bool,
    /// The client's limit.
    budget_cents: Option<u64>,
    /// A turn stopped at the budget: only another budget, or none, lets it go on.
    stopped: bool,
}

impl Spending {
    /// Takes the next event of the log. Ends of requests come through [`Self::request_ended`].
    pub fn take(&mut self, body: &Body) {
        match body {
            Body::SessionCreated(created) => self.budget_cents = created.budget_cents,
            Body::SessionUpdated { budget_cents: Some(budget), .. } => {
                self.budget_cents = *budget;
                self.stopped = false;
            }
            Body::StatusIdle { stop_reason: StopReason::BudgetReached, .. } => self.stopped = true,
            _ => {}
        }
    }

    pub fn request_ended(&mut self, ended: &RequestEnded) {
        let cost = ended.cost_nano_usd.unwrap_or(0);
        self.nano_usd = self.nano_usd.saturating_add(cost);
        self.unpriced |= ended.cost_nano_usd.is_none() && ended.usage.total() > 0;
    }

    pub fn budget_cents(&self) -> Option<u64> {
        self.budget_cents
    }

    /// Whole cents; `None` when something had no price.
    pub fn list_cost_cents(&self) -> Option<u64> {
        (!self.unpriced).then_some(self.nano_usd / NANO_USD_PER_CENT)
    }

    /// Whether requests could go on under this budget.
    pub fn is_below(&self, cents: u64) -> bool {
        !self.unpriced && self.nano_usd < cents.saturating_mul(NANO_USD_PER_CENT)
    }

    /// Whether no request may be made any more.
    pub fn is_spent(&self) -> bool {
        self.budget_cents.is_some_and(|cents| !self.is_below(cents))
    }

    /// Whether a turn has stopped for that, and said so.
    pub fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether nothing that is said to the session lets it go on, short of another budget.
    pub fn is_at_budget(&self) -> bool {
        self.stopped || self.is_spent()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Usage;

    fn ended(cost_nano_usd: Option<u64>, input_tokens: u64) -> RequestEnded {
        let usage = Usage { input_tokens, ..Usage::default() };
        RequestEnded { cost_nano_usd, usage, ..RequestEnded::new("r") }
    }

    #[test]
    fn shown_cents_reach_the_budget_when_it_is_spent_and_not_before() {
        let mut spending = Spending { budget_cents: Some(5), ..Spending::default() };
        spending.request_ended(&ended(Some(49_999_999), 1));
        assert_eq!((spending.list_cost_cents(), spending.is_spent()), (Some(4), false));

        spending.request_ended(&ended(Some(1), 1));
        assert_eq!((spending.list_cost_cents(), spending.is_spent()), (Some(5), true));
        assert!(!spending.is_below(5) && spending.is_below(6));
    }

    #[test]
    fn what_has_no_price_cannot_be_measured_and_what_used_nothing_costs_nothing() {
        let mut spending = Spending { budget_cents: Some(5), ..Spending::default() };
        spending.request_ended(&ended(None, 0));
        assert_eq!((spending.list_cost_cents(), spending.is_spent()), (Some(0), false));

        spending.request_ended(&ended(None, 1));
        assert_eq!((spending.list_cost_cents(), spending.is_spent()), (None, true));
        assert!(!spending.is_below(u64::MAX));
    }
}

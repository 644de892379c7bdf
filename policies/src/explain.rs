//! Why one request is decided as it is: every rule, in order, and where it parted. What a change of
//! policy changes is [`effect`]'s.

pub mod effect;

use core::fmt;

use crate::denial;
use crate::egress::{Decision, EgressRequest};
use crate::path::CanonicalPath;
use crate::policy::Policy;

/// The decision about one request and what every rule had to say.
#[derive(Debug)]
pub struct Explanation {
    /// Rules in order; those behind the deciding one are not reached.
    pub steps: Vec<Step>,
    /// `allowed by egress.allow[2], credential "github"`, or the reason of the denial.
    pub outcome: String,
    pub allowed: bool,
    /// How many seconds an operator has to say yes, where the rule asks for that.
    pub asks: Option<u64>,
    pub hint: Option<String>,
}

/// What one rule had to say.
#[derive(Debug)]
pub struct Step {
    pub rule: String,
    /// What the rule allows, in one line.
    pub summary: String,
    /// `matches`, or why not, or `not reached`.
    pub verdict: String,
}

/// Explains the decision about one request; the decision itself is [`Policy::decide`]'s.
pub fn explain(policy: &Policy, request: &EgressRequest<'_>) -> Explanation {
    let path = CanonicalPath::parse(request.path);
    let mut decided = denial::of_method(policy, request.method).is_some();
    let steps = policy
        .rules
        .iter()
        .map(|rule| {
            let verdict = match rule.check(request, &path) {
                _ if decided => "not reached".to_owned(),
                Ok(()) => {
                    decided = true;
                    "matches".to_owned()
                }
                Err(miss) => denial::of_miss(policy, Some(rule), miss, request).reason,
            };
            Step { rule: rule.name.clone(), summary: rule.to_string(), verdict }
        })
        .collect();
    match policy.decide(request) {
        Decision::Allowed(permit) => {
            let credential = permit.carries().map_or_else(
                || ", no credential".to_owned(),
                |names| format!(", credential \"{}\"", names.replace(", ", "\", \"")),
            );
            let budget =
                permit.budget().map_or_else(String::new, |budget| format!(", {}", budget.quotas));
            let asks = permit.asks().map(|within| within.as_secs());
            let once = asks.map_or_else(String::new, |seconds| {
                format!(", once an operator has said yes within {seconds} s")
            });
            let outcome = format!("allowed by {}{credential}{budget}{once}", permit.rule());
            Explanation { steps, outcome, allowed: true, asks, hint: None }
        }
        Decision::Denied(denial) => {
            let (outcome, hint) = (denial.reason, denial.hint);
            Explanation { steps, outcome, allowed: false, asks: None, hint }
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            writeln!(f, "{}: {}\n    {}", step.rule, step.summary, step.verdict)?;
        }
        f.write_str(&self.outcome)?;
        match &self.hint {
            Some(hint) => write!(f, "\n{hint}"),
            None => Ok(()),
        }
    }
}

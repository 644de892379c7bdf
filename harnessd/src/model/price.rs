//! What a model's tokens cost, in whole numbers, so that a sum is the same everywhere.

use crate::log::Usage;

/// Prices at the list, in billionths of a US dollar for a thousand tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    input: u64,
    output: u64,
    cache_write: u64,
    cache_read: u64,
}

impl Price {
    /// From US dollars for a million tokens, as price lists have them.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast from a float saturates, and a negative price is refused before"
    )]
    pub fn of_million(input: f64, output: f64, cache_write: f64, cache_read: f64) -> Self {
        let nano = |usd: f64| (usd * 1_000_000.0).round() as u64;
        Self {
            input: nano(input),
            output: nano(output),
            cache_write: nano(cache_write),
            cache_read: nano(cache_read),
        }
    }

    /// What one request cost, in billionths of a US dollar.
    pub fn of(self, usage: &Usage) -> u64 {
        let parts = [
            (usage.input_tokens, self.input),
            (usage.output_tokens, self.output),
            (usage.cache_creation_input_tokens, self.cache_write),
            (usage.cache_read_input_tokens, self.cache_read),
        ];
        let cost: u128 = parts.iter().map(|(n, price)| u128::from(*n) * u128::from(*price)).sum();
        u64::try_from(cost / 1000).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_costs_what_the_list_says() {
        let price = Price::of_million(3.0, 15.0, 3.75, 0.3);
        let usage = Usage {
            input_tokens: 1_000_000,
            output_tokens: 1000,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: 10,
        };

        // 3 dollars, 1.5 cents, 3 millionths of a dollar.
        assert_eq!(price.of(&usage), 3_000_000_000 + 15_000_000 + 3_000);
    }
}

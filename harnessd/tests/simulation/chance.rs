//! All chance of a simulation: one seed, one sequence (splitmix64).

use std::sync::Mutex;
use std::time::Duration;

pub struct Chance(Mutex<u64>);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }

    pub fn next(&self) -> u64 {
        let mut state = self.0.lock().unwrap();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True `percent` times in a hundred.
    pub fn now_and_then(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn millis(&self, limit: u64) -> Duration {
        Duration::from_millis(self.below(limit + 1))
    }

    pub fn one_of<T: Copy>(&self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(choices.len() as u64)).unwrap()]
    }
}

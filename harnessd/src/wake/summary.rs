//! Asks the model to sum up what the next contexts leave out, and appends what it wrote.
//!
//! The log stays as it is: a summary is one more event, and only profiles that ask for it show it.

use std::time::Duration;

use super::*;
use crate::log::Summary;

/// Before a summary that failed is tried again.
const PAUSE: Duration = Duration::from_secs(1);

impl Run {
    /// Sums up the events before `upto` that the context shows now.
    pub(super) async fn summarise(&mut self, profile: Profile, upto: u64) -> Result<(), WakeError> {
        if self.state.summary_failures > 0 && !self.wait(PAUSE).await? {
            return Ok(());
        }
        let cut = profile.cut(&self.state);
        let from = cut.from;
        let prompt = self.summary_prompt(cut, upto).await?;
        let request = self.begin_request(profile, from, true).await?;
        let begun = Instant::now();
        let outcome = self.ask(prompt, &|_| {}).await?;
        let mut ended = RequestEnded::new(request.clone());
        ended.duration_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut batch = Vec::new();
        match outcome {
            Err(failure) => ended.failure = Some(failure),
            Ok(answer) => {
                ended.usage = answer.usage;
                let price = self.parts.models.price(&self.agent.model);
                ended.cost_nano_usd = price.map(|price| price.of(&answer.usage));
                let texts = answer.blocks.iter().filter(|block| block["type"] == "text");
                let texts: Vec<&str> = texts.filter_map(|block| block["text"].as_str()).collect();
                let text = texts.join("\n\n");
                if text.trim().is_empty() {
                    let message = "the model was asked for a summary and wrote none";
                    let failure = Failure::new(ErrorKind::ModelRequestFailed, message, true);
                    ended.failure = Some(failure);
                } else {
                    let profile = profile.to_string();
                    batch.push(Body::Summary(Summary { request, profile, upto, text }).into());
                }
                ended.model = answer.model;
                ended.message = answer.message;
                ended.stop_reason = answer.stop_reason;
            }
        }
        batch.push(Body::ModelRequestEnded(ended).into());
        Ok(self.append(batch).await?)
    }
}

//! Asks the model to sum up what the next contexts leave out, and appends what it wrote.
//!
//! The log stays as it is: a summary is one more event, and only profiles that ask for it show it.

use std::time::Duration;

use super::*;
use crate::log::Summary;
use crate::model::Answer;

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
                match written(&answer) {
                    Ok(text) => {
                        let profile = profile.to_string();
                        batch.push(Body::Summary(Summary { request, profile, upto, text }).into());
                    }
                    Err(message) => {
                        let failure = Failure::new(ErrorKind::ModelRequestFailed, message, true);
                        ended.failure = Some(failure);
                    }
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

/// The summary that an answer is, or why it is none: from now on it stands for all that happened,
/// so half of one, or the reasons of a refusal, must not.
fn written(answer: &Answer) -> Result<String, String> {
    let reason = answer.stop_reason.as_deref().unwrap_or("no reason given");
    if answer.cut || !matches!(reason, "end_turn" | "stop_sequence") {
        return Err(format!("the model was asked for a summary and did not finish it: {reason}"));
    }
    let texts = answer.blocks.iter().filter(|block| block["type"] == "text");
    let texts: Vec<&str> = texts.filter_map(|block| block["text"].as_str()).collect();
    let text = texts.join("\n\n");
    if text.trim().is_empty() {
        return Err("the model was asked for a summary and wrote none".to_owned());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answer(stop_reason: Option<&str>, text: &str) -> Answer {
        let blocks = vec![json!({ "type": "text", "text": text })];
        let stop_reason = stop_reason.map(str::to_owned);
        Answer { blocks, stop_reason, ..Answer::default() }
    }

    #[test]
    fn only_an_answer_that_ended_by_itself_is_a_summary() {
        for reason in ["end_turn", "stop_sequence"] {
            assert_eq!(written(&answer(Some(reason), "so far")), Ok("so far".to_owned()));
        }
        for reason in
            ["refusal", "max_tokens", "model_context_window_exceeded", "pause_turn", "tool_use"]
        {
            let why = written(&answer(Some(reason), "I cannot")).unwrap_err();
            assert!(why.contains(reason), "{why}");
        }
        assert!(written(&answer(None, "so far")).is_err());
        assert!(written(&answer(Some("end_turn"), " ")).is_err());
        let cut = Answer { cut: true, ..answer(Some("end_turn"), "so far") };
        assert!(written(&cut).is_err());
    }
}

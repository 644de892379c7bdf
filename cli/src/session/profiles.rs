//! What a model is shown of a session: chosen, and compared with what else could be.

use std::process::ExitCode;

use serde_json::Value;

use crate::api::Harness;
use crate::args::Global;
use crate::failure::Failure;
use crate::term;
use crate::wire::text_at;

pub async fn choose(
    global: &Global,
    harness: &Harness,
    session: &str,
    profile: &str,
) -> Result<ExitCode, Failure> {
    let chosen = harness.choose_profile(session, profile).await?;
    if global.json {
        term::json_line(&chosen)?;
    } else {
        let name = text_at(&chosen, &["profile"]);
        term::line(&format!("from its next model request on: {}", term::printable(&name)))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn replay(
    global: &Global,
    harness: &Harness,
    session: &str,
    profiles: &[String],
) -> Result<ExitCode, Failure> {
    let mut rows = vec![
        ["PROFILE", "REQUESTS", "SUMMARIES", "BYTES", "LONGEST", "KEPT", "LAST BEGINS AT"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for profile in profiles {
        let report = harness.replay(session, profile).await?;
        if global.json {
            term::json_line(&report)?;
            continue;
        }
        let number = |key: &str| report.get(key).and_then(Value::as_u64).unwrap_or(0);
        let kept = number("bytes_kept") * 100 / number("bytes").max(1);
        rows.push(vec![
            text_at(&report, &["profile"]),
            number("requests").to_string(),
            number("summaries").to_string(),
            number("bytes").to_string(),
            number("bytes_most").to_string(),
            format!("{kept}%"),
            format!("event {}", number("last_begins_at")),
        ]);
    }
    if !global.json {
        term::write_out(term::columns(&rows).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

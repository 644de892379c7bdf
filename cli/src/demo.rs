//! `cleanhands demo`: the whole story on real parts, in a private directory.
//!
//! Three daemons, a vault with one token, a billing API that demands it, an agent whose scripted
//! model drives real tools through harnessd's API. The agent obeys a poisoned invoice; harnessd is
//! killed in mid-call; the sandbox is killed in mid-call. Everything that is claimed is checked;
//! one claim that does not hold makes the exit status 1. Read `story` for the lines, `stage` for
//! what runs, `play` for what happens, `proof` for what is checked at the end.

pub mod billing;
mod fingerprint;
mod play;
mod proof;
pub mod seal;
mod search;
mod stage;
mod story;
mod voice;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::args::{Demo, Global};
use crate::daemons::Daemon;
use crate::demo::fingerprint::Fingerprints;
use crate::demo::play::Play;
use crate::demo::stage::Stage;
use crate::demo::voice::Voice;
use crate::failure::{CLOSED, Failure, INTERRUPTED, USAGE};
use crate::stop::Stop;
use crate::term;

/// The demo takes a quarter of this; longer means that something waits for ever.
const LONGEST: Duration = Duration::from_secs(150);
/// Milliseconds between pieces of the model's text when somebody reads along.
const PACE_MS: u64 = 40;

/// Plays the story and ends by itself.
pub async fn demo(global: &Global, options: Demo) -> Result<ExitCode, Failure> {
    if options.runtime_dir.is_some() {
        let text = "the demo starts daemons of its own: --runtime-dir says nothing to it";
        return Err(Failure::new(text).with_status(USAGE));
    }
    let mut voice = Voice::new(global.json);
    has_curl()?;
    let started = Instant::now();
    voice.line(&format!(
        "\n{}",
        voice.style().bold("cleanhands demo: an agent works with a credential it never holds")
    ))?;
    // From here on there is something to clear up.
    let mut stop = Stop::watch()?;
    let mut stage = Stage::set(if voice.watched() { PACE_MS } else { 1 }).await?;
    let outcome = tokio::select! {
        outcome = perform(&mut stage, &mut voice) => outcome,
        () = stop.asked() => Err(interrupted()),
        () = tokio::time::sleep(LONGEST) => {
            Err(Failure::new(format!("the demo hangs after {} s", LONGEST.as_secs())))
        }
    };
    let bad = stage.clear().await;
    let proof = match outcome {
        Ok(proof) => proof,
        Err(failure) if matches!(failure.status, INTERRUPTED | CLOSED) => {
            // A line of the model's may have been left open; a closed output takes no more.
            let _ = voice.line("");
            return Err(failure);
        }
        Err(failure) => {
            let logs = stage.keep().join("logs");
            let logs = format!("the daemons' logs are kept in {}", logs.display());
            let hint = failure.hint.clone().map_or(logs.clone(), |hint| format!("{hint}\n{logs}"));
            return Err(failure.with_hint(hint));
        }
    };
    voice.line("")?;
    let drained = "harnessd, sandboxd and proxyd drained in this order and ended well";
    voice.claim(bad.is_empty(), if bad.is_empty() { drained } else { &bad[0] })?;
    finish(stage, &voice, &options, proof, started.elapsed())
}

fn interrupted() -> Failure {
    Failure::new("interrupted").with_status(INTERRUPTED)
}

/// curl runs inside the sandbox, from this host's /usr.
fn has_curl() -> Result<(), Failure> {
    let path = ["/usr/bin/curl", "/bin/curl", "/usr/local/bin/curl"];
    if path.iter().any(|path| std::path::Path::new(path).exists()) {
        return Ok(());
    }
    Err(Failure::new("the demo needs curl, which is not below /usr").with_hint("install curl"))
}

async fn perform(stage: &mut Stage, voice: &mut Voice) -> Result<serde_json::Value, Failure> {
    let recognised = stage.seal().await?;
    let prints = Fingerprints::from_lines(&recognised.fingerprints)
        .ok_or_else(|| Failure::new("the sealing process wrote no fingerprints"))?;
    introduce(stage, voice)?;
    let mut play = Play::begin(stage, voice, prints).await?;
    play.until_the_end().await?;
    proof::prove(play).await
}

fn introduce(stage: &Stage, voice: &mut Voice) -> Result<(), Failure> {
    let pid = |daemon| stage.pid(daemon).map(|pid| pid.to_string()).unwrap_or_default();
    let billing = stage.billing.pid().map(|pid| pid.to_string()).unwrap_or_default();
    voice.line("")?;
    voice.table(&[
        ("proxyd", format!("process {}: the vault and the only way out", pid(Daemon::Proxyd))),
        ("sandboxd", format!("process {}: sandboxes for tools", pid(Daemon::Sandboxd))),
        ("harnessd", format!("process {}: session log and model loop", pid(Daemon::Harnessd))),
        (
            "billing API",
            format!(
                "process {billing}: https://{}, another company's; demands a token",
                story::BILLING_HOST
            ),
        ),
        (
            "token",
            "drawn at random and sealed in proxyd's vault by a process that has ended;\n\
             nobody else has it, this demo included: it knows only hashes to look for"
                .to_owned(),
        ),
        ("directory", stage.dir().display().to_string()),
    ])?;
    let pids = [Daemon::Proxyd, Daemon::Sandboxd, Daemon::Harnessd].map(|d| stage.pid(d));
    let separate = pids.iter().all(Option::is_some)
        && pids[0] != pids[1]
        && pids[1] != pids[2]
        && pids[0] != pids[2];
    voice.line("")?;
    voice.claim(separate, "three daemons, three separate processes")
}

fn finish(
    stage: Stage,
    voice: &Voice,
    options: &Demo,
    mut proof: serde_json::Value,
    took: Duration,
) -> Result<ExitCode, Failure> {
    let held = voice.failed().is_empty();
    if options.keep || !held {
        let kept = stage.keep();
        voice.line(&format!("\n  everything is kept in {}", kept.display()))?;
        proof["directory"] = serde_json::json!(kept);
    }
    let claims = voice.held();
    if voice.quiet() {
        proof["claims_held"] = serde_json::json!(claims);
        proof["claims_failed"] = serde_json::json!(voice.failed());
        proof["seconds"] = serde_json::json!(took.as_secs_f64());
        term::json_line(&proof)?;
    } else if held {
        let seconds = took.as_secs_f64();
        let text = format!("all {claims} claims held, in {seconds:.1} s");
        voice.line(&format!("\n  {}\n", voice.style().good(&text)))?;
    }
    if held {
        return Ok(ExitCode::SUCCESS);
    }
    let failed = voice.failed().join("\n  ");
    Err(Failure::new(format!("the demo's claims did not all hold:\n  {failed}")))
}

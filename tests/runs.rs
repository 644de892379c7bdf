//! Promise: whoever gives agents tasks at the same moment gets an answer to each.
use std::process::Stdio;

use cleanhands_tests::installation::{Installation, Setup};
use serde_json::json;

#[test]
fn the_first_runs_under_a_policy_may_come_all_at_once() {
    let script = json!([{ "text": "Done." }]);
    let policy = "[sandbox]\nroot = \"host\"\n";
    let setup = Setup::default().policy("dev", policy).script(script);
    let installation = Installation::start(&setup);
    let begin = |_| {
        let mut run = installation.command(&["run", "--environment", "dev", "--model", "m", "go"]);
        run.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };

    let runs: Vec<_> = (0..12).map(begin).collect();

    for run in runs {
        let output = run.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("Done."), "{output:?}");
    }
}

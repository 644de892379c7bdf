//! Promise: whoever reads the result of a failed command reads why its way out refused something,
//! whatever the client printed.
use cleanhands_tests::api::{Api, tool_results};
use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::upstream::Upstream;
use serde_json::json;

const TOKEN: &str = "SECRET-CANARY-refusals-91b20cd4aa";
const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
paths = ["/hello"]
credential = "api"
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example"]
"#;
/// A client with a list of roots of its own: any certificate that is not proxyd's.
const OWN_ROOTS: &str = "printf '%s\\n' \"$OWN\" >own.pem && \
    curl -sS --cacert own.pem https://api.example/hello";
const UNTRUSTED: &str = "api.example:443: tls_untrusted: the client does not trust proxyd's \
    certificate for this host";

async fn started(turns: serde_json::Value) -> (Installation, Upstream) {
    let upstream = Upstream::start(&["api.example"], &format!("Bearer {TOKEN}")).await;
    let own = rcgen::generate_simple_self_signed(["own.example".to_owned()]).unwrap().cert.pem();
    let policy = format!("{POLICY}[sandbox.env]\nOWN = '''\n{own}'''\n");
    let setup =
        Setup::default().policy("dev", &policy).upstream("api.example", &upstream).script(turns);
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", TOKEN).await;
    (installation, upstream)
}

fn shell(installation: &Installation, script: &str) -> (Option<i32>, String, String) {
    tokio::task::block_in_place(|| installation.shell("dev", script))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_command_is_told_what_was_refused_whatever_its_client_prints() {
    let (installation, _upstream) = started(json!([])).await;

    for (script, note) in [
        ("curl -fs https://evil.example/", "policy \"dev\" does not list evil.example"),
        ("curl -fs -X POST https://api.example/hello", "POST"),
        ("curl -fs https://api.example/other", "api.example:443: "),
        ("exec 3<>/dev/tcp/evil.example/22 && cat <&3", "evil.example:22: host_not_listed"),
        ("curl -s https://single/", "single: "),
    ] {
        let (status, out, err) = shell(&installation, &format!("{script} 2>/dev/null"));

        assert_ne!(status, Some(0), "{script}: {out} {err}");
        let told = err.lines().any(|line| line.starts_with("cleanhands: refused: "));
        assert!(told && err.contains(note), "{script}: {out} {err}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_copes_and_one_that_fails_by_itself_are_told_nothing() {
    let (installation, _upstream) = started(json!([])).await;

    for (script, status) in [
        ("curl -fs https://evil.example/ || true", 0),
        ("curl -fs https://api.example/hello", 0),
        ("curl -fs https://api.example/hello && exit 3", 3),
    ] {
        let (ended, _, err) = shell(&installation, script);

        assert_eq!((ended, err.as_str()), (Some(status), ""), "{script}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_a_list_of_roots_of_its_own_fails_with_the_reason_in_result_and_audit() {
    let (installation, upstream) = started(json!([])).await;

    let (status, out, err) = shell(&installation, &format!("cd /tmp && {OWN_ROOTS}"));

    assert_ne!(status, Some(0), "{out} {err}");
    assert!(err.contains(UNTRUSTED) && err.contains("SSL_CERT_FILE"), "{err}");
    assert!(upstream.seen().is_empty());
    let audit = installation.audit().await;
    let reasons: Vec<_> = audit.iter().filter_map(|record| record.reason.as_deref()).collect();
    assert!(reasons.iter().any(|reason| reason.starts_with("tls_untrusted")), "{audit:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_reads_in_the_tools_result_what_was_refused() {
    let quiet = "curl -fs https://evil.example/";
    let (installation, _upstream) = started(json!([
        { "text": "One.", "tools": [{ "name": "bash", "input": { "command": quiet } }] },
        { "text": "Two.", "tools": [{ "name": "bash", "input": { "command": OWN_ROOTS } }] },
        { "text": "Finished." },
    ]))
    .await;
    let api = Api::new(&installation.layout.harnessd());
    let session = api.session("dev").await;

    api.say(&session, "go").await;

    let results = tool_results(&api.until_idle(&session).await);
    assert_eq!(results.len(), 2, "{results:?}");
    assert!(results[0].contains("does not list evil.example"), "{results:?}");
    assert!(results[1].contains(UNTRUSTED), "{results:?}");
}

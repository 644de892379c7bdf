//! Secrets that a command of the operator's writes: one run for all who wait, nothing of proxyd's
//! in its reach, and nothing leaves where it fails.

use std::sync::{Arc, Mutex};

use crate::support::*;
use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::AsyncWriteExt;

const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
credential = "api"
[credentials.api]
secret = "exec:op"
inject = { bearer = true }
hosts = ["api.test"]
"#;

/// `[commands.op]` that runs the script beside proxyd.toml.
fn configured(more: &str) -> String {
    format!(
        "[commands.op]\ncommand = [\"/bin/sh\", \"DIR/op.sh\", \"an argument\"]\n\
         read = [\"DIR\"]\nwrite = [\"DIR\"]\n{more}\n"
    )
}

type Seen = Arc<Mutex<Vec<String>>>;

/// An API that notes what it is shown and takes all of it but what is in `refused`.
async fn api(refused: &'static str) -> (Upstream, Seen) {
    let seen = Seen::default();
    let log = Arc::clone(&seen);
    let upstream = Upstream::tls("api.test", &[b"http/1.1"], move |mut stream| {
        let log = Arc::clone(&log);
        async move {
            while let Some((head, _)) = request(&mut stream).await {
                let shown = field(&head, "authorization").unwrap_or("none").to_owned();
                let status = if !refused.is_empty() && shown.contains(refused) { 401 } else { 200 };
                log.lock().unwrap().push(shown);
                let answer = format!("HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n");
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
                let _ = stream.flush().await;
            }
        }
    });
    (upstream.await, seen)
}

async fn start(script: &str, more: &str, api: &Upstream) -> Proxyd {
    let files = [("op.sh", script)];
    Proxyd::with(POLICY, &[("api.test", api)], &configured(more), &files, &[]).await
}

async fn ask(lease: &Lease) -> (u16, String) {
    let mut stream = lease.h1("api.test").await;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n").await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;
    (head[9..12].parse().unwrap(), String::from_utf8_lossy(&body).into_owned())
}

fn report(proxyd: &Proxyd, name: &str) -> String {
    std::fs::read_to_string(proxyd.layout.config.join(name)).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_run_serves_all_who_wait_and_those_who_come_later() {
    let (api, seen) = api("").await;
    let script = "cd ${0%/*} && echo run >>runs && echo COMMAND-CANARY-1";
    let proxyd = start(script, "", &api).await;
    let lease = proxyd.lease().await;

    let lease = Arc::new(lease);
    let asked = (0..20).map(|_| {
        let lease = Arc::clone(&lease);
        tokio::spawn(async move { ask(&lease).await })
    });
    let mut answers = Vec::new();
    for asked in asked.collect::<Vec<_>>() {
        answers.push(asked.await.unwrap());
    }
    let later = ask(&lease).await;

    assert!(answers.iter().chain([&later]).all(|(status, _)| *status == 200), "{answers:?}");
    assert_eq!(seen.lock().unwrap().len(), 21);
    assert!(seen.lock().unwrap().iter().all(|shown| shown == "Bearer COMMAND-CANARY-1"));
    assert_eq!(report(&proxyd, "runs"), "run\n");
    assert!(!proxyd.log().contains("CANARY"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_has_its_input_its_arguments_and_nothing_of_proxyds() {
    let (api, seen) = api("").await;
    let script = r#"
        cd ${0%/*} || exit 9
        {
            echo "argument $1"
            # What shells set by themselves is passed over.
            own='^(PWD|OLDPWD|SHLVL|_)='
            echo "environment $(env | grep -v -E "$own" | tr '\n' ' ')"
            for path in state/proxyd state/proxyd/vault state/proxyd/audit; do
                ls ../$path >/dev/null 2>&1 && echo "reached $path"
            done
            cat ../state/proxyd/vault/vault.key >/dev/null 2>&1 && echo reached the key
            for fd in /proc/self/fd/*; do
                case ${fd##*/} in 0|1|2) continue;; esac
                readlink $fd | grep -q -e socket: -e vault && echo "descriptor $fd"
            done
            # The worker that started it, and proxyd, which started that.
            proxyd=$(sed 's/.*) . \([0-9]*\) .*/\1/' /proc/$PPID/stat)
            for process in $PPID $proxyd; do
                (: </proc/$process/mem) 2>/dev/null && echo "opened memory of proxyd's"
                for link in exe cwd root fd/0 fd/1; do
                    readlink /proc/$process/$link && echo "followed $link of proxyd's"
                done
            done
            grep -h -e ^NoNewPrivs -e ^Seccomp: /proc/self/status
        } >report
        read -r input
        echo "$input-again"
    "#;
    let more = "input = \"local:op-login\"\nenvironment = { HOME = \"/nowhere\" }";
    let proxyd = start(script, more, &api).await;
    let value = Bytes::from_static(b"INPUT-CANARY");
    let control = proxyd.control();
    control.call(http::Method::PUT, "/v1/secrets/op-login", None, value).await.unwrap();
    let lease = proxyd.lease().await;

    assert_eq!(ask(&lease).await.0, 200);

    assert_eq!(*seen.lock().unwrap(), ["Bearer INPUT-CANARY-again"]);
    let expected =
        "argument an argument\nenvironment HOME=/nowhere \nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(report(&proxyd, "report"), expected);
}

/// The key of a vault as systemd passes it.
const KEY: &str = "SYSTEMD-KEY-CANARY-0123456789abcdef";

#[tokio::test(flavor = "multi_thread")]
async fn no_command_reads_a_key_of_proxyds_whatever_its_table_says() {
    let client = Identity::new();
    let script = r#"
        cd ${0%/*} || exit 9
        for file in credentials/proxyd-master client.key password ../state/proxyd/vault/*; do
            { ln $file out/stolen || mv $file out/stolen; } 2>/dev/null && echo "moved $file"
            { head -c 1 <$file >/dev/null; } 2>/dev/null && echo "read $file"
        done >out/report
        # A device would lead to the disk below all files.
        mknod out/device b 7 0 2>/dev/null && echo "made a device" >>out/report
        echo looked >>out/report
        cat plain
    "#;
    let files = [
        ("op.sh", script),
        ("plain", "COMMAND-CANARY\n"),
        ("password", "PROXY-PASSWORD-CANARY"),
        ("client.key", &client.key_pem),
        ("client.pem", &client.chain_pem),
        ("credentials/proxyd-master", KEY),
        ("out/report", ""),
    ];
    let row = "[upstreams.\"corp.test\"]\nclient-certificate = \"DIR/client.pem\"\n\
        client-key = \"DIR/client.key\"\nproxy = { url = \"http://proxy.test:3128\", user = \"u\", \
        password = \"file:DIR/password\" }";
    for reach in ["read = [\"DIR\"]\nwrite = [\"DIR\"]", "read = [\"/\"]\nwrite = [\"/\"]"] {
        let (api, seen) = api("").await;
        let command = "[commands.op]\ncommand = [\"/bin/sh\", \"DIR/op.sh\"]";
        let configured = format!("{command}\n{reach}\n{row}\n");
        let variables = [("CREDENTIALS_DIRECTORY", "DIR/credentials")];
        let upstreams = [("api.test", &api)];
        let proxyd = Proxyd::with(POLICY, &upstreams, &configured, &files, &variables).await;
        assert_eq!(proxyd.health().await.key_source, "systemd-credential");
        let lease = proxyd.lease().await;

        let (status, body) = ask(&lease).await;

        assert_eq!(status, 200, "{reach}: {body}");
        assert_eq!(*seen.lock().unwrap(), ["Bearer COMMAND-CANARY"]);
        assert_eq!(report(&proxyd, "out/report"), "looked\n", "{reach}");
        let key = std::fs::read_to_string(proxyd.layout.config.join("client.key")).unwrap();
        assert_eq!(key, client.key_pem, "{reach}");
    }
}

fn tell(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_request_waits_for_outlives_a_signal_to_all_processes_and_ends_with_proxyd() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let (api, seen) = api("").await;
        let script = "cd ${0%/*} && if [ -e pid ]; then echo COMMAND-CANARY; \
            else echo $$ >new && mv new pid && exec sleep 1234; fi";
        let mut proxyd = start(script, "", &api).await;
        let lease = Arc::new(proxyd.lease().await);
        let waiting = Arc::clone(&lease);
        let waiting = tokio::spawn(async move { ask(&waiting).await });
        until("the command runs", || async { !report(&proxyd, "pid").is_empty() }).await;
        let command: u32 = report(&proxyd, "pid").trim().parse().unwrap();
        let processes = children(proxyd.health().await.pid);
        assert_eq!(processes.len(), 3);

        // As systemd does, but for proxyd itself, which would give the rest two seconds.
        for pid in processes.iter().rev().chain([&command]) {
            tell(*pid, signal);
        }

        assert_eq!(waiting.await.unwrap().0, 200, "{signal:?} {}", proxyd.log());
        assert_eq!(ask(&lease).await.0, 200);
        assert_eq!(*seen.lock().unwrap(), ["Bearer COMMAND-CANARY"; 2]);
        proxyd.end(Signal::KILL);
        let gone = |pid: &u32| proc(*pid, "cmdline").is_none_or(|line| !line.contains("vault"));
        until("all have ended", || async { processes.iter().all(gone) }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_fails_lets_nothing_leave_and_is_not_run_for_each_request() {
    let (api, seen) = api("").await;
    for (script, more, why) in [
        ("echo COMMAND-CANARY; echo STDERR-CANARY >&2; exit 3", "", "ended with status 3"),
        ("echo short", "", "less than 8 bytes"),
        ("kill -9 $$", "", "by a signal"),
        ("echo COMMAND-CANARY; sleep 1000", "timeout = \"1s\"", "did not end within 1 s"),
        ("yes COMMAND-CANARY", "", "wrote more than any secret"),
        ("echo COMMAND-CANARY", "format = \"json\"", "no JSON object"),
        ("printf 'COMMAND-CANARY\\r\\nX: y\\n'", "", "control characters"),
    ] {
        let script = format!("echo run >>${{0%/*}}/runs\n{script}");
        let proxyd = start(&script, more, &api).await;
        let lease = proxyd.lease().await;

        let answers = [ask(&lease).await, ask(&lease).await];

        for (status, body) in &answers {
            assert!([403, 503].contains(status) && body.contains(why), "{why}: {status} {body}");
            assert!(!body.contains("CANARY"), "{body}");
        }
        assert_eq!(report(&proxyd, "runs"), "run\n", "{why}");
        assert!(!proxyd.log().contains("CANARY"), "{}", proxyd.log());
    }
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_command_started_ends_with_it() {
    let (api, _) = api("").await;
    for (script, more, status) in [
        // In a group of its own, with no hold on the output.
        (
            "cd ${0%/*}; bash -c 'set -m; sleep 1234 >/dev/null 2>&1 & echo $! >left'
             echo COMMAND-CANARY",
            "",
            200,
        ),
        ("sleep 1234 & echo $! >${0%/*}/left; wait", "timeout = \"1s\"", 503),
    ] {
        let proxyd = start(script, more, &api).await;
        let lease = proxyd.lease().await;

        assert_eq!(ask(&lease).await.0, status);

        let left: u32 = report(&proxyd, "left").trim().parse().unwrap();
        let line = || std::fs::read_to_string(format!("/proc/{left}/cmdline")).unwrap_or_default();
        until("it has ended", || async { !line().contains("1234") }).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_refuses_the_value_has_the_command_run_again_once() {
    let (api, seen) = api("CANARY-old").await;
    let script = "cd ${0%/*} && echo run >>runs && cat value && cat later >value";
    let files =
        [("op.sh", script), ("value", "COMMAND-CANARY-old\n"), ("later", "COMMAND-CANARY-new\n")];
    let proxyd = Proxyd::with(POLICY, &[("api.test", &api)], &configured(""), &files, &[]).await;
    let lease = proxyd.lease().await;

    let (status, _) = ask(&lease).await;

    let runs = report(&proxyd, "runs");
    assert_eq!(status, 200, "{:?} {runs} {}", seen.lock().unwrap(), proxyd.log());
    let expected = ["Bearer COMMAND-CANARY-old", "Bearer COMMAND-CANARY-new"];
    assert_eq!(*seen.lock().unwrap(), expected);
    assert_eq!(report(&proxyd, "runs"), "run\nrun\n");
    // One that came because of a refusal is not taken for the culprit so soon: no loop.
    proxyd.write_config("value", "COMMAND-CANARY-older\n");
    assert_eq!(ask(&lease).await.0, 200);
    assert_eq!(report(&proxyd, "runs"), "run\nrun\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_is_had_again_when_its_time_is_over_and_serves_on_only_where_that_is_configured() {
    for (more, after) in [("refresh = \"1s\"", 503), ("refresh = \"1s\"\nstale = \"1h\"", 200)] {
        let (api, seen) = api("").await;
        let script = "cat ${0%/*}/value";
        let files = [("op.sh", script), ("value", "COMMAND-CANARY-1\n")];
        let configured = configured(more);
        let proxyd = Proxyd::with(POLICY, &[("api.test", &api)], &configured, &files, &[]).await;
        let lease = proxyd.lease().await;
        assert_eq!(ask(&lease).await.0, 200);
        proxyd.write_config("value", "COMMAND-CANARY-2\n");
        until("the new value is used", || async {
            ask(&lease).await.0 == 200
                && seen.lock().unwrap().last().unwrap() == "Bearer COMMAND-CANARY-2"
        })
        .await;
        std::fs::remove_file(proxyd.layout.config.join("value")).unwrap();

        match after {
            200 => {
                // Until the command has failed and beyond.
                until("the command has failed", || async {
                    assert_eq!(ask(&lease).await.0, 200);
                    seen.lock().unwrap().len() > 20
                })
                .await;
            }
            _ => until("nothing leaves", || async { ask(&lease).await.0 == after }).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_names_a_command_and_never_what_it_runs() {
    let (api, seen) = api("").await;
    let policy = POLICY.replace("exec:op", "exec:other");
    let files = [("op.sh", "echo COMMAND-CANARY")];
    let proxyd = Proxyd::with(&policy, &[("api.test", &api)], &configured(""), &files, &[]).await;
    let lease = proxyd.lease().await;

    let (status, body) = ask(&lease).await;

    assert_eq!(status, 503);
    assert!(body.contains("[commands.other]"), "{body}");
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_command_gave_ends_with_what_it_was_given() {
    let (api, seen) = api("").await;
    let proxyd = start("read -r input; echo of-$input", "input = \"local:login\"", &api).await;
    proxyd.put("login", "INPUT-CANARY-1").await;
    let lease = proxyd.lease().await;
    assert_eq!(ask(&lease).await.0, 200);

    proxyd.put("login", "INPUT-CANARY-2").await;

    assert_eq!(ask(&lease).await.0, 200);
    let expected = ["Bearer of-INPUT-CANARY-1", "Bearer of-INPUT-CANARY-2"];
    assert_eq!(*seen.lock().unwrap(), expected);
    proxyd.remove("login").await;
    let (status, body) = ask(&lease).await;
    assert!(status == 502 && body.contains("credential_missing"), "{status} {body}");
    assert_eq!(seen.lock().unwrap().len(), 2);
}

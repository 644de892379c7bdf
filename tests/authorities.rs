//! Promise: the certificate authority can be replaced at any time, and nobody notices: neither what
//! lives in sandboxes and containers, nor what begins afterwards.
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use cleanhands_tests::installation::Installation;
use cleanhands_tests::wait;
use serde_json::Value;

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
"#;

/// Asks once before anything, and once for each step that it is told of.
const LIVE: &str = "ask() { curl -sS --max-time 50 https://api.example/$1 && echo \" $1\"; }; \
    cksum < /etc/ssl/cleanhands-ca.pem > told; ask before; touch done-before; \
    for step in rotated restarted again; do until [ -e go-$step ]; do sleep 0.02; done; \
    ask $step; touch done-$step; done; cksum < /etc/ssl/cleanhands-ca.pem | cmp - told";

/// A child that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn list(installation: &Installation, verb: &str) -> Vec<Value> {
    let output = installation.command(&["ca", verb, "--json"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A lease as a container has it: what `cleanhands lease open` wrote when it began, copied.
struct Held {
    open: Running,
    variables: Vec<(String, String)>,
}

impl Held {
    fn open(installation: &Installation, files: &Path) -> Self {
        let mut command = installation.command(&["lease", "open", "dev", "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap();
        let own = |(name, value): (&String, &Value)| (name.clone(), value.as_str().unwrap().into());
        let mut variables: Vec<(String, String)> =
            said["variables"].as_object().unwrap().iter().map(own).collect();
        for (name, value) in &mut variables {
            if name == "CURL_CA_BUNDLE" {
                let copy = files.join("bundle.pem");
                std::fs::copy(&value, &copy).unwrap();
                *value = copy.to_str().unwrap().to_owned();
            }
        }
        Self { open: Running(child), variables }
    }

    /// Ctrl-C, as far as a program sees it: the lease is given back.
    fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.open.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        assert!(self.open.0.wait().unwrap().success());
    }

    fn ask(&self) -> String {
        let mut command = Command::new("curl");
        command.env_clear().envs(self.variables.clone());
        let output = command.args(["-sS", "-m", "50", "https://api.example/"]).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn living_and_new_sandboxes_and_leases_verify_before_and_after_the_ca_is_replaced() {
    let (mut installation, _origin) = Installation::before(&["api.example"], POLICY).await;
    tokio::task::block_in_place(|| {
        let place = tempfile::tempdir().unwrap();
        let held = Held::open(&installation, place.path());
        let workspace = tempfile::tempdir().unwrap();
        let there = |name: &str| workspace.path().join(name).exists().then_some(());
        let mut command = installation.intruder("dev", workspace.path());
        command.args(["bash", "-c", LIVE]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut living = Running(command.spawn().unwrap());
        wait::until("the sandbox", || there("done-before"));
        let first = list(&installation, "list");
        assert_eq!(held.ask(), "ok");

        let mut fresh = Vec::new();
        for step in ["rotated", "restarted", "again"] {
            if step == "restarted" {
                installation.kill("proxyd");
                installation.start_daemon("proxyd");
            } else {
                list(&installation, "rotate");
            }
            std::fs::write(workspace.path().join(format!("go-{step}")), "").unwrap();
            wait::until(step, || there(&format!("done-{step}")));
            // A lease is not open again in the moment in which proxyd is.
            wait::until(step, || (held.ask() == "ok").then_some(()));
            fresh.push(Held::open(&installation, tempfile::tempdir().unwrap().path()));
            let curl = "curl -sS --max-time 50 https://api.example/";
            let (status, out, err) = installation.shell("dev", curl);
            assert_eq!((status, out.as_str()), (Some(0), "ok"), "{step}: {err}");
        }
        let output = BufReader::new(living.0.stdout.take().unwrap());
        let lines: Vec<_> = output.lines().map(Result::unwrap).collect();
        assert_eq!(lines, ["ok before", "ok rotated", "ok restarted", "ok again"]);
        assert!(living.0.wait().unwrap().success(), "its certificates were replaced");

        let last = list(&installation, "list");
        assert_eq!(last.len(), 3, "{last:?}");
        assert_eq!((&last[2]["sha256"], &last[2]["issues"]), (&first[0]["sha256"], &false.into()));
        assert_eq!(last[0]["issues"], true);
        // Without anybody who trusts them, the former ones are retired.
        fresh.into_iter().chain([held]).for_each(Held::end);
        assert!(installation.stop("sandboxd").success());
        wait::until("the former ones retired", || {
            (list(&installation, "list").len() == 1).then_some(())
        });
        assert_eq!(list(&installation, "list")[0]["sha256"], last[0]["sha256"]);
    });
}

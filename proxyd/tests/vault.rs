//! The vault child as a process, over its real socket: what it answers, how it is confined, how
//! it ends. The messages are written by hand, as proxyd's other process writes them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const PROXYD: &str = env!("CARGO_BIN_EXE_proxyd");
const CANARY: &str = "SECRET-CANARY-7f3a9b2c";

/// What may be asked of the vaults here.
const POLICY: &str = r#"
[[egress.allow]]
hosts = ["api.example"]
methods = ["GET"]
credential = "github"
[credentials.github]
secret = "local:github"
inject = { bearer = true }
hosts = ["*.other.example", "api.example"]
[credentials.git]
secret = "local:github"
inject = { basic = "x-access-token" }
hosts = ["*.b.example"]
[credentials.bare]
secret = "local:github"
inject = { placeholder = ["header"] }
hosts = ["a.example"]
env = "BARE"
[credentials.calendar]
secret = "local:refresh"
hosts = ["calendar.example"]
[credentials.calendar.inject.oauth2]
grant = "client-credentials"
token-url = "https://login.example/token"
client-id = "c"
[credentials.objects]
secret = "local:aws"
inject = { aws-sigv4 = { regions = ["eu-central-1"], services = ["s3"] } }
hosts = ["objects.example"]
env = "AWS_ACCESS_KEY_ID"
"#;

/// A credential of that policy, as the traffic process names it.
fn named(name: &str) -> Value {
    let set = policies::PolicySet::parse(&[("dev.toml".into(), POLICY.into())]).unwrap();
    let credential = &set.environment("dev").unwrap().credentials[name];
    let print = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(format!("{credential:?}")));
    json!({"environment": "dev", "name": name, "print": print})
}

struct Vault {
    child: Child,
    _policies: tempfile::TempDir,
    socket: Option<UnixStream>,
    open: Value,
}

type Answer = (Value, Vec<Vec<u8>>);

impl Vault {
    fn start(directory: &Path) -> Vault {
        let key = format!("created-file:{}", directory.join("vault.key").display());
        Self::start_with(directory, &key)
    }

    fn start_with(directory: &Path, key: &str) -> Vault {
        let mut vault = Self::spawn(directory, key, Stdio::inherit());
        vault.open = vault.read().unwrap().0;
        vault
    }

    fn spawn(directory: &Path, key: &str, says: Stdio) -> Vault {
        Self::spawn_by(Command::new(PROXYD), directory, key, says)
    }

    /// By a command that starts proxyd with the arguments that are given to it.
    fn spawn_by(mut command: Command, directory: &Path, key: &str, says: Stdio) -> Vault {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let policies = self::directory();
        let file = policies.path().join("dev.toml");
        std::fs::write(&file, POLICY).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        command
            .arg("vault")
            .arg(directory)
            .arg(key)
            .arg(policies.path())
            .env_clear()
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(says);
        let child = command.spawn().unwrap();
        drop(command);
        Vault { child, _policies: policies, socket: Some(ours), open: Value::Null }
    }

    fn read(&mut self) -> Option<Answer> {
        let socket = self.socket.as_mut().unwrap();
        let mut length = [0; 4];
        socket.read_exact(&mut length).ok()?;
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        socket.read_exact(&mut body).ok()?;
        let mut pieces = Vec::new();
        let mut rest = &body[4..];
        while let Some((length, after)) = rest.split_first_chunk() {
            let (piece, after) = after.split_at(u32::from_le_bytes(*length) as usize);
            pieces.push(piece.to_vec());
            rest = after;
        }
        let head = serde_json::from_slice(&pieces.remove(0)).unwrap();
        Some((head, pieces))
    }

    fn ask(&mut self, head: Value, parts: &[&[u8]]) -> Answer {
        let head = serde_json::to_vec(&head).unwrap();
        let mut body = 7u32.to_le_bytes().to_vec();
        for piece in std::iter::once(&head[..]).chain(parts.iter().copied()) {
            body.extend(u32::try_from(piece.len()).unwrap().to_le_bytes());
            body.extend(piece);
        }
        let socket = self.socket.as_mut().unwrap();
        socket.write_all(&u32::try_from(body.len()).unwrap().to_le_bytes()).unwrap();
        socket.write_all(&body).unwrap();
        self.read().expect("the child answers")
    }

    fn put(&mut self, name: &str, value: &str) -> Answer {
        self.ask(json!({"do": "put", "name": name}), &[value.as_bytes()])
    }

    fn render(&mut self, credential: &str, host: &str) -> Answer {
        self.ask(json!({"do": "render", "credential": named(credential), "host": host}), &[])
    }

    /// Closes the socket and gives the exit code, if the child ends in time.
    fn end(&mut self) -> Option<i32> {
        self.socket = None;
        self.wait()
    }

    fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the vault child did not end");
            std::thread::yield_now();
        }
    }

    fn proc(&self, file: &str) -> PathBuf {
        Path::new("/proc").join(self.child.id().to_string()).join(file)
    }
}

impl Drop for Vault {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    dir
}

fn texts(parts: &[Vec<u8>]) -> Vec<String> {
    parts.iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect()
}

#[test]
fn a_stored_value_is_rendered_for_its_hosts_and_no_other() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());

    let (missing, _) = vault.render("github", "api.example");
    let (stored, none) = vault.put("github", &format!("{CANARY}\n"));
    let (done, parts) = vault.render("github", "api.example");
    let (_, basic_parts) = vault.render("git", "a.b.example");
    let (refused, leaked) = vault.render("github", "evil.example");

    assert_eq!(missing["why"], "missing");
    assert_eq!(stored["secrets"][0]["version"], 1);
    assert!(none.is_empty());
    assert_eq!((&done["is"], &done["values"]), (&json!("rendered"), &json!(1)));
    let parts = texts(&parts);
    assert_eq!(parts[0], format!("Bearer {CANARY}"));
    assert_eq!(parts[1], CANARY);
    assert!(texts(&basic_parts)[0].starts_with("Basic eC1hY2Nlc3MtdG9rZW46"));
    assert_eq!(refused["why"], "refused");
    assert!(refused["text"].as_str().unwrap().contains("evil.example"));
    assert!(leaked.is_empty());
}

#[test]
fn what_it_keeps_survives_a_restart() {
    let dir = directory();
    let placeholder = json!({"do": "placeholder", "lease": "l", "credential": "c", "prefix": "p_"});
    let mut vault = Vault::start(dir.path());
    vault.put("github", CANARY);
    let (before, _) = vault.ask(placeholder.clone(), &[]);
    let ca = vault.open["ca_sha256"].clone();
    assert_eq!(vault.end(), Some(0));

    let mut vault = Vault::start(dir.path());
    let (after, _) = vault.ask(placeholder, &[]);
    let (listed, _) = vault.ask(json!({"do": "list"}), &[]);

    assert_eq!(before["text"], after["text"]);
    assert_eq!(vault.open["ca_sha256"], ca);
    assert_eq!(listed["secrets"][0]["name"], "github");
    assert!(!listed.to_string().contains(CANARY));
}

#[test]
fn it_is_confined_before_it_answers() {
    let dir = directory();
    let vault = Vault::start(dir.path());
    let status = std::fs::read_to_string(vault.proc("status")).unwrap();

    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "Threads:\t1"] {
        assert!(status.lines().any(|found| found == line), "{line} is missing in\n{status}");
    }
    // An undumpable process's files in /proc belong to root, so an ordinary user cannot read them.
    if rustix::process::geteuid().is_root() {
        let limits = std::fs::read_to_string(vault.proc("limits")).unwrap();
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().collect::<Vec<_>>()[4..6], ["0", "0"]);
        assert_eq!(std::fs::read(vault.proc("environ")).unwrap(), b"");
        for entry in std::fs::read_dir(vault.proc("fd")).unwrap() {
            let entry = entry.unwrap();
            let target = std::fs::read_link(entry.path()).unwrap();
            let standard = ["0", "1", "2"].iter().any(|fd| entry.file_name() == *fd);
            assert!(standard || target.starts_with(dir.path()), "{target:?} is open");
        }
    }
}

#[test]
fn its_memory_holds_no_value_after_use_and_nobody_else_may_read_it() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());
    vault.put("github", CANARY);
    vault.render("github", "api.example");
    vault.ask(json!({"do": "mask", "environment": "dev"}), &[CANARY.as_bytes()]);
    vault.ask(json!({"do": "list"}), &[]);

    match std::fs::File::open(vault.proc("mem")) {
        Err(error) => {
            assert!(!rustix::process::geteuid().is_root(), "{error}");
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        }
        Ok(memory) => {
            assert!(rustix::process::geteuid().is_root(), "a process of this user can read it");
            assert_eq!(mappings_with(&vault, &memory, CANARY.as_bytes()), Vec::<String>::new());
            // The search itself works: a name is found.
            assert_ne!(mappings_with(&vault, &memory, b"github"), Vec::<String>::new());
        }
    }
}

#[test]
fn its_keys_lie_in_locked_memory_that_not_even_root_can_read_where_the_kernel_hides_it() {
    let dir = directory();
    let vault = Vault::start(dir.path());
    let status = std::fs::read_to_string(vault.proc("status")).unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    let locked: u64 = locked.trim().strip_suffix(" kB").unwrap().parse().unwrap();

    // The key that wraps, the one of rows, the one of placeholders: a page each.
    assert!(locked >= 12, "{locked} KiB are locked");
    if rustix::process::geteuid().is_root() {
        use std::os::unix::fs::FileExt;
        let maps = std::fs::read_to_string(vault.proc("maps")).unwrap();
        let memory = std::fs::File::open(vault.proc("mem")).unwrap();
        for line in maps.lines().filter(|line| line.contains("secretmem")) {
            let begin = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
            assert!(memory.read_exact_at(&mut [0; 32], begin).is_err(), "{line}");
        }
    }
}

#[test]
fn where_its_keys_cannot_be_locked_it_does_not_start_and_says_what_to_do() {
    // Root locks what it wants; what becomes of a key then, sys/keys.rs shows for root as well.
    if rustix::process::geteuid().is_root() {
        return;
    }
    let dir = directory();
    let key = format!("created-file:{}", dir.path().join("vault.key").display());
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -l 0 && exec \"$0\" \"$@\"", PROXYD]);
    let mut vault = Vault::spawn_by(limited, dir.path(), &key, Stdio::inherit());

    let (open, _) = vault.read().unwrap();

    assert_eq!(open["why"], "key");
    assert!(open["text"].as_str().unwrap().contains("LimitMEMLOCK="), "{open}");
    assert_eq!(vault.wait(), Some(78));
}

fn mappings_with(vault: &Vault, memory: &std::fs::File, wanted: &[u8]) -> Vec<String> {
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string(vault.proc("maps")).unwrap();
    let writable = maps.lines().filter(|line| line.split(' ').nth(1).unwrap().starts_with("rw"));
    let mut found = Vec::new();
    for line in writable {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let from = u64::from_str_radix(from, 16).unwrap();
        let to = u64::from_str_radix(to, 16).unwrap();
        let mut bytes = vec![0; usize::try_from(to - from).unwrap()];
        if memory.read_exact_at(&mut bytes, from).is_ok()
            && bytes.windows(wanted.len()).any(|window| window == wanted)
        {
            found.push(line.to_owned());
        }
    }
    found
}

#[test]
fn it_ends_with_its_socket_and_at_a_message_that_is_out_of_bounds() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());
    let (unknown, _) = vault.ask(json!({"do": "reveal", "name": "github"}), &[]);
    assert_eq!(unknown["why"], "invalid");
    assert_eq!(vault.end(), Some(0));

    let mut vault = Vault::start(dir.path());
    vault.socket.as_mut().unwrap().write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert_eq!(vault.wait(), Some(1));
}

#[test]
fn a_key_that_others_can_read_or_that_is_another_is_refused_with_78() {
    let dir = directory();
    Vault::start(dir.path()).end();
    let key = dir.path().join("vault.key");
    let argument = format!("file:{}", key.display());
    for (bytes, mode, reason) in [
        (vec![7; 32], 0o644, "others can read it"),
        (vec![7; 32], 0o600, "not the one it was made with"),
        (vec![7; 8], 0o600, "less than 32 bytes"),
    ] {
        std::fs::write(&key, bytes).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();

        let mut vault = Vault::start_with(dir.path(), &argument);

        assert_eq!(vault.open["why"], "key");
        assert!(vault.open["text"].as_str().unwrap().contains(reason), "{}", vault.open);
        assert_eq!(vault.wait(), Some(78));
    }
    std::fs::remove_file(&key).unwrap();
    let mut vault = Vault::start(dir.path());
    assert_eq!(vault.open["why"], "key", "a new key was made for an old vault");
    assert_eq!(vault.wait(), Some(78));
}

#[test]
fn a_passphrase_opens_what_it_closed() {
    let dir = directory();
    let path = dir.path().join("passphrase");
    std::fs::write(&path, "correct horse battery staple\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let argument = format!("passphrase:{}", path.display());

    let mut vault = Vault::start_with(dir.path(), &argument);
    vault.put("github", CANARY);
    assert_eq!(vault.open["key_source"], "passphrase");
    vault.end();
    let mut vault = Vault::start_with(dir.path(), &argument);
    let (_, parts) = vault.render("bare", "a.example");

    assert_eq!(parts[0], CANARY.as_bytes());
}

#[test]
fn two_of_them_never_share_a_vault() {
    let dir = directory();
    let mut first = Vault::start(dir.path());
    let key = format!("created-file:{}", dir.path().join("vault.key").display());

    let mut second = Vault::spawn(dir.path(), &key, Stdio::piped());
    let mut says = BufReader::new(second.child.stderr.take().unwrap());
    let mut line = String::new();
    says.read_line(&mut line).unwrap();
    assert!(line.contains("waits until the former one"), "{line}");

    first.put("github", CANARY);
    assert_eq!(first.end(), Some(0));
    assert!(second.read().is_some());
    assert_eq!(texts(&second.render("github", "api.example").1)[1], CANARY);
}

/// Whether a client that trusts the authority takes the leaf for that name, now.
fn verifies(ca: &str, leaf: &[u8], name: &str) -> bool {
    use rustls::client::{WebPkiServerVerifier, danger::ServerCertVerifier};
    use rustls::pki_types::{CertificateDer, UnixTime, pem::PemObject};
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap()).unwrap();
    let provider = rustls::crypto::aws_lc_rs::default_provider().into();
    let builder = WebPkiServerVerifier::builder_with_provider(roots.into(), provider);
    let name = name.to_owned().try_into().unwrap();
    let verifier = builder.build().unwrap();
    verifier.verify_server_cert(&leaf.into(), &[], &name, &[], UnixTime::now()).is_ok()
}

#[test]
fn it_signs_leaf_certificates_and_nothing_else() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());
    let key = rcgen::KeyPair::generate().unwrap();
    let spki = rcgen::PublicKeyData::subject_public_key_info(&key);
    let authority = vault.open["authorities"][0].clone();
    let (id, ca) = (&authority["id"], authority["pem"].as_str().unwrap());
    let leaf =
        |host: &str| json!({"do": "leaf", "authority": id, "host": host, "life_seconds": 3600});

    let (done, parts) = vault.ask(leaf("api.example"), &[&spki]);
    let (bad_host, none) = vault.ask(leaf("*.example"), &[&spki]);
    let (bad_key, _) = vault.ask(leaf("api.example"), &[b"not a key"]);

    assert_eq!(done["is"], "leaf");
    for (name, right) in [("api.example", true), ("other.example", false)] {
        assert_eq!(verifies(ca, &parts[0], name), right, "{name}");
    }
    assert_eq!(bad_host["why"], "invalid");
    assert!(none.is_empty());
    assert_eq!(bad_key["is"], "failed");
}

/// Whether each of these authorities issues what verifies by its own certificate.
fn all_issue(vault: &mut Vault, authorities: &[Value]) -> bool {
    let key = rcgen::KeyPair::generate().unwrap();
    let spki = rcgen::PublicKeyData::subject_public_key_info(&key);
    authorities.iter().all(|authority| {
        let leaf = json!({"do": "leaf", "authority": authority["id"], "host": "api.example",
            "life_seconds": 3600});
        let (done, parts) = vault.ask(leaf, &[&spki]);
        done["is"] == "leaf"
            && verifies(authority["pem"].as_str().unwrap(), &parts[0], "api.example")
    })
}

fn authorities(vault: &Vault) -> Vec<Value> {
    vault.open["authorities"].as_array().unwrap().clone()
}

/// A kill comes at another moment in each round: before a write, in the middle of it, after it.
#[test]
fn killed_in_the_middle_of_a_rotation_it_has_all_authorities_that_are_in_use() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());
    let mut rounds = [0; 2];
    for round in 0..40 {
        let before = authorities(&vault);
        let used = json!([before[0]["id"]]);
        let rotate = json!({"do": "authorities", "wanted": true, "used": used});
        let head = serde_json::to_vec(&rotate).unwrap();
        let length = u32::try_from(head.len()).unwrap().to_le_bytes();
        let body = [&7_u32.to_le_bytes()[..], &length, &head].concat();
        let mut frame = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
        frame.extend(body);
        vault.socket.as_mut().unwrap().write_all(&frame).unwrap();
        let moment = Instant::now() + Duration::from_micros(250 * round);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        drop(vault);

        vault = Vault::start(dir.path());

        let after = authorities(&vault);
        assert!(after.contains(&before[0]), "round {round}: the one in use is gone");
        let made = after.iter().filter(|authority| !before.contains(authority)).count();
        assert!(made <= 1 && after.len() <= 3, "round {round}: {after:?}");
        assert!(all_issue(&mut vault, &after), "round {round}");
        rounds[made] += 1;
    }
    // The first kill comes before anything was done, the last one long after.
    assert!(rounds[1] > 0, "{rounds:?}: no rotation was ever made");
}

#[test]
fn a_retired_authoritys_key_is_overwritten_and_issues_no_more() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());
    let old = authorities(&vault).remove(0);
    let file = dir.path().join("vault.sqlite");
    let holds = |authority: &Value| {
        use rustls::pki_types::{CertificateDer, pem::PemObject};
        let pem = authority["pem"].as_str().unwrap();
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        std::fs::read(&file).unwrap().windows(der.len()).any(|window| window == &*der)
    };
    let tend = |vault: &mut Vault, wanted: bool, used: Value| {
        vault.ask(json!({"do": "authorities", "wanted": wanted, "used": used}), &[]).0
    };

    // The one that issued until then is never retired with the same word.
    let both = tend(&mut vault, true, json!([]));
    assert_eq!((both["authorities"].as_array().unwrap().len(), &both["authorities"][1]), (2, &old));
    assert!(holds(&old) && holds(&both["authorities"][0]));
    let kept = tend(&mut vault, false, json!([old["id"]]));
    assert_eq!(kept, both);
    let one = tend(&mut vault, false, json!([]));

    assert_eq!(one["authorities"], json!([both["authorities"][0]]));
    // Its row, and the sealed key in it, are not to be found in the file any more.
    assert!(!holds(&old) && holds(&one["authorities"][0]));
    assert!(!all_issue(&mut vault, &[old]));
    assert!(all_issue(&mut vault, one["authorities"].as_array().unwrap()));
    // Nor in the journal of the write that did it.
    let journal = std::fs::metadata(dir.path().join("vault.sqlite-journal"));
    assert_eq!(journal.map_or(0, |journal| journal.len()), 0);
}

/// What a traffic process under foreign control could try: it speaks the protocol, and wants more
/// than policies define.
#[test]
fn a_traffic_process_that_asks_for_more_than_policies_define_gets_nothing() {
    let dir = directory();
    let mut vault = Vault::start(dir.path());
    for name in ["github", "refresh", "aws", "proxy"] {
        let value = if name == "aws" { format!("AKIAEXAMPLE:{CANARY}") } else { CANARY.into() };
        assert_eq!(vault.put(name, &value).0["is"], "secrets");
    }
    let changed = |name: &str, key: &str, value: &str| {
        let mut credential = named(name);
        credential[key] = json!(value);
        credential
    };
    let render =
        |named: Value, host: &str| json!({"do": "render", "credential": named, "host": host});
    let signing = |region: &str, service: &str, date: &str| {
        let mut asked = render(named("objects"), "objects.example");
        asked["scope"] = json!({"region": region, "service": service, "date": date});
        asked
    };
    let mut with_secret = render(named("github"), "api.example");
    with_secret["secret"] = json!("refresh");
    let none = json!({"region": "", "service": "", "date": ""});
    let mut for_nothing = render(named("objects"), "objects.example");
    for_nothing["scope"] = none;

    for (asked, why) in [
        // Other hosts, definitions and environments than the files have.
        (render(named("github"), "evil.example"), "refused"),
        (render(changed("github", "print", &"0".repeat(64)), "api.example"), "refused"),
        (render(changed("github", "environment", "prod"), "api.example"), "refused"),
        (render(changed("github", "name", "aws"), "api.example"), "refused"),
        // What tokens are had for: a worker shows it to the policy's server, nobody else gets it.
        (render(named("calendar"), "calendar.example"), "unavailable"),
        // Other scopes, days to come, and none at all.
        (signing("us-east-1", "s3", "20990101"), "refused"),
        (signing("eu-central-1", "iam", "20990101"), "refused"),
        (signing("eu-central-1", "s3", "20990101"), "refused"),
        (render(named("objects"), "objects.example"), "refused"),
        (for_nothing, "refused"),
        // Names of its own making, and secrets of policies as if they were a proxy's password.
        (with_secret, "invalid"),
        (json!({"do": "password", "secret": "github", "user": "u"}), "refused"),
        (json!({"do": "password", "secret": "refresh", "user": "u"}), "refused"),
        (json!({"do": "needles", "credentials": [named("bare")]}), "invalid"),
        (json!({"do": "values"}), "invalid"),
        (json!({"do": "fetch", "url": "https://evil.example/"}), "invalid"),
    ] {
        let (answer, parts) = vault.ask(asked.clone(), &[]);
        assert_eq!(answer["why"], why, "{asked}: {answer}");
        assert!(parts.is_empty() && !answer.to_string().contains(CANARY), "{asked}");
    }
    // Names and dates are an operator's to see; no value is among them.
    let (listed, parts) = vault.ask(json!({"do": "list"}), &[]);
    assert!(parts.is_empty() && !listed.to_string().contains(CANARY), "{listed}");
    // The same words, by the rules, are answered.
    assert_eq!(vault.render("github", "api.example").0["is"], "rendered");
    let (password, _) = vault.ask(json!({"do": "password", "secret": "proxy", "user": "u"}), &[]);
    assert_eq!(password["is"], "rendered");
}

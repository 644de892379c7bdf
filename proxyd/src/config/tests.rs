//! Every key of proxyd.toml, and what is said about wrong ones.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use policies::{Host, HostPattern};

use super::way_out::{Dial, Exempt};
use super::*;

pub(super) fn load(text: &str) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("proxyd.toml");
    std::fs::write(&path, text).unwrap();
    let arguments = Arguments::parse_from_rest(vec!["--config".into(), path.into()]);
    Config::load(&arguments.unwrap())
}

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

/// Every key there is.
pub(super) const WHOLE: &str = r#"
runtime-dir = "/r"
state-dir = "/s"
policies-dir = "/p"
log = "debug"
trusted-uids = [7]
trusted-users = ["root"]
key = "file:/k"
former-key = "file:/f"
secret-directories = ["/secrets"]
idle-timeout = "7s"
tunnel-idle-timeout = "8s"
audit-keep = "9d"
audit-bytes = "1GiB"
lease-addresses = ["172.17.0.1"]
trust-store = "/roots.pem"
[commands.op]
command = ["/usr/bin/op", "read", "op://agents/token"]
format = "json"
timeout = "2s"
refresh = "9s"
stale = "1s"
input = "local:op-login"
user = "root"
environment = { HOME = "/h" }
read = ["/h"]
write = ["/h/cache"]
[openbao]
url = "https://bao.example:8200/"
namespace = "team"
mounts = ["kv/team"]
refresh = "8s"
stale = "3s"
login = { method = "approle", mount = "here", role = "id", secret = "local:bao" }
[aws]
region = "eu-central-1"
secrets-url = "https://secrets.example"
sts-url = "https://sts.example/"
refresh = "8s"
stale = "3s"
[aws.login]
method = "web-identity"
secret = "file:/t"
role = "arn:aws:iam::1:role/a"
session-name = "s1"
[aws.roles.deploy]
role = "arn:aws:iam::123456789012:role/deploy"
session-name = "s2"
external-id = "ext-1"
session-policy = '{"Version": "2012-10-17"}'
session-policy-arns = ["arn:aws:iam::aws:policy/ReadOnlyAccess"]
duration = "15m"
keys = "local:aws-deploy"
[aws.roles.other]
role = "arn:aws:iam::123456789012:role/other"
web-identity = "file:/t2"
[resolver]
servers = ["10.0.0.2", "[::1]:5353"]
[upstreams."Billing.Example"]
dial = "127.0.0.1:8443"
ca = "/ca.pem"
client-certificate = "/c.pem"
client-key = "/k.pem"
connect-timeout = "3s"
protocols = ["h2"]
connections-max = 8
[upstreams."*.corp.example"]
dial = ["10.0.0.1", "[fd00::1]:444"]
proxy = "none"
[upstreams."far.example"]
proxy = { url = "https://other.example:8080", ca = "/p.pem" }
[upstream-proxy]
url = "http://proxy.example:3128/"
resolve = "proxy"
user = "svc"
password = "local:corp"
no-proxy = ["*.near.example", "10.0.0.0/8"]
"#;

/// Every key that this user's proxyd may have: only root's starts programs as somebody else.
fn whole() -> String {
    match rustix::process::geteuid().is_root() {
        true => WHOLE.to_owned(),
        false => WHOLE.replace("user = \"root\"\nenv", "env"),
    }
}

#[test]
fn every_key_has_its_effect() {
    let config = load(&whole()).unwrap();

    assert_eq!(config.layout.runtime, Path::new("/r"));
    assert_eq!(config.state(), Path::new("/s/proxyd"));
    assert_eq!(config.layout.policies, Path::new("/p"));
    assert_eq!(config.log, tracing::Level::DEBUG);
    assert_eq!(config.trusted_uids, [7, 0]);
    let retention = &config.retention;
    assert_eq!(retention.keep, Some(Duration::from_secs(9 * 24 * 3600)));
    assert_eq!(retention.bytes, Some(1 << 30));
    assert_eq!(config.key.as_deref(), Some("file:/k"));
    assert_eq!(config.former_key.as_deref(), Some("file:/f"));
    assert_eq!(config.secret_directories, [Path::new("/secrets")]);
    let seconds = |idle: &Idle| [idle.exchange, idle.tunnel].map(|time| time.as_secs());
    assert_eq!(seconds(&config.idle), [7, 8]);
    assert_eq!(config.lease_addresses, ["172.17.0.1".parse::<IpAddr>().unwrap()]);
    let servers = ["10.0.0.2:53", "[::1]:5353"].map(|text| text.parse().unwrap());
    assert_eq!(config.resolver, servers);
}

#[test]
fn every_key_of_a_command_has_its_effect() {
    let config = load(&whole()).unwrap();
    if let Err(error) = load(WHOLE) {
        assert!(error.to_string().contains("commands.op.user"), "{error}");
        assert!(!rustix::process::geteuid().is_root());
    }

    let command = &config.backends.commands["op"];
    assert_eq!(command.program.argv, ["/usr/bin/op", "read", "op://agents/token"]);
    assert_eq!(command.format, Format::Json);
    assert_eq!(command.timeout, Duration::from_secs(2));
    let [refresh, stale] = [9, 1].map(Duration::from_secs);
    assert_eq!(command.freshness, Freshness { refresh, stale });
    assert_eq!(command.input.as_ref().unwrap().to_string(), "local:op-login");
    assert_eq!(command.program.environment["HOME"], "/h");
    assert_eq!(command.program.read, [Path::new("/h")]);
    assert_eq!(command.program.write, [Path::new("/h/cache")]);
    let root = command.program.user.map(|account| (account.uid, account.gid));
    assert_eq!(root.is_some(), rustix::process::geteuid().is_root());
    assert_eq!(root.unwrap_or_default(), (0, 0));
    assert!(config.backends.uses("op-login") && !config.backends.uses("op"));
}

#[test]
fn every_key_of_a_secret_server_has_its_effect() {
    let (start, end) = (WHOLE.find("[openbao]").unwrap(), WHOLE.find("[aws]").unwrap());
    let server = load(&WHOLE[start..end]).unwrap().backends.openbao.unwrap();

    let [refresh, stale] = [8, 3].map(Duration::from_secs);
    let expected = OpenBao {
        url: "https://bao.example:8200".into(),
        namespace: Some("team".into()),
        mounts: vec!["kv/team".into()],
        method: Method::Approle,
        mount: "here".into(),
        role: "id".into(),
        secret: Some(policies::SecretRef::parse("local:bao").unwrap()),
        freshness: Freshness { refresh, stale },
    };
    assert_eq!(server, expected);
    assert!(load(&WHOLE[start..end]).unwrap().backends.uses("bao"));
}

#[test]
fn every_key_of_the_way_out_has_its_effect() {
    let config = load(&whole()).unwrap();

    let out = &config.way_out;
    assert_eq!(out.trust_store.as_deref(), Some(Path::new("/roots.pem")));
    let row = |pattern: &str| {
        let pattern = HostPattern::parse(pattern).unwrap();
        &out.rows.iter().find(|(own, _)| *own == pattern).unwrap().1
    };
    let billing = UpstreamRow {
        dial: vec![Dial::Socket("127.0.0.1:8443".parse().unwrap())],
        ca: Some("/ca.pem".into()),
        identity: Some(Identity { certificate: "/c.pem".into(), key: "/k.pem".into() }),
        proxy: Through::AsAll,
        connect_timeout: Duration::from_secs(3),
        protocols: Protocols::Http2,
        connections_max: Some(8),
    };
    assert_eq!(*row("billing.example"), billing);
    let corp = row("*.corp.example");
    assert_eq!(corp.proxy, Through::Direct);
    let dials =
        ["10.0.0.1".parse().map(Dial::Ip).ok(), "[fd00::1]:444".parse().map(Dial::Socket).ok()];
    assert_eq!(corp.dial, dials.map(Option::unwrap));
    let Through::Proxy(other) = &row("far.example").proxy else { panic!("no proxy") };
    assert_eq!((other.tls, other.port, other.resolve), (true, 8080, Resolve::Here));
    assert_eq!(other.ca.as_deref(), Some(Path::new("/p.pem")));
    let proxy = out.proxy.as_ref().unwrap();
    assert_eq!((proxy.tls, &proxy.host, proxy.port), (false, &host("proxy.example"), 3128));
    assert_eq!(proxy.resolve, Resolve::Proxy);
    let login = Login { user: "svc".into(), password: PasswordPlace::Vault("corp".into()) };
    assert_eq!(proxy.login, Some(login));
    let exempt = |name: &str| out.no_proxy.iter().any(|e: &Exempt| e.covers(&host(name)));
    assert!(exempt("a.near.example") && exempt("10.1.2.3"));
    assert!(!exempt("near.example") && !exempt("11.1.2.3"));
    let files = ["/roots.pem", "/ca.pem", "/c.pem", "/k.pem", "/p.pem"];
    let mut named = out.files();
    named.sort();
    let mut files: Vec<_> = files.iter().map(PathBuf::from).collect();
    files.sort();
    assert_eq!(named, files);
}

#[test]
fn mistakes_name_the_key_and_repeat_no_password() {
    let proxy = |rest: &str| format!("[upstream-proxy]\nurl = \"http://p.test:1\"\n{rest}\n");
    let row = |rest: &str| format!("[upstreams.\"a.test\"]\n{rest}\n");
    let command = |rest: &str| format!("[commands.op]\n{rest}\n");
    let server =
        |url: &str, login: &str| format!("[openbao]\nurl = \"{url}\"\nlogin = {{ {login} }}\n");
    let table = [
        ("unknown-key = 1\n".to_owned(), "unknown-key"),
        (row("dial = \"a:1\""), "dial"),
        (row("ca = \"ca.pem\""), "absolute"),
        (row("client-key = \"/k\""), "belong together"),
        (row("connect-timeout = \"0s\""), "connect-timeout"),
        (row("connect-timeout = \"1h\""), "connect-timeout"),
        (row("protocols = [\"h3\"]"), "protocols"),
        (row("connections-max = 0"), "connections-max"),
        (row("proxy = \"p.test:1\""), "proxy"),
        (row("proxy = { url = \"http://p.test:1\", no-proxy = [] }"), "no-proxy"),
        (row("proxy = { url = \"http://p.test:1\", odd = 1 }"), "odd"),
        (command("command = [\"op\"]"), "commands.op.command"),
        (command("command = []"), "commands.op.command"),
        (command("command = [\"/op\"]\ntimeout = \"1m\""), "commands.op.timeout"),
        (command("command = [\"/op\"]\nrefresh = \"0s\""), "commands.op.refresh"),
        (command("command = [\"/op\"]\nstale = \"soon\""), "commands.op.stale"),
        (command("command = [\"/op\"]\ninput = \"SECRET-CANARY\""), "commands.op.input"),
        (command("command = [\"/op\"]\ninput = \"exec:op\""), "commands.op.input"),
        (command("command = [\"/op\"]\nread = [\"h\"]"), "commands.op.read"),
        (command("command = [\"/op\"]\nwrite = [\"h\"]"), "commands.op.write"),
        (command("command = [\"/op\"]\nformat = \"xml\""), "format"),
        (command("command = [\"/op\"]\nenvironment = { \"A=B\" = \"c\" }"), "environment"),
        (command("command = [\"/op\"]\nuser = \"no-such-user\""), "commands.op.user"),
        (server("http://bao.test", "method = \"token\", secret = \"local:a\""), "openbao.url"),
        (server("https://bao.test/v1", "method = \"token\", secret = \"local:a\""), "openbao.url"),
        (server("https://bao.test", "method = \"token\""), "openbao.login.secret"),
        (
            server("https://bao.test", "method = \"token\", secret = \"SECRET-CANARY\""),
            "login.secret",
        ),
        (
            server("https://bao.test", "method = \"jwt\", secret = \"local:a\""),
            "openbao.login.role",
        ),
        (
            server("https://bao.test", "method = \"cert\", role = \"a\", secret = \"local:a\""),
            "login.secret",
        ),
        (
            server("https://bao.test", "method = \"cert\", role = \"a\", mount = \"a/../b\""),
            "login.mount",
        ),
        (server("https://bao.test", "method = \"userpass\""), "userpass"),
        ("log = \"loud\"\n".to_owned(), "loud"),
        ("[resolver]\nservers = [\"dns.test\"]\n".to_owned(), "dns.test"),
        ("lease-addresses = [\"eth0\"]\n".to_owned(), "lease-addresses"),
        ("trust-store = \"roots.pem\"\n".to_owned(), "trust-store"),
        ("[upstream-proxy]\nurl = \"socks5://p.test:1\"\n".to_owned(), "url"),
        ("[upstream-proxy]\nurl = \"http://p.test\"\n".to_owned(), "url"),
        ("[upstream-proxy]\nurl = \"http://u:SECRET-CANARY@p.test:1\"\n".to_owned(), "url"),
        (proxy("resolve = \"both\""), "resolve"),
        (proxy("user = \"u\""), "belong together"),
        (proxy("user = \"u\"\npassword = \"SECRET-CANARY\""), "password says where"),
        (proxy("user = \"u:v\"\npassword = \"local:x\""), "user"),
        (proxy("ca = \"/ca.pem\""), "https://"),
        (proxy("no-proxy = [\"10.0.0.1/8\"]"), "no-proxy"),
    ];
    for (text, word) in table {
        let error = load(&text).unwrap_err().to_string();

        assert!(error.contains(word), "{text:?} gave {error}");
        assert!(!error.contains("SECRET-CANARY"), "{error}");
    }
}

/// Every key that the file can have.
const KEYS: &[&str] = &[
    "runtime-dir",
    "state-dir",
    "policies-dir",
    "log",
    "trusted-uids",
    "trusted-users",
    "key",
    "former-key",
    "secret-directories",
    "command",
    "format",
    "timeout",
    "refresh",
    "stale",
    "input",
    "environment",
    "read",
    "write",
    "namespace",
    "mounts",
    "login",
    "method",
    "mount",
    "role",
    "secret",
    "region",
    "secrets-url",
    "sts-url",
    "session-name",
    "external-id",
    "session-policy",
    "session-policy-arns",
    "duration",
    "keys",
    "web-identity",
    "idle-timeout",
    "tunnel-idle-timeout",
    "audit-keep",
    "audit-bytes",
    "lease-addresses",
    "trust-store",
    "dial",
    "ca",
    "client-certificate",
    "client-key",
    "proxy",
    "connect-timeout",
    "protocols",
    "connections-max",
    "url",
    "resolve",
    "user",
    "password",
    "no-proxy",
];

#[test]
fn every_key_is_in_the_manual_and_tried_above() {
    let manual = include_str!("../../../systemd/man/proxyd.8.md");
    // The error for a key that is none lists all that are: none may be missing above.
    let top = load("no-such-key = 1\n").unwrap_err().to_string();
    let row = load("[upstreams.\"a.test\"]\nno-such-key = 1\n").unwrap_err().to_string();
    let proxy = load("[upstream-proxy]\nno-such-key = 1\n").unwrap_err().to_string();
    let command = load("[commands.a]\nno-such-key = 1\n").unwrap_err().to_string();
    let server = load("[openbao]\nno-such-key = 1\n").unwrap_err().to_string();
    let login = "[openbao]\nurl = \"https://a.test\"\nlogin = { no-such-key = 1 }\n";
    let login = load(login).unwrap_err().to_string();
    let aws = load("[aws]\nno-such-key = 1\n").unwrap_err().to_string();
    let keys_of = "[aws]\nregion = \"a\"\nlogin = { no-such-key = 1 }\n";
    let keys_of = load(keys_of).unwrap_err().to_string();
    let role = "[aws]\nregion = \"a\"\n[aws.roles.a]\nno-such-key = 1\n";
    let role = load(role).unwrap_err().to_string();
    let listed = format!("{top}{row}{proxy}{command}{server}{login}{aws}{keys_of}{role}");
    let words = listed.split('`').skip(1).step_by(2);
    let tables = [
        "no-such-key",
        "resolver",
        "upstreams",
        "upstream-proxy",
        "commands",
        "openbao",
        "aws",
        "roles",
    ];
    for word in words.filter(|word| !tables.contains(word)) {
        assert!(KEYS.contains(&word), "{word} is not in this list");
    }

    for key in KEYS {
        assert!(manual.contains(&format!("**{key}**")), "{key} is not in proxyd(8)");
        let mut words = WHOLE.split_ascii_whitespace();
        assert!(words.any(|word| word == *key), "{key} has no effect above");
    }
}

#[test]
fn a_changed_limit_on_silence_is_named_by_its_own_key() {
    let before = load("").unwrap();
    for key in ["idle-timeout", "tunnel-idle-timeout"] {
        let after = load(&format!("{key} = \"7s\"\n")).unwrap();

        assert_eq!(before.fixed_differences(&after), [key]);
    }
}

#[test]
fn a_file_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("proxyd.toml");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();

    let outcome = read(&path, true);

    assert!(matches!(outcome, Err(ConfigError::Writable { .. })));
}

//! Promise: a name inside a sandbox stands for what proxyd says, an address for nothing that the
//! policy does not list, and nothing that the sandbox writes or spells changes that.
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

use cleanhands_tests::installation::{Installation, Setup};
use cleanhands_tests::origin::{Origin, ok};

const POLICY: &str = r#"
[sandbox]
root = "host"
[[egress.allow]]
hosts = ["api.example", "*.long.example"]
methods = ["GET"]
paths = ["/hello"]
credential = "api"
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["read.example"]
methods = ["GET"]
addresses = ["127.0.0.1/32"]
[[egress.allow]]
hosts = ["10.9.8.7", "2001:db8::7"]
methods = ["GET"]
paths = ["/hello"]
addresses = ["127.0.0.1/32"]
[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.example", "*.long.example"]
"#;
const TOKEN: &str = "SECRET-CANARY-names-0ab15c6e77d2";

async fn started() -> (Installation, Origin) {
    let mut hosts: Vec<String> =
        ["api.example", "read.example", "10.9.8.7", "2001:db8::7"].map(str::to_owned).to_vec();
    hosts.extend(long_names());
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let origin = Origin::start(&hosts, |_| ok("", b"hello")).await;
    let mut setup = Setup::default().policy("dev", POLICY);
    for host in hosts {
        setup = origin.behind(host, setup);
    }
    let installation = tokio::task::block_in_place(|| Installation::start(&setup));
    installation.store_secret("api", TOKEN).await;
    (installation, origin)
}

/// Names of 75, 121 and 253 characters, the longest that there are.
fn long_names() -> Vec<String> {
    [75, 121, 253]
        .map(|length| {
            let mut name = ".long.example".to_owned();
            while name.len() < length {
                let left = length - name.len();
                // No label longer than 63, and none of length 0 at the front.
                let label = if left == 64 { 31 } else { left.min(63) };
                name = format!("{}{name}", "x".repeat(label));
                if name.len() < length {
                    name = format!(".{name}");
                }
            }
            name
        })
        .to_vec()
}

fn shell(installation: &Installation, script: &str) -> String {
    let (status, out, err) = tokio::task::block_in_place(|| installation.shell("dev", script));
    assert_eq!(status, Some(0), "{out}\n{err}");
    out
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_lookup_works_with_and_without_proxy_variables() {
    let (installation, _origin) = started().await;
    let script = "cat > /tmp/ask <<'X'\n\
        getent ahosts api.example | head -1 | cut -d' ' -f1\n\
        /workspace/intruder resolve api.example\n\
        getent ahostsv4 api.example | head -1 | cut -d' ' -f1\nX\n\
        bash /tmp/ask; \
        https_proxy=http://10.0.0.1:3128 ALL_PROXY=socks5h://10.0.0.1:1080 bash /tmp/ask; \
        env -i /bin/bash /tmp/ask; \
        getent ahosts unlisted.example | head -1 | cut -d' ' -f1; \
        getent hosts nodots || echo none";

    let out = installation.intrude("dev", &[], script);

    // Six ways to ask, three times: four of them are the intruder's.
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 20, "{out}");
    let address: Ipv4Addr = lines[0].parse().unwrap();
    assert_eq!(address.octets()[..2], [198, 18], "a real address was given: {out}");
    assert!(lines[..18].iter().all(|line| line == &lines[0]), "{out}");
    // Not listed: it gets an address too, so that the connection can be refused in words.
    assert_ne!(lines[18], lines[0]);
    assert_eq!(lines[19], "none");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_spelling_of_an_address_leads_to_the_host() {
    let (installation, origin) = started().await;
    let hosts_own = [
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)),
        TcpListener::bind((Ipv6Addr::LOCALHOST, 0)),
    ];
    let hosts_own: Vec<TcpListener> = hosts_own.into_iter().flatten().collect();
    let loopback = [
        "0.0.0.0",
        "0",
        "00",
        "0x0",
        "[::]",
        "[::1]",
        "localhost",
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "127.255.255.254",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "017700000001",
        "0x7f.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
    ];
    let metadata = [
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "0xa9.254.0251.254",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[fd00:ec2::254]",
        "[fe80::1]",
    ];
    let mut ports: Vec<u16> = hosts_own.iter().map(|l| l.local_addr().unwrap().port()).collect();
    ports.push(origin.port);
    let mut urls: Vec<String> = Vec::new();
    for port in ports {
        urls.extend(loopback.iter().map(|host| format!("http://{host}:{port}/hello")));
    }
    urls.extend(metadata.iter().map(|host| format!("http://{host}/latest/meta-data/")));
    let script = format!(
        "for url in {}; do echo \"$(curl -gs -o /dev/null --max-time 20 -w '%{{http_code}}' \
         $url) $? $url\"; done",
        urls.join(" ")
    );

    let out = shell(&installation, &script);

    assert_eq!(out.lines().count(), urls.len(), "{out}");
    for line in out.lines() {
        let (code, status) = line.split_once(' ').unwrap();
        let refused = code == "403" || (code == "000" && !status.starts_with("28 "));
        assert!(refused, "{line}");
    }
    for listener in hosts_own {
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "somebody came to the host's own port");
    }
    assert!(origin.seen().is_empty(), "{:?}", origin.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_sandbox_says_about_names_changes_no_destination() {
    let (installation, origin) = started().await;
    let ask = "curl -sk -o /dev/null --max-time 20 -w '%{http_code}\\n'";
    // Its own table of names, an address of its own choice, and the address of another name.
    let script = format!(
        "echo '10.1.2.3 api.example' 2>&- >> /etc/hosts; \
         {ask} --resolve api.example:443:10.1.2.3 https://api.example/hello; \
         {ask} --resolve api.example:443:127.0.0.1 https://api.example/hello; \
         other=$(getent ahosts read.example | head -1 | cut -d' ' -f1); \
         {ask} --resolve api.example:443:$other https://api.example/hello; \
         {ask} --connect-to api.example:443:read.example:443 https://api.example/hello; \
         {ask} https://api.example/hello"
    );

    let out = shell(&installation, &script);

    assert_eq!(out, "403\n000\n421\n421\n200\n");
    let seen = origin.seen();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(seen[0].values("host"), ["api.example"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_longer_than_a_common_name_may_be_are_intercepted() {
    let (installation, origin) = started().await;
    for name in long_names() {
        let script = format!(
            "curl -sS -w ' %{{http_code}}\\n' https://{name}/hello; \
             ./intruder certificate {name}"
        );

        let out = installation.intrude("dev", &[], &script);

        let (answer, shown) = out.trim_end().split_once('\n').unwrap();
        assert_eq!(answer, "hello 200", "{name}");
        let shown = rustls::pki_types::CertificateDer::from(hex::decode(shown).unwrap());
        let certificate = webpki::EndEntityCert::try_from(&shown).unwrap();
        // The subject is empty; the name stands where clients look for it.
        assert_eq!(certificate.subject(), b"", "{name}");
        assert_eq!(certificate.valid_dns_names().collect::<Vec<_>>(), [name]);
    }
    let lengths: Vec<usize> = origin.seen().iter().map(|r| r.values("host")[0].len()).collect();
    assert_eq!(lengths, [75, 121, 253]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listed_address_is_intercepted_with_a_certificate_that_names_it() {
    let (installation, origin) = started().await;
    for address in ["10.9.8.7", "[2001:db8::7]"] {
        let script = format!(
            "for path in hello other; do \
             curl -gsS -o /dev/null -w '%{{http_code}}\\n' https://{address}/$path; done; \
             curl -gsS https://{}/hello >/dev/null || echo refused",
            address.replace('7', "8")
        );

        let out = shell(&installation, &script);

        // curl verified both certificates; the address beside the listed one stands in no rule.
        assert!(out.starts_with("200\n403\n"), "{address}: {out}");
    }
    assert_eq!(origin.seen().len(), 2, "{:?}", origin.seen());
}

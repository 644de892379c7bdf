//! Every key of `[aws]`, and what is said about wrong ones.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use super::super::Freshness;
use super::super::tests::{WHOLE, load};
use super::*;

#[test]
fn every_key_about_aws_has_its_effect() {
    let (start, end) = (WHOLE.find("[aws]").unwrap(), WHOLE.find("[resolver]").unwrap());
    let backends = load(&WHOLE[start..end]).unwrap().backends;
    let place = |text: &str| policies::SecretRef::parse(text).unwrap();
    let assumed = |arn: &str, session_name: &str| Assumed {
        arn: arn.into(),
        session_name: session_name.into(),
        external_id: None,
        policy: None,
        policy_arns: Vec::new(),
        duration: Duration::from_secs(3600),
    };

    let [refresh, stale] = [8, 3].map(Duration::from_secs);
    let deploy = Assumed {
        external_id: Some("ext-1".into()),
        policy: Some("{\"Version\": \"2012-10-17\"}".into()),
        policy_arns: vec!["arn:aws:iam::aws:policy/ReadOnlyAccess".into()],
        duration: Duration::from_secs(900),
        ..assumed("arn:aws:iam::123456789012:role/deploy", "s2")
    };
    let other = assumed("arn:aws:iam::123456789012:role/other", "cleanhands");
    let roles = [
        ("deploy".to_owned(), AwsRole { assumed: deploy, by: By::Keys(place("local:aws-deploy")) }),
        ("other".to_owned(), AwsRole { assumed: other, by: By::WebIdentity(place("file:/t2")) }),
    ];
    let expected = Aws {
        region: "eu-central-1".into(),
        secrets_url: "https://secrets.example".into(),
        sts_url: "https://sts.example".into(),
        login: Some(AwsLogin::WebIdentity {
            token: place("file:/t"),
            role: assumed("arn:aws:iam::1:role/a", "s1"),
        }),
        roles: roles.into(),
        freshness: Freshness { refresh, stale },
    };
    assert_eq!(backends.aws.as_ref(), Some(&expected));
    assert!(backends.uses("aws-deploy") && !backends.uses("aws"));
    let default = load("[aws]\nregion = \"cn-north-1\"\n").unwrap().backends.aws.unwrap();
    assert_eq!(default.secrets_url, "https://secretsmanager.cn-north-1.amazonaws.com.cn");
    assert_eq!(default.sts_url, "https://sts.cn-north-1.amazonaws.com.cn");
}

#[test]
fn keys_are_had_without_tls_only_where_nobody_else_can_answer() {
    let aws = |login: &str| {
        let text = format!("[aws]\nregion = \"eu-west-1\"\nlogin = {{ {login} }}\n");
        load(&text).map(|config| config.backends.aws.unwrap())
    };
    let container = |url: &str| aws(&format!("method = \"container\", url = \"{url}\""));
    for url in [
        "http://169.254.170.2/v2/credentials/x",
        "http://169.254.170.23/v1/credentials",
        "http://[fd00:ec2::23]/v1/credentials",
        "http://127.0.0.1:51679/x",
    ] {
        assert_eq!(container(url).unwrap().plain_url(), Some(url));
    }
    assert_eq!(container("https://agent.example/x").unwrap().plain_url(), None);
    for url in ["http://agent.example/x", "http://169.254.1.1/x", "http://10.0.0.1/x", "ftp://x"] {
        assert!(container(url).unwrap_err().to_string().contains("aws.login.url"), "{url}");
    }
    let instance = aws("method = \"instance\"").unwrap();
    assert_eq!(instance.plain_url(), Some("http://169.254.169.254"));
    let other = aws("method = \"instance\", url = \"http://[::1]:1338/\"").unwrap();
    assert_eq!(other.plain_url(), Some("http://[::1]:1338"));
    for url in ["https://169.254.169.254", "http://169.254.169.254/latest", "http://10.0.0.1"] {
        let wrong = aws(&format!("method = \"instance\", url = \"{url}\"")).unwrap_err();
        assert!(wrong.to_string().contains("aws.login.url"), "{url}");
    }
}

#[test]
fn mistakes_about_aws_name_the_key_and_repeat_no_secret() {
    let aws = |rest: &str| format!("[aws]\nregion = \"eu-west-1\"\n{rest}\n");
    let arn = "arn:aws:iam::123456789012:role/a";
    let role =
        |rest: &str| aws(&format!("[aws.roles.a]\nrole = \"{arn}\"\nkeys = \"local:k\"\n{rest}"));
    let table = [
        ("[aws]\nregion = \"Frankfurt\"\n".to_owned(), "aws.region"),
        (aws("secrets-url = \"http://s.test\""), "aws.secrets-url"),
        (aws("sts-url = \"https://s.test/x\""), "aws.sts-url"),
        (aws("login = { method = \"keys\" }"), "aws.login.secret"),
        (aws("login = { method = \"keys\", secret = \"SECRET-CANARY\" }"), "aws.login.secret"),
        (aws("login = { method = \"keys\", secret = \"exec:a\" }"), "aws.login.secret"),
        (
            aws("login = { method = \"keys\", secret = \"local:a\", role = \"r\" }"),
            "aws.login.role",
        ),
        (
            aws("login = { method = \"web-identity\", secret = \"file:/t\", role = \"a\" }"),
            "aws.login.role",
        ),
        (aws("login = { method = \"instance\", role = \"a/b\" }"), "aws.login.role"),
        (aws("login = { method = \"profile\" }"), "profile"),
        (aws(&format!("[aws.roles.a]\nrole = \"{arn}\"")), "aws.roles.a.keys"),
        (aws("[aws.roles.a]\nrole = \"a\"\nkeys = \"local:k\""), "aws.roles.a.role"),
        (aws(&format!("[aws.roles.\"a b\"]\nrole = \"{arn}\"")), "aws.roles.a b"),
        (role("web-identity = \"file:/t\""), "aws.roles.a.web-identity"),
        (role("session-name = \"a b\""), "aws.roles.a.session-name"),
        (role("external-id = \"a b\""), "aws.roles.a.external-id"),
        (role("session-policy = \"[]\""), "aws.roles.a.session-policy"),
        (role("session-policy-arns = [\"x\"]"), "aws.roles.a.session-policy-arns"),
        (role("duration = \"1m\""), "aws.roles.a.duration"),
    ];
    for (text, word) in table {
        let error = load(&text).unwrap_err().to_string();

        assert!(error.contains(word), "{text:?} gave {error}");
        assert!(!error.contains("SECRET-CANARY"), "{error}");
    }
}

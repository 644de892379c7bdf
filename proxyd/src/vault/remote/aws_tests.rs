//! What is asked of AWS, against the signatures of AWS's own client for the same bytes.

use std::time::Duration;

use super::*;
use crate::config::{Backends, Freshness};

const NOW: u64 = 1796007600;

fn assumed() -> Assumed {
    Assumed {
        arn: "arn:aws:iam::123456789012:role/deploy".to_owned(),
        session_name: "cleanhands".to_owned(),
        external_id: Some("ext-1".to_owned()),
        policy: Some("{}".to_owned()),
        policy_arns: vec!["arn:aws:iam::aws:policy/ReadOnlyAccess".to_owned()],
        duration: Duration::from_secs(900),
    }
}

fn remote(login: AwsLogin, by: By) -> Remote {
    let [refresh, stale] = [60, 5].map(Duration::from_secs);
    let role = AwsRole { assumed: assumed(), by };
    let aws = Aws {
        region: "eu-central-1".to_owned(),
        secrets_url: "https://secretsmanager.eu-central-1.amazonaws.com".to_owned(),
        sts_url: "https://sts.test:8443".to_owned(),
        login: Some(login),
        roles: [("deploy".to_owned(), role)].into(),
        freshness: Freshness { refresh, stale },
    };
    Remote(Backends { aws: Some(aws), ..Backends::default() })
}

fn named(text: &str) -> SecretRef {
    SecretRef::parse(text).unwrap()
}

/// Method, URL, headers, secret headers and body.
fn shown(ask: &Ask) -> (String, Vec<(String, String)>, String) {
    let Errand::Fetch(fetch) = &ask.errand else { panic!("no request") };
    let text = |part: &Secret| String::from_utf8_lossy(part.expose_secret()).into_owned();
    let (body, values) = ask.parts.split_last().unwrap();
    assert_eq!(values.len(), fetch.secret_headers.len());
    let mut headers = fetch.headers.clone();
    headers.extend(fetch.secret_headers.iter().cloned().zip(values.iter().map(text)));
    (format!("{} {}", fetch.method, fetch.url), headers, text(body))
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(known, _)| known == name).map(|(_, value)| &value[..])
}

#[test]
fn a_secret_is_asked_for_as_awss_own_client_asks_and_signs() {
    let remote = remote(AwsLogin::Keys(named("local:a")), By::Login);
    let keys = Secret::new(b"AKIAEXAMPLE:SECRET-CANARY-1:session/token==".to_vec());
    let secret = named("aws-secrets-manager:agents/github?stage=AWSPREVIOUS#token");

    let ask = remote.ask(&secret, &keys, NOW).unwrap();

    let (line, headers, body) = shown(&ask);
    assert_eq!(line, "POST https://secretsmanager.eu-central-1.amazonaws.com/");
    assert_eq!(body, r#"{"SecretId":"agents/github","VersionStage":"AWSPREVIOUS"}"#);
    assert_eq!(header(&headers, "X-Amz-Security-Token"), Some("session/token=="));
    assert_eq!(header(&headers, "X-Amz-Target"), Some("secretsmanager.GetSecretValue"));
    let expected = "AWS4-HMAC-SHA256 \
        Credential=AKIAEXAMPLE/20261130/eu-central-1/secretsmanager/aws4_request, \
        SignedHeaders=content-type;host;x-amz-date;x-amz-security-token;x-amz-target, \
        Signature=57f1f8ada1e6b45db5e9756eaf4ab0ba10dfb3bddcf897472afec818fe64c488";
    assert_eq!(header(&headers, "Authorization"), Some(expected));
}

#[test]
fn a_role_is_taken_by_keys_with_a_signature_and_by_a_web_identity_without() {
    let keys = Secret::new(b"AKIAEXAMPLE:SECRET-CANARY-1".to_vec());
    let form = "RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Fdeploy&\
        RoleSessionName=cleanhands&DurationSeconds=900&ExternalId=ext-1&Policy=%7B%7D&\
        PolicyArns.member.1.arn=arn%3Aaws%3Aiam%3A%3Aaws%3Apolicy%2FReadOnlyAccess";
    let role = named("aws-role:deploy");
    let by_keys = remote(AwsLogin::Keys(named("local:a")), By::Login);

    let (line, headers, body) = shown(&by_keys.ask(&role, &keys, NOW).unwrap());

    assert_eq!(line, "POST https://sts.test:8443/");
    assert_eq!(body, format!("Action=AssumeRole&Version=2011-06-15&{form}"));
    let expected = "AWS4-HMAC-SHA256 \
        Credential=AKIAEXAMPLE/20261130/eu-central-1/sts/aws4_request, \
        SignedHeaders=content-type;host;x-amz-date, \
        Signature=8359222026a9a8b3937dd1eddc5024a8aa7cddec6a6645774d12de93dda3a8b5";
    assert_eq!(header(&headers, "Authorization"), Some(expected));

    let token = Secret::new(b"JWT-CANARY/1".to_vec());
    let by = By::WebIdentity(named("file:/t"));
    let by_token = remote(AwsLogin::Keys(named("local:a")), by);
    let (line, headers, body) = shown(&by_token.ask(&role, &token, NOW).unwrap());
    assert_eq!(line, "POST https://sts.test:8443/");
    let action = "Action=AssumeRoleWithWebIdentity&Version=2011-06-15";
    assert_eq!(body, format!("{action}&{form}&WebIdentityToken=JWT-CANARY%2F1"));
    assert_eq!(header(&headers, "Authorization"), None);
}

#[test]
fn a_containers_agent_is_shown_its_token_and_an_instance_is_asked_for_by_its_address() {
    let (url, token) = ("http://169.254.170.23/v1/credentials", Some(named("file:/t")));
    let login = AwsLogin::Container { url: url.to_owned(), token };
    let container = remote(login, By::Login);
    let token = Secret::new(b"AGENT-CANARY".to_vec());
    let (line, headers, _) = shown(&container.ask_aws_login(&token).unwrap());
    assert_eq!(line, format!("GET {url}"));
    assert_eq!(header(&headers, "Authorization"), Some("AGENT-CANARY"));
    // No second header comes along with it.
    assert!(container.ask_aws_login(&Secret::new(b"a\r\nX-Evil: 1".to_vec())).is_err());

    let url = "http://169.254.169.254".to_owned();
    let instance = remote(AwsLogin::Instance { url: url.clone(), role: None }, By::Login);
    let ask = instance.ask_aws_login(&Secret::new(Vec::new())).unwrap();
    let Errand::Instance(asked) = &ask.errand else { panic!("another question") };
    assert_eq!((&asked.url, &asked.role), (&url, &None));
}

#[test]
fn what_the_configuration_does_not_name_is_not_asked_for() {
    let remote = remote(AwsLogin::Keys(named("local:a")), By::Login);
    let keys = Secret::new(b"AKIAEXAMPLE:SECRET-CANARY-1".to_vec());

    let other = remote.ask(&named("aws-role:other"), &keys, NOW).err().unwrap().to_string();
    assert!(other.contains("no [aws.roles.other]"), "{other}");
    let none = Remote::default();
    let none = none.ask(&named("aws-secrets-manager:a"), &keys, NOW).err().unwrap().to_string();
    assert!(none.contains("no [aws]"), "{none}");
    // Keys that are none are refused before anything is signed, and not quoted.
    let odd = Secret::new(b"NO-KEY-CANARY".to_vec());
    let odd = remote.ask(&named("aws-role:deploy"), &odd, NOW).err().unwrap().to_string();
    assert!(!odd.contains("CANARY"), "{odd}");
}

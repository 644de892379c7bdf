//! Answers of AWS: those that give something, those that refuse, and those that are none.

use super::*;

const NOW: u64 = 1_000;

fn text(meaning: Meaning) -> String {
    match meaning {
        Meaning::Had { value, life, .. } => {
            format!("{} {life:?}", String::from_utf8_lossy(value.expose_secret()))
        }
        Meaning::Refused(why) => format!("refused: {why}"),
        Meaning::Unknown(why) => format!("unknown: {why}"),
        Meaning::Later(why) => format!("later: {why}"),
    }
}

#[test]
fn a_secret_is_read_as_text_bytes_or_a_field_and_refusals_are_told_apart() {
    let [refresh, stale] = [60, 5].map(Duration::from_secs);
    let fresh = Freshness { refresh, stale };
    let json = r#"{"SecretString":"{\"token\":\"AWS-CANARY\",\"n\":7}","VersionId":"v"}"#;
    let binary = r#"{"SecretBinary":"QVdTLUNBTkFSWQ=="}"#;
    let error = |word: &str| format!("{{\"__type\":\"{word}\",\"message\":\"AWS-CANARY\"}}");
    for (entry, status, body, expected) in [
        ("a#token", 200, json.to_owned(), "AWS-CANARY Fresh(60s, 5s)"),
        ("a", 200, r#"{"SecretString":"AWS-CANARY"}"#.to_owned(), "AWS-CANARY Fresh(60s, 5s)"),
        ("a", 200, binary.to_owned(), "AWS-CANARY Fresh(60s, 5s)"),
        ("a#n", 200, json.to_owned(), "refused: the secret is no JSON with a field \"n\""),
        ("a#other", 200, json.to_owned(), "refused: the secret is no JSON with a field"),
        ("a#token", 200, binary.to_owned(), "refused: the secret is no JSON with a field"),
        ("a", 200, r#"{"SecretString":"short"}"#.to_owned(), "refused: the value has less than"),
        ("a", 200, "{}".to_owned(), "later: the secret has no value"),
        ("a", 200, "<html>AWS-CANARY".to_owned(), "later: AWS Secrets Manager's answer cannot"),
        ("a", 200, r#"{"SecretBinary":"*"}"#.to_owned(), "later: AWS Secrets Manager's answer"),
        (
            "a",
            400,
            error("com.amazonaws.secretsmanager#ResourceNotFoundException"),
            "refused: AWS Secrets Manager answers 400 ResourceNotFoundException",
        ),
        (
            "a",
            400,
            error("AccessDeniedException"),
            "refused: AWS Secrets Manager answers 400 AccessDeniedException",
        ),
        (
            "a",
            400,
            error("ExpiredTokenException"),
            "unknown: AWS Secrets Manager answers 400 ExpiredTokenException",
        ),
        ("a", 400, error("ThrottlingException"), "later: AWS Secrets Manager answers 400"),
        ("a", 403, error("AWS-CANARY"), "later: AWS Secrets Manager answers 403"),
        ("a", 500, error("AccessDeniedException"), "later: AWS Secrets Manager answers 500"),
        ("a", 302, String::new(), "later: AWS Secrets Manager answers 302"),
    ] {
        let entry = AwsEntry::parse(entry).unwrap();
        let meaning = text(secret(&entry, fresh, status, body.as_bytes()));
        assert!(meaning.starts_with(expected), "{meaning}");
        assert!(meaning.starts_with("AWS-CANARY Fresh") || !meaning.contains("CANARY"));
    }
}

fn xml(id: &str, secret: &str, token: &str, end: &str) -> String {
    format!(
        "<AssumeRoleResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\n\
         <AssumeRoleResult><Credentials><AccessKeyId>{id}</AccessKeyId>\
         <SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}</SessionToken>\
         <Expiration>{end}</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
    )
}

#[test]
fn keys_of_a_role_are_read_with_their_end_and_nothing_else_is_taken_for_keys() {
    let end = "1970-01-01T00:20:00Z";
    let error = |word: &str| {
        format!(
            "<ErrorResponse><Error><Type>Sender</Type><Code>{word}</Code></Error></ErrorResponse>"
        )
    };
    for (status, body, expected) in [
        (
            200,
            xml("ASIAEXAMPLE", "KEY-CANARY", "T/+=", end),
            "ASIAEXAMPLE:KEY-CANARY:T/+= Session(200s)",
        ),
        (200, xml("ASIAEXAMPLE", "KEY-CANARY", "", end), "later: the keys of the answer are none"),
        (200, xml("ASIAEXAMPLE", "KEY:CANARY", "T", end), "later: the keys of the answer are none"),
        (200, xml("ASIAEXAMPLE", "KEY CANARY", "T", end), "later: the keys of the answer are none"),
        (
            200,
            xml("ASIAEXAMPLE", "KEY-CANARY", "T", "soon"),
            "later: AWS STS's answer holds no keys",
        ),
        (
            200,
            xml("ASIAEXAMPLE", "KEY-CANARY", "T", "1970-01-01T00:10:00Z"),
            "later: the keys have expired already",
        ),
        (200, "<Credentials>KEY-CANARY".to_owned(), "later: AWS STS's answer holds no keys"),
        (403, error("AccessDenied"), "refused: AWS STS answers 403 AccessDenied"),
        (403, error("InvalidClientTokenId"), "unknown: AWS STS answers 403 InvalidClientTokenId"),
        (400, error("KEY-CANARY"), "later: AWS STS answers 400"),
        (503, error("AccessDenied"), "later: AWS STS answers 503 AccessDenied"),
    ] {
        let meaning = text(assumed(status, body.as_bytes(), NOW));
        assert_eq!(meaning, expected);
    }
    // Bytes that are no text, and a document cut anywhere.
    assert!(text(assumed(200, b"<Credentials>\xff", NOW)).starts_with("later"));
    let whole = xml("ASIAEXAMPLE", "KEY-CANARY", "TOKEN", end);
    for cut in 0..whole.len() - "</Credentials></AssumeRoleResult></AssumeRoleResponse>".len() {
        assert!(text(assumed(200, &whole.as_bytes()[..cut], NOW)).starts_with("later"), "{cut}");
    }
}

#[test]
fn keys_of_this_host_are_read_where_they_are_whole_and_good() {
    let keys = |more: &str, end: &str| {
        format!(
            "{{{more}\"AccessKeyId\":\"ASIAEXAMPLE\",\"SecretAccessKey\":\"KEY-CANARY\",\
             \"Token\":\"T\",\"Expiration\":\"{end}\",\"Type\":\"AWS-HMAC\"}}"
        )
    };
    let end = "1970-01-01T00:20:00Z";
    for (status, body, expected) in [
        (200, keys("", end), "ASIAEXAMPLE:KEY-CANARY:T Session(200s)"),
        (200, keys("\"Code\":\"Success\",", end), "ASIAEXAMPLE:KEY-CANARY:T Session(200s)"),
        (200, keys("\"Code\":\"Failed\",", end), "later: whoever gives this host keys has none"),
        (200, "KEY-CANARY".to_owned(), "later: whoever gives this host keys has none"),
        (401, keys("", end), "refused: whoever gives this host keys answers 401"),
        (301, keys("", end), "later: whoever gives this host keys answers 301"),
        (500, keys("", end), "later: whoever gives this host keys answers 500"),
    ] {
        assert_eq!(text(host_keys(status, body.as_bytes(), NOW)), expected);
    }
}

//! What a command wrote: the value, and how long it serves.

use std::time::Duration;

use serde::Deserialize;
use zeroize::Zeroizing;

use super::{Meaning, checked};
use crate::config::{Command, Format};
use crate::vault::mint::Life;
use crate::vault::secret::Secret;

/// Read in place: the value is not copied where nobody wipes it but in the output itself.
#[derive(Deserialize)]
struct Json<'a> {
    #[serde(borrow)]
    value: std::borrow::Cow<'a, str>,
    expires_in: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AwsProcess<'a> {
    version: u64,
    #[serde(borrow)]
    access_key_id: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    secret_access_key: std::borrow::Cow<'a, str>,
    #[serde(borrow, default)]
    session_token: std::borrow::Cow<'a, str>,
    expiration: Option<jiff::Timestamp>,
}

/// What the output means. A reason says nothing of it.
pub(super) fn read(command: &Command, output: &[u8], now: u64) -> Meaning {
    let read = match command.format {
        Format::Text => {
            let value = output.strip_suffix(b"\n").unwrap_or(output);
            checked(value).map(|value| (value, None))
        }
        Format::Json => json(output),
        Format::AwsProcess => aws_process(output, now),
    };
    let fresh = command.freshness;
    match read {
        Ok((_, Some(left))) if left.is_zero() => {
            Meaning::Later("the command's value has expired already".to_owned())
        }
        Ok((value, left)) => {
            let life = match left {
                Some(left) => Life::Until(left),
                None => Life::Fresh(fresh.refresh, fresh.stale),
            };
            Meaning::Had { value, rotated: None, life }
        }
        Err(reason) => Meaning::Later(format!("the command gave no secret: {reason}")),
    }
}

type Read = Result<(Secret, Option<Duration>), String>;

fn json(output: &[u8]) -> Read {
    let read: Json<'_> = serde_json::from_slice(output)
        .map_err(|_| "it wrote no JSON object with \"value\"".to_owned())?;
    let value = Zeroizing::new(read.value.into_owned());
    let left = read.expires_in.map(crate::vault::mint::seconds);
    Ok((checked(value.as_bytes())?, left))
}

fn aws_process(output: &[u8], now: u64) -> Read {
    let read: AwsProcess<'_> = serde_json::from_slice(output).map_err(|_| {
        "it wrote no JSON object with \"AccessKeyId\" and \"SecretAccessKey\"".to_owned()
    })?;
    if read.version != 1 {
        return Err("its \"Version\" is not 1".to_owned());
    }
    let (id, key) = (read.access_key_id, read.secret_access_key);
    let mut pieces = vec![id.as_bytes(), b":", key.as_bytes()];
    if !read.session_token.is_empty() {
        pieces.extend([b":", read.session_token.as_bytes()]);
    }
    let value = Secret::concat(&pieces);
    let left = read.expiration.map(|end| {
        let end = u64::try_from(end.as_second()).unwrap_or_default();
        crate::vault::mint::seconds(end.saturating_sub(now))
    });
    Ok((checked(value.expose_secret())?, left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Freshness, Program};

    fn shown(format: Format, output: &str) -> String {
        let command = Command {
            program: Program {
                argv: vec!["/bin/true".to_owned()],
                environment: Default::default(),
                read: Vec::new(),
                write: Vec::new(),
                user: None,
            },
            format,
            timeout: Duration::from_secs(1),
            freshness: Freshness {
                refresh: Duration::from_secs(60),
                stale: Duration::from_secs(5),
            },
            input: None,
        };
        match read(&command, output.as_bytes(), 1_000) {
            Meaning::Had { value, life, .. } => {
                format!("{} {life:?}", String::from_utf8_lossy(value.expose_secret()))
            }
            Meaning::Refused(why) | Meaning::Unknown(why) | Meaning::Later(why) => why,
        }
    }

    #[test]
    fn output_is_read_as_its_format_says_and_never_quoted() {
        let aws = r#"{"Version":1,"AccessKeyId":"ASIAEXAMPLE","SecretAccessKey":"OUT-CANARY"#;
        for (format, output, expected) in [
            (Format::Text, "OUT-CANARY\n", "OUT-CANARY Fresh(60s, 5s)"),
            (Format::Text, "OUT-CANARY\n\n", "OUT-CANARY\n Fresh(60s, 5s)"),
            (
                Format::Text,
                "short\n",
                "the command gave no secret: the value has less than 8 bytes",
            ),
            (Format::Json, r#"{"value":"OUT\u002dCANARY"}"#, "OUT-CANARY Fresh(60s, 5s)"),
            (Format::Json, r#"{"value":"OUT-CANARY","expires_in":9}"#, "OUT-CANARY Until(9s)"),
            (
                Format::Json,
                r#"{"value":"OUT-CANARY","expires_in":0}"#,
                "the command's value has expired already",
            ),
            (
                Format::Json,
                "OUT-CANARY",
                "the command gave no secret: it wrote no JSON object with \"value\"",
            ),
            (
                Format::AwsProcess,
                &format!(
                    "{aws}\",\"SessionToken\":\"T\",\"Expiration\":\"1970-01-01T00:20:00Z\"}}"
                ),
                "ASIAEXAMPLE:OUT-CANARY:T Until(200s)",
            ),
            (Format::AwsProcess, &format!("{aws}\"}}"), "ASIAEXAMPLE:OUT-CANARY Fresh(60s, 5s)"),
            (
                Format::AwsProcess,
                &format!("{aws}\",\"Expiration\":\"1970-01-01T00:10:00Z\"}}"),
                "the command's value has expired already",
            ),
        ] {
            assert_eq!(shown(format, output), expected, "{output}");
        }
    }
}

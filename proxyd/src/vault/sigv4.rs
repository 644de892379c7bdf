//! An AWS access key, and the key that is derived from it for one day, region and service.
//!
//! The secret key stays here. What is handed over signs for that scope alone and is worth nothing
//! a week after its day (AWS Signature Version 4, "Deriving a signing key").

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::VaultError;
use super::secret::Secret;

/// The parts of a stored value: `ID:SECRET`, or `ID:SECRET:SESSION-TOKEN`.
pub(super) struct AccessKey<'a> {
    pub id: &'a [u8],
    pub secret: &'a [u8],
    pub session: &'a [u8],
}

/// Reads a stored value; the reason says nothing of it.
pub(super) fn parse(value: &Secret) -> Result<AccessKey<'_>, VaultError> {
    let mut parts = value.expose_secret().split(|byte| *byte == b':');
    let (id, secret, session) = (parts.next(), parts.next(), parts.next().unwrap_or_default());
    let visible = |part: &[u8]| part.iter().all(u8::is_ascii_graphic);
    match (id, secret, parts.next()) {
        (Some(id), Some(secret), None)
            if id.len() >= 8
                && secret.len() >= 8
                && [id, secret, session].map(visible) == [true; 3] =>
        {
            Ok(AccessKey { id, secret, session })
        }
        _ => Err(VaultError::Refused(
            "the secret's value is no AWS access key: store it as ID:SECRET or ID:SECRET:TOKEN"
                .into(),
        )),
    }
}

/// The signing key for that scope.
pub(super) fn signing_key(secret: &[u8], date: &str, region: &str, service: &str) -> Secret {
    let first = Secret::concat(&[b"AWS4", secret]);
    let mut key = mac(first.expose_secret(), date.as_bytes());
    for text in [region, service, "aws4_request"] {
        key = mac(key.expose_secret(), text.as_bytes());
    }
    key
}

fn mac(key: &[u8], text: &[u8]) -> Secret {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(text);
    Secret::new(mac.finalize().into_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derives_the_key_of_the_published_example() {
        let secret = b"wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";

        let key = signing_key(secret, "20150830", "us-east-1", "iam");

        assert_eq!(
            hex::encode(key.expose_secret()),
            "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"
        );
    }

    #[test]
    fn a_value_that_is_no_access_key_is_refused_without_being_shown() {
        for (value, good) in [
            ("AKIAEXAMPLE:SECRET-CANARY-1", true),
            ("AKIAEXAMPLE:SECRET-CANARY-1:session/token==", true),
            ("SECRET-CANARY-1", false),
            ("a:SECRET-CANARY-1", false),
            ("AKIAEXAMPLE:SECRET-CANARY-1:a:b", false),
            ("AKIAEXAMPLE:SECRET CANARY 1", false),
        ] {
            let secret = Secret::new(value.as_bytes().to_vec());
            let parsed = parse(&secret);
            assert_eq!(parsed.is_ok(), good, "{value}");
            let text = parsed.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(!text.contains("CANARY"));
        }
    }
}
